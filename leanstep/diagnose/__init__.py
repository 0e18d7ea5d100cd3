"""Name the lines that waste a training step.

    with diagnose.watch() as watch:
        for batch in loader:
            train_step(batch)
            watch.step()
    print(watch.findings())

`step()` ends a step by hand from inside a script that runs under `leanstep diagnose`.
"""

from leanstep.diagnose.step_records import RULE_IDS, Finding, Limits
from leanstep.diagnose.watch import Watch, step, watch

__all__ = ["RULE_IDS", "Finding", "Limits", "Watch", "step", "watch"]
