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
# The device has no values to compare: its proofs are the host's.
prove_case = gpu_report.prove_case
gpu_report.prove_case = lambda case, device: prove_case(case, device=torch.device("cpu"))
arguments = ["--size", "tiny", "--budget", "0.01", "--out", str(folder)]
(folder / "exit_code").write_text(str(run(["gpu-report", "transpose-add", *arguments])))
