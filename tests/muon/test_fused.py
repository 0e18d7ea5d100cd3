"""The Triton passes of a step, end to end in the interpreter on a CPU; torch computes the products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from leanstep.muon import NorMuon, reference, state
from leanstep.muon.fused import kernel, launches
from leanstep.muon.polar import Workspace, plan_polar
from leanstep.muon.state import Stack, from_master, to_master

pytestmark = pytest.mark.interpreter


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(state, "FUSED_DEVICES", ("cuda", "cpu"))


SHAPES = {
    **{"a": (20, 33), "b": (20, 33), "tall": (33, 20), "bank": (3, 20, 33), "qkv": (60, 33)},
    **{"gain": (7,), "bias": (20,), "table": (50, 9), "one": ()},
}


def trained(dtype, steps=2, bad=None, nonfinite="skip", lr=0.02, **options):
    """Return weights, state and skipped steps for every kind of parameter; gradient `bad` contains a NaN."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    params = {name: nn.Parameter(draw(*shape).to(dtype)) for name, shape in SHAPES.items()}
    params["turned"] = nn.Parameter(draw(33, 20).to(dtype).T)
    shared = {key: value for key, value in options.items() if key in ("decay", "residual")}
    groups = [
        {"params": [params[name] for name in ("a", "b", "tall", "turned")], **options},
        {"params": [params["bank"]], "lr_mul": [1.0, 2.0, 0.5], **options},
        {"params": [params["qkv"]], "split": [20] * 3, **options},
        {"params": [params["gain"], params["bias"], params["table"]], "algorithm": "adam", **shared},
        {"params": [params["one"]], "algorithm": "adam", "lr_mul": 2.0, **shared},
    ]
    optimizer = NorMuon(groups, lr=lr, compute_dtype=torch.float32, nonfinite=nonfinite)
    for step in range(steps):
        for name, param in params.items():
            param.grad = draw(*param.shape).to(dtype)
            if step == bad and name == "bias":
                param.grad[3] = float("nan")
        optimizer.step()
    state = {f"{n} {k}": v for n, p in params.items() for k, v in optimizer.state[p].items()}
    return {**{n: optimizer.master(p) for n, p in params.items()}, **state}, optimizer.skipped_steps


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"bad": 1}),
        (torch.float32, {"decay": "decoupled", "variance": "row", "nonfinite": "ignore"}),
        (torch.bfloat16, {"variance": "off", "residual": "truncate", "nesterov": False}),
    ],
)
def test_a_step_of_kernels_is_the_step_of_torch(dtype, options, monkeypatch):
    apart, skipped = trained(dtype, **options)
    monkeypatch.setattr(state, "FUSED_DEVICES", ("cuda", "cpu"))
    got, also_skipped = trained(dtype, **options)
    assert set(got) == set(apart) and skipped == also_skipped == int("bad" in options)
    for name, value in apart.items():
        if value.dtype != torch.int16:
            torch.testing.assert_close(got[name], value, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("shape", [(2, 20, 41), (1, 300, 33), (3, 24, 24)])
def test_a_step_is_as_close_to_float64_as_the_plain_formula(shape, fused, monkeypatch):
    monkeypatch.setattr(kernel, "MAX_PROGRAMS", 2)  # several tiles per program
    weight, grad, buffer = (torch.randn(shape) for _ in range(3))
    reduced = list(shape)
    reduced[reference.variance_axis(*shape[-2:])] = 1
    second = torch.rand(reduced)
    options = {"lr": 0.02, "weight_decay": 1.2}
    truth = reference.normuon(*(t.double() for t in (weight, grad, buffer, second)), **options)
    plain = reference.normuon(weight, grad, buffer, second, **options)
    param = nn.Parameter(weight.clone())
    param.grad = grad
    optimizer = NorMuon([param], compute_dtype=torch.float32, method="standard", **options)
    optimizer.state[param] = {"momentum_buffer": buffer.clone(), "second_momentum": second.clone()}
    optimizer.step()
    got = (param.detach(), *optimizer.state[param].values())
    for mine, theirs, want in zip(got, plain, truth, strict=True):
        error = (mine.double() - want).abs().max()
        assert error <= 2 * (theirs.double() - want).abs().max() + 1e-7


def test_a_step_that_is_not_finite_leaves_every_bit(fused):
    params = [nn.Parameter(torch.randn(9, 5)), nn.Parameter(torch.randn(5))]
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adam"}]
    optimizer = NorMuon(groups, compute_dtype=torch.float32)
    for bad in (None, float("inf"), float("nan")):
        for param in params:
            param.grad = torch.randn_like(param)
        before = [t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())]
        if bad is not None:
            params[0].grad[2, 3] = bad
        optimizer.step()
        after = [t for p in params for t in (p.detach(), *optimizer.state[p].values())]
        if bad is not None:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.skipped_steps == 2 and optimizer.state_dict()["param_groups"][0]["skipped_steps"] == 2
    assert optimizer.state[params[1]]["step"].item() == 1


def test_large_finite_gradients_are_not_taken_for_infinite_ones(fused):
    # The squares overflow, the largest magnitude does not.
    cpu, bad = torch.device("cpu"), torch.tensor([1.0, float("nan")])
    assert state.finite_on_device([torch.full((3, 3), 1e30)], cpu).item() == 1
    assert state.finite_on_device([torch.ones(2, dtype=torch.bfloat16), bad], cpu).item() == 0
    assert state.finite_on_device([torch.ones(0)], cpu).item() == 1


@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e30, 0.0])
def test_updates_of_any_scale_are_normalised_and_zero_stays_zero(scale):
    plan = plan_polar(40, 70, compute_dtype=torch.float32)
    grad = torch.randn(1, 40, 70).mul_(scale)
    stack = Stack(grad.clone(), grad, torch.zeros_like(grad), None, None, plan, 0.1, 0.0)
    group = {"momentum": 0.9, "nesterov": True, "eps_mode": "relative"}
    got = launches.normalized_updates([stack], plan, group, Workspace(), None)
    update, _ = reference.nesterov(grad.double(), torch.zeros_like(grad).double(), 0.9)
    torch.testing.assert_close(got.double(), reference.normalize(update), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "truncate"])
def test_low_bits_follow_the_rules_of_the_torch_code(mode):
    special = [0.0, 1e-40, 3.3895e38, -3.4e38, 1.0, -1.0 - 2**-9]
    bits = torch.randint(-(2**31), 2**31, (1, 8, 64)).to(torch.int32)
    master = bits.view(torch.float32)
    master = torch.where(master.isfinite(), master, torch.ones_like(master))
    master[0, 0, : len(special)] = torch.tensor(special)
    weight, low = from_master(master, mode)
    plan = plan_polar(8, 64)
    stack = Stack(weight.clone(), weight, master, None, low.clone(), plan, 0.0, 0.0)
    group = {"lr": 0.0, "variance": "long", "decay": "cautious", "residual": mode}
    launches.write_stacks([stack], torch.zeros(1, 8, 64), group, Workspace(), None)
    assert torch.equal(stack.weight.view(torch.int16), weight.view(torch.int16))
    assert torch.equal(to_master(stack.weight, stack.residual, mode), to_master(weight, low, mode))


def test_bias_correction_on_the_device_is_exact_at_any_step():
    for step in (1, 2, 60, 5000):
        group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-10, "decay": "cautious", "residual": "none"}
        weight, grad, first, second = (
            torch.randn(20),
            torch.randn(20),
            torch.randn(20) / 9,
            torch.rand(20) / 9,
        )
        options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-10, "weight_decay": 5.0}
        wide = [t.double() for t in (weight, grad, first, second)]
        truth = reference.adam(*wide, step, **options)
        plain = reference.adam(weight, grad, first, second, step, **options)
        state = {"exp_avg": first.clone(), "exp_avg_sq": second.clone(), "step": torch.tensor(float(step))}
        moved = weight.clone()
        launches.step_adams([(moved, grad, state)], group, (0.01, 0.01**2 * 5.0), None)
        for mine, theirs, want in zip(
            (moved, state["exp_avg"], state["exp_avg_sq"]), plain, truth, strict=True
        ):
            assert (mine - want).abs().max() <= 2 * (theirs - want).abs().max() + 1e-7


def test_rate_and_momentum_on_the_device_are_read_there(fused):
    def step(place):
        generator = torch.Generator().manual_seed(1)
        params = [nn.Parameter(torch.randn(s, generator=generator)) for s in ((6, 9), (9, 6), (5,))]
        groups = [
            {"params": params[:1]},
            {"params": params[1:2], "decay": "decoupled"},
            {"params": params[2:], "algorithm": "adam"},
        ]
        optimizer = NorMuon(groups, lr=0.02, compute_dtype=torch.float32)
        for group in optimizer.param_groups:
            group["lr"] = place(group["lr"])
        for group in optimizer.param_groups[:2]:
            group["momentum"] = place(0.9)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        return params

    for plain, read in zip(step(float), step(torch.tensor), strict=True):
        torch.testing.assert_close(read, plain, atol=1e-7, rtol=1e-6)


def test_launches_grow_with_layouts_not_with_matrices(fused, monkeypatch):
    counts, launched = [], []
    for number in (2, 8):
        for name in ("momentum", "normalize", "variance", "write", "adam"):
            original = getattr(kernel, f"{name}_kernel")

            class Counted:
                def __getitem__(self, grid, original=original, name=name):
                    launched.append(name)
                    return original[grid]

            monkeypatch.setattr(kernel, f"{name}_kernel", Counted())
        matrices = [nn.Parameter(torch.randn(4, 6)) for _ in range(number)]
        gains = [nn.Parameter(torch.randn(4 + i)) for i in range(number)]
        optimizer = NorMuon([{"params": matrices}, {"params": gains, "algorithm": "adam"}])
        for param in (*matrices, *gains):
            param.grad = torch.randn_like(param)
        optimizer.step()
        counts.append(sorted(launched))
        launched.clear()
        monkeypatch.undo()
        monkeypatch.setattr(state, "FUSED_DEVICES", ("cuda", "cpu"))
    assert counts[0] == counts[1] == sorted(("momentum", "normalize", "variance", "write", "adam"))


def test_kernels_are_launched_on_the_device_of_their_tensors(fused, monkeypatch):
    entered, original = [], torch.cuda.device_of

    def device_of(tensor):
        entered.append(tensor.device)
        return original(tensor)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    param = nn.Parameter(torch.randn(4, 6))
    param.grad = torch.randn(4, 6)
    NorMuon([param], compute_dtype=torch.float32).step()
    assert entered == [param.device] * 4
