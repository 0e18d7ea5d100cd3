"""The public paths of tests/rehearse, with Triton's launches recorded: a script for a rehearsal.

recorded_paths.py FILE [ROOM ...]: writes the launches to FILE as JSON. What no public path there launches is
launched here: Adam, and relu² of an MLP.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import triton.runtime.jit as jit
from torch import nn

from leanstep.gpt.kernel import squared_relu
from leanstep.kernel_checks.launch_variants import recorded_launches
from leanstep.muon import NorMuon

PATHS = Path(__file__).resolve().parent.parent / "rehearse" / "scripts" / "public_paths.py"


def adam(dtype: torch.dtype, *sizes: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype, device="cuda")) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    NorMuon([{"params": parameters, "algorithm": "adam"}]).step()


def activations(*shape: int) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    squared_relu(x)
    squared_relu(x, torch.zeros_like(x))


out, *rooms = sys.argv[1:]
with recorded_launches(then=jit.JITFunction.run) as launches:
    sys.argv = [str(PATHS), *rooms]
    runpy.run_path(str(PATHS), run_name="__main__")
    for dtype in (torch.float32, torch.bfloat16):
        adam(dtype, 768, 50_257, 1)
        adam(dtype, *[4_096] * 8)
    activations(1_024, 3_072)
    activations(7, 5)
Path(out).write_text(json.dumps([launch.to_json() for launch in launches]))
