"""`leanstep gpu-report` on the device that is not there; FOLDER holds predictions and gets the report."""

import sys
from pathlib import Path

import torch

from leanstep.cli import run
from leanstep.measure import timing
from leanstep.report import gpu_report

folder = Path(sys.argv[1])
gpu_report.PREDICTIONS = folder / "predictions.json"
timing.WARM_S = 0.0
# Of the C++ that a CPU build lacks.
torch.cuda.set_sync_debug_mode = lambda mode: None
torch.cuda.get_sync_debug_mode = lambda: 0
torch.zeros(1, device="cuda")
print(run(["gpu-report", "transpose-add", "--size", "tiny", "--budget", "0.01", "--out", str(folder)]))
