"""The fp64 run: bit-identical for an fp64 program, with the same random numbers for every program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from prove.captured_scripts import job
from torch import nn

from leanstep.prove.script_jobs import capture_script
from leanstep.prove.twin import Twin


@pytest.mark.parametrize("dropout", ["0.0", "0.3"])
def test_the_fp64_run_of_an_fp64_script_has_the_same_bits(dropout: str):
    script = job("double.py", "--dropout", dropout)
    plain, in_fp64 = capture_script(script), capture_script(replace(script, twin=True))
    assert len(plain.updates) == 2 and plain.error is None and in_fp64.error is None
    for a, b in zip(plain.updates, in_fp64.updates, strict=True):
        assert a.losses == b.losses and a.draws == b.draws
        for kind in ("gradients", "changes"):
            for name, sketch in getattr(a, kind).items():
                assert torch.equal(sketch.projection, getattr(b, kind)[name].projection), (kind, name)


@pytest.mark.parametrize("options", [(), ("--autocast",), ("--dtype", "bfloat16")])
def test_random_draws_are_those_of_the_original_run(options: tuple[str, ...]):
    script = job("policy.py", *options, "--dropout", "0.3")
    plain, in_fp64 = capture_script(script), capture_script(replace(script, twin=True))
    for a, b in zip(plain.updates, in_fp64.updates, strict=True):
        assert a.draws == b.draws
        assert b.loss == pytest.approx(a.loss, abs=2e-6 if not options else 3e-2)
    assert {sketch.dtype for sketch in in_fp64.updates[0].gradients.values()} == {"float64"}


def test_explicit_dtypes_are_fp64_and_draw_as_written():
    def program():
        torch.manual_seed(1)
        return [
            torch.randn(20),
            torch.rand(20, dtype=torch.bfloat16),
            torch.randn(5, dtype=torch.float64),
            torch.empty(30).uniform_(-1, 1),
            torch.zeros(3, dtype=torch.float16),
            torch.randn(20).half().float(),
            torch.from_numpy(np.ones(3, dtype=np.float32)),
            nn.Linear(3, 4).bfloat16().weight.detach(),
            torch.normal(0.0, 1.0, (6,)),
            torch.multinomial(torch.tensor([0.2, 0.3, 0.5]), 40, replacement=True),
            torch.nn.init.trunc_normal_(torch.empty(50)),
            torch.ones(4).type(torch.FloatTensor),
        ]

    plain = program()
    with Twin():
        in_fp64 = program()
    assert [t.dtype for t in in_fp64 if t.is_floating_point()] == [torch.float64] * 11
    for number, (a, b) in enumerate(zip(plain, in_fp64, strict=True)):
        # Only the round trip through half precision differs: a computation is not rounded in fp64.
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-3 if number == 5 else 1e-6, atol=1e-7)


def test_in_place_changes_through_a_cast_reach_the_tensor():
    with Twin():
        weight = torch.ones(3)
        weight.float().add_(1.0)
        assert weight.tolist() == [2.0] * 3
        half = weight.half()
        half.add_(1.0)
        assert weight.tolist() == [2.0] * 3 and half.tolist() == [3.0] * 3
        half.half().add_(1.0)
        assert half.tolist() == [4.0] * 3


def test_torch_is_restored_afterwards():
    functions = (torch.compile, torch.set_default_dtype, nn.Parameter.__new__, nn.Module._apply)
    with Twin():
        assert torch.compile(sum) is sum
    assert torch.get_default_dtype() is torch.float32 and torch.ones(1).dtype is torch.float32
    assert functions == (torch.compile, torch.set_default_dtype, nn.Parameter.__new__, nn.Module._apply)


def test_an_op_without_an_fp64_kernel_runs_in_fp32_and_is_named():
    library = torch.library.Library("leanstep_test", "DEF")
    library.define("single(Tensor x) -> Tensor")

    def single(x):
        if x.dtype is torch.float64:
            raise RuntimeError("\"single\" not implemented for 'Double'")
        return x * 2

    library.impl("single", single, "CPU")
    twin = Twin()
    with twin:
        result = torch.ops.leanstep_test.single(torch.ones(2))
    assert result.dtype is torch.float64 and result.tolist() == [2.0, 2.0]
    assert list(twin.fallbacks) == ["leanstep_test::single"]
