"""Every public path of the head on the GPU code path, with odd vocabularies, against fp64.

New memory holds NaN (conftest.py) and warnings are errors, including `out=` of the wrong shape. CI runs a
fixed number of examples; LEANSTEP_FUZZ=200 runs 200 per path and vocabulary (`make fuzz-gpu-route`).
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from kernel_checks.gpu_route_paths import PATHS, VOCABULARIES, Draw

from leanstep.logprob.engine import passes, tiles

EXAMPLES = int(os.environ.get("LEANSTEP_FUZZ", "2"))
# The interpreter is numpy, which warns of branches that are not taken.
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]


@pytest.fixture
def gpu_route(monkeypatch):
    """Make CPU tensors take the GPU code path."""
    monkeypatch.setattr(tiles, "CPU_TYPES", ())
    monkeypatch.setattr(passes, "launches_triton", lambda tensor: tensor.dtype != torch.float64)


def results(function, leaves, dtype, seed):
    """Return outputs, and gradients with a random upstream gradient."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in out]
    return [*(o.detach() for o in out), *torch.autograd.grad(out, leaves, upstream)]


def assert_as_good_as_plain(fast, plain, truth, floor, label):
    for index, (a, b, x) in enumerate(zip(fast, plain, truth, strict=True)):
        assert a.isfinite().all(), f"{label}: output {index} is not finite"
        error, other = (float((v.double() - x).abs().max()) for v in (a, b))
        bound = 3 * other + floor * max(1.0, float(x.abs().max()))
        assert error <= bound, f"{label}: output {index} is {error:.2e} from fp64, plain code {other:.2e}"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("path", PATHS)
def test_a_path_is_as_near_to_fp64_as_plain_code(path, vocabulary, gpu_route):
    for seed in range(EXAMPLES):
        draw = Draw(seed, vocabulary)
        if path.startswith("transformers"):
            pytest.importorskip("transformers")
        fast, plain, leaves = PATHS[path](draw)
        label = f"{path}, V {vocabulary}, seed {seed}, {draw}"
        truth = results(plain, leaves, torch.float64, seed)
        halves = draw.dtype == torch.bfloat16 or path.startswith("transformers")
        floor = 2e-3 if halves else 2e-6
        assert_as_good_as_plain(
            results(fast, leaves, draw.dtype, seed),
            results(plain, leaves, draw.dtype, seed),
            truth,
            floor,
            label,
        )
