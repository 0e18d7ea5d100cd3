"""The public paths of tests/rehearse, with Triton's launches recorded: a script for a rehearsal.

recorded_paths.py FILE [ROOM ...]: writes the launches to FILE as JSON. What no public path there launches is
launched here: Adam, and the kernels of the GPT.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import triton.runtime.jit as jit
from torch import nn

from dev.kernel_checks.launch_variants import recorded_launches
from leanstep.muon import NorMuon
from recipes.speedrun.kernels import relu_product, softcap_rows

PATHS = Path(__file__).resolve().parents[2] / "rehearse" / "scripts" / "public_paths.py"


def adam(dtype: torch.dtype, *sizes: int) -> None:
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype, device="cuda")) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    NorMuon([{"params": parameters, "algorithm": "adam"}]).step()


def mlp_and_head(tokens: int, width: int, hidden: int, vocab: int) -> None:
    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    for backward in (False, True):
        relu_product(
            zeros(tokens, width), zeros(hidden, width), zeros(tokens, hidden), zeros(tokens, hidden), backward
        )
    logits = zeros(tokens, vocab)
    for ahead, grad in ((1, None), (1, logits), (3, zeros(tokens, vocab, dtype=torch.float8_e5m2))):
        index, weights = zeros(tokens, ahead, dtype=torch.int64), zeros(tokens, ahead, dtype=torch.float32)
        loss = zeros(tokens, dtype=torch.float32)
        softcap_rows(logits, grad, index, weights, loss, (23.0, 5.0, 7.5))


out, *rooms = sys.argv[1:]
with recorded_launches(then=jit.JITFunction.run) as launches:
    sys.argv = [str(PATHS), *rooms]
    runpy.run_path(str(PATHS), run_name="__main__")
    for dtype in (torch.float32, torch.bfloat16):
        adam(dtype, 768, 50_257, 1)
        adam(dtype, *[4_096] * 8)
    mlp_and_head(1_024, 768, 3_072, 50_304)
Path(out).write_text(json.dumps([launch.to_json() for launch in launches]))
