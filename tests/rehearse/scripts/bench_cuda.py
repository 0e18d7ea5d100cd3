"""`leanstep bench --device cuda` on the device that is not there: its control flow, its clocks, its JSON.

bench_cuda.py FOLDER: writes the objects there. Parity means nothing here, since values are assumed.
"""

import json
import sys
from pathlib import Path

import torch

from leanstep.case import get_case
from leanstep.cli import run
from leanstep.measure import timing
from leanstep.measure.parity import dtype_name

timing.WARM_S = 0.0
folder = Path(sys.argv[1])
torch.zeros(1, device="cuda")
common = ["--device", "cuda:0", "--dtype", "bf16", "--size", "tiny", "--budget", "0.01"]
for case, rows in {
    "logprob-linear": "leanstep,verl-triton,cut-cross-entropy,limit",
    "transpose-add": "leanstep,limit",
}.items():
    run(["bench", case, "--impl", rows, *common, "--json", str(folder / f"{case}.json")])
chosen = [get_case(name) for name in ("logprob-linear", "muon-step", "lens-loss")]
(folder / "defaults.json").write_text(
    json.dumps({c.name: [c.size_on("cuda"), dtype_name(c.dtype_on("cuda"))] for c in chosen})
)
