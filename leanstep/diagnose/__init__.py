"""Name the lines that waste a training step.

    with diagnose.watch() as watch:
        for batch in loader:
            train_step(batch)
            watch.step()
    print(watch.findings())

In a script that runs under `leanstep diagnose`, `step()` marks the end of a step.
"""

from leanstep.diagnose.findings import Finding
from leanstep.diagnose.rules import RULE_IDS, Limits
from leanstep.diagnose.watch import Watch, step, watch

__all__ = ["RULE_IDS", "Finding", "Limits", "Watch", "step", "watch"]
