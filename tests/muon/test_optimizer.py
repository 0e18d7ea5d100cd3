"""NorMuon: schedulers, banks and splits, non-finite gradients, bad input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from leanstep.muon import NorMuon, reference, split_params, to_master


def master(optimizer, param):
    """Return the float32 weight of a parameter."""
    low = optimizer.state[param].get("residual")
    mode = optimizer.param_groups[0]["residual"]
    return param.detach().float().clone() if low is None else to_master(param.detach(), low, mode)


def small_model():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(20, 24), nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24), nn.Linear(24, 20)
    )


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_matches_the_reference_one_parameter_at_a_time():
    model = small_model().double()
    optimizer = NorMuon(split_params(model), lr=0.02)
    weight = model[1].weight.detach().clone()
    buffer, second = torch.zeros_like(weight), torch.zeros(48, 1, dtype=torch.float64)
    for step in range(5):
        model(
            torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(step))
        ).square().sum().backward()
        weight, buffer, second = reference.normuon(
            weight, model[1].weight.grad, buffer, second, lr=0.02, weight_decay=1.2
        )
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model[1].weight.detach(), weight, atol=1e-9, rtol=0)


def test_training_reduces_the_loss_and_a_scheduler_drives_both_halves():
    model = small_model()
    optimizer = NorMuon(split_params(model), lr=0.02)
    first = train(model, optimizer, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [lr / 2 for lr in before]
    assert train(model, optimizer, 30) < 0.7 * first


def test_split_table_gives_reasons():
    model = small_model()
    text = str(split_params(model))
    assert (
        "embedding table" in text and "output head" in text and "matrix of Linear" in text and "1-D" in text
    )
    chosen = {c.name: c.algorithm for c in split_params(model).choices}
    assert chosen == {
        "0.weight": "adam",
        "1.weight": "normuon",
        "1.bias": "adam",
        "3.weight": "normuon",
        "3.bias": "adam",
        "4.weight": "adam",
        "4.bias": "adam",
    }
    model[1].weight.requires_grad_(False)
    told = split_params(model, rule=lambda name, p, m: "muon" if name == "4.weight" else None)
    assert {c.name: c.algorithm for c in told.choices}["4.weight"] == "muon"
    assert {c.name: c.algorithm for c in told.choices}["1.weight"] == "frozen"
    assert sum(len(group["params"]) for group in told) == 6


def test_tied_head_appears_once_and_goes_to_adam():
    model = small_model()
    model[4].weight = model[0].weight
    assert [c.algorithm for c in split_params(model).choices if c.name.endswith("0.weight")] == ["adam"]
    assert sum(len(group["params"]) for group in split_params(model)) == 6


def step_once(param, grad, steps=1, **options):
    param = nn.Parameter(param.clone())
    optimizer = NorMuon([param], lr=0.1, **options)
    param.grad = grad.clone()
    for _ in range(steps):
        optimizer.step()
    return param.detach()


def test_bank_steps_like_its_matrices():
    weight, grad = torch.randn(3, 2, 20, 30), torch.randn(3, 2, 20, 30)
    got = step_once(weight, grad)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(got[i, j], step_once(weight[i, j], grad[i, j]), atol=1e-6, rtol=0)


# Shape, options, and the matrices or banks of them that a parameter then consists of.
PARTS = [
    ((48, 48), {"split": [24, 12, 12], "heads": [2, 1, 1]}, lambda t: t.split(12)),
    ((48, 48), {"split": [24, 12, 12], "heads": [2, 1, 1], "split_dim": 1}, lambda t: t.split(12, 1)),
    ((20, 30), {"split": [13, 7]}, lambda t: t.split([13, 7])),
    ((20, 30), {"split": [21, 9], "split_dim": 1}, lambda t: t.split([21, 9], 1)),
    ((24, 10), {"heads": 3}, lambda t: t.split(8)),
    ((3, 12, 16), {"heads": 4, "split_dim": 1}, lambda t: t.split(4, 2)),
    ((3, 18, 16), {"split": [12, 6], "heads": [3, 1]}, lambda t: t.split([4, 4, 4, 6], 1)),
    ((8, 3, 2, 2), {"flatten": "conv"}, lambda t: [t.flatten(1)]),
    ((8, 3, 2, 2), {"flatten": "conv", "heads": 2}, lambda t: t.flatten(1).split(4)),
]


@pytest.mark.parametrize("variance", ["long", "row"])
@pytest.mark.parametrize(("shape", "options", "parts"), PARTS)
def test_parts_step_like_separate_matrices(shape, options, parts, variance):
    weight, grad = torch.randn(shape), torch.randn(shape)
    got = step_once(weight, grad, steps=2, variance=variance, **options)
    for mine, w, g in zip(parts(got), parts(weight), parts(grad), strict=True):
        alone = step_once(w.contiguous(), g.contiguous(), steps=2, variance=variance)
        torch.testing.assert_close(mine, alone, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        ("shape", 2**0.5),
        ("spectral", 2**0.5),
        ("rms", 0.2 * 40**0.5),
        ("none", 1.0),
        (lambda r, c: r / c, 2.0),
    ],
)
def test_learning_rate_rules(rule, factor):
    weight, grad = torch.zeros(40, 20), torch.randn(40, 20)
    plain = step_once(weight, grad, lr_rule="none")
    torch.testing.assert_close(step_once(weight, grad, lr_rule=rule), plain * factor, atol=1e-6, rtol=1e-5)
    if rule == "spectral":
        swapped = step_once(weight, grad, lr_rule=rule, layout="in_out")
        torch.testing.assert_close(swapped, plain / factor, atol=1e-6, rtol=1e-5)


def test_a_rule_without_a_finite_factor_is_refused():
    with pytest.raises(ValueError, match="lr_rule: expected a finite factor for 40 x 20, got nan"):
        step_once(torch.zeros(40, 20), torch.randn(40, 20), lr_rule=lambda rows, cols: float("nan"))


def test_row_variance_and_no_variance():
    weight, grad = torch.zeros(20, 40), torch.randn(20, 40)
    off = step_once(weight, grad, variance="off", lr_rule="none")
    update, _ = reference.nesterov(grad, torch.zeros_like(grad), 0.95)
    torch.testing.assert_close(off, -0.1 * reference.polar(update), atol=1e-5, rtol=0)
    want, _ = reference.reduce_variance(reference.polar(update), torch.zeros(20, 1), 0.95, "row")
    torch.testing.assert_close(
        step_once(weight, grad, variance="row", lr_rule="none"), -0.1 * want, atol=1e-5, rtol=0
    )


def test_zero_gradient_matrix_in_a_bank_only_decays():
    weight, grad = torch.randn(2, 20, 30), torch.randn(2, 20, 30)
    grad[1] = 0
    got = step_once(weight, grad, weight_decay=1.0)
    torch.testing.assert_close(got[1], weight[1] * (1 - 0.1 * 0.1), atol=1e-6, rtol=0)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-9, 1e37])
def test_gradient_scale_does_not_change_the_step(scale):
    weight, grad = torch.zeros(20, 30), torch.randn(20, 30)
    torch.testing.assert_close(step_once(weight, grad * scale), step_once(weight, grad), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_non_finite_gradient_skips_the_whole_step_and_is_counted(bad, where):
    model = small_model()
    optimizer = NorMuon(split_params(model))
    train(model, optimizer, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    list(model.parameters())[where].grad.view(-1)[3] = bad
    optimizer.step()
    assert optimizer.skipped_steps == 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key])
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[1][key][name])
    train(model, optimizer, 1, first=9)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("mode", ["nearest", "truncate"])
def test_bfloat16_weight_with_residual_follows_the_float32_run(mode):
    grads = [torch.randn(24, 40) for _ in range(6)]
    start = torch.randn(24, 40).bfloat16()
    full, half = nn.Parameter(start.float()), nn.Parameter(start.clone())
    a, b = NorMuon([full], lr=1e-3), NorMuon([half], lr=1e-3, residual=mode)
    for grad in grads:
        full.grad, half.grad = grad.clone(), grad.bfloat16()
        full.grad = half.grad.float()
        a.step()
        b.step()
    assert torch.equal(master(b, half), full.detach())
    assert not torch.equal(full, start.float())


def test_step_is_bitwise_repeatable_and_leaves_gradients_alone():
    results = []
    for _ in range(2):
        model = small_model()
        optimizer = NorMuon(split_params(model))
        train(model, optimizer, 3)
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_order_of_parameters_does_not_matter():
    weights, grads = [torch.randn(10, 14) for _ in range(5)], [torch.randn(10, 14) for _ in range(5)]
    results = []
    for order in (range(5), reversed(range(5))):
        params = [nn.Parameter(w.clone()) for w in weights]
        optimizer = NorMuon([params[i] for i in order])
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_closure_value_is_returned_and_parameters_without_gradient_stay():
    a, b = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4, 5))
    optimizer = NorMuon([a, b])
    still = b.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = a.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert torch.equal(b, still) and b not in optimizer.state


def bad_groups():
    matrix, vector = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(4))
    return [
        ("1-D in Muon", lambda: NorMuon([vector]), "at least two dimensions"),
        ("empty group", lambda: NorMuon([{"params": []}]), "empty group"),
        ("empty list", lambda: NorMuon([]), "empty parameter list"),
        ("duplicate", lambda: NorMuon([matrix, matrix]), "got it twice"),
        (
            "duplicate over groups",
            lambda: NorMuon([{"params": [matrix]}, {"params": [matrix]}]),
            "got it twice",
        ),
        ("unknown option", lambda: NorMuon([{"params": [matrix], "betas2": 1}]), "^betas2: unknown option"),
        (
            "adam option in muon",
            lambda: NorMuon([{"params": [matrix], "betas": (0.9, 0.9)}]),
            "^betas: unknown option",
        ),
        (
            "unknown adam option",
            lambda: NorMuon([matrix], adam={"beta3": 1}),
            "^adam: expected lr, .*'beta3'",
        ),
        ("algorithm", lambda: NorMuon([{"params": [matrix], "algorithm": "sgd"}]), "^algorithm: expected"),
        (
            "betas",
            lambda: NorMuon([{"params": [matrix], "algorithm": "adam", "betas": (1.0, 0.9)}]),
            "^betas: expected two numbers",
        ),
        (
            "algorithm of a model",
            lambda: split_params(nn.Linear(2, 2), algorithm="sgd"),
            "^algorithm: expected",
        ),
        ("rule of a model", lambda: split_params(nn.Linear(2, 2), rule=lambda *_: "sgd"), "^rule: expected"),
        ("nothing trainable", lambda: split_params(nn.ReLU()), "^model: expected at least one trainable"),
        ("split", lambda: NorMuon([matrix], split=[3, 3]), "add up to 4"),
        ("heads", lambda: NorMuon([matrix], heads=3), "heads that divide 4"),
        ("heads per part", lambda: NorMuon([matrix], split=[2, 2], heads=[1]), "^heads: expected one count"),
        ("lr", lambda: NorMuon([matrix], lr=-1.0), "^lr: expected"),
        ("momentum", lambda: NorMuon([matrix], momentum=1.0), "^momentum: expected"),
        ("multipliers", lambda: NorMuon([matrix], lr_mul=[1.0, 2.0]), "^lr_mul: expected"),
        (
            "list for a split",
            lambda: NorMuon([matrix], lr_mul=[1.0], heads=2),
            "^lr_mul: expected one number",
        ),
        (
            "strides",
            lambda: NorMuon([nn.Parameter(torch.zeros(3, 4, 6).mT)]),
            "contiguous parameter, whose matrices are views",
        ),
        ("rule", lambda: NorMuon([matrix], lr_rule="adam"), "^lr_rule: expected"),
        ("nan", lambda: NorMuon([matrix], coefficients=[(math.nan, 1, 1)]), "^coefficients: expected finite"),
        ("nonfinite", lambda: NorMuon([matrix], nonfinite="warn"), "^nonfinite: expected"),
        (
            "complex",
            lambda: NorMuon([nn.Parameter(torch.zeros(2, 2, dtype=torch.cfloat))]),
            "dense real floating",
        ),
    ]


@pytest.mark.parametrize(
    ("label", "make", "message"), bad_groups(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_bad_groups_are_refused_by_name(label, make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_gradient_raises_before_any_weight_moves():
    good, bad = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 6))
    optimizer = NorMuon([("good", good), ("bad", bad)])
    still = good.detach().clone()
    good.grad, bad.grad = torch.randn(4, 6), torch.randn(4, 6).to_sparse()
    with pytest.raises(ValueError, match="bad: expected a dense real gradient"):
        optimizer.step()
    assert torch.equal(good, still) and not optimizer.state


def test_adams_options_are_defaults_of_its_groups():
    model = small_model()
    adam = {"lr": 0.004, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}
    matrices, rest = NorMuon(split_params(model), lr=0.02, adam=adam).param_groups
    assert {key: rest[key] for key in adam} == adam
    assert matrices["lr"] == 0.02 and matrices["weight_decay"] == 1.2
    own = split_params(model, adam={"betas": (0.5, 0.6)})
    assert NorMuon(own, adam=adam).param_groups[1]["betas"] == (0.5, 0.6)
    assert NorMuon(split_params(model), lr=0.023).param_groups[1]["lr"] == pytest.approx(0.008)


def test_options_changed_between_steps_apply():
    weight, grads = torch.randn(24, 10), torch.randn(2, 24, 10)
    param = nn.Parameter(weight.clone())
    optimizer = NorMuon([param], lr=0.1)
    param.grad = grads[0]
    optimizer.step()
    middle, state = param.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"][0])
    optimizer.param_groups[0].update(lr=0.05, momentum=0.8, lr_rule="none")
    param.grad = grads[1]
    optimizer.step()
    want, *_ = reference.normuon(
        middle, grads[1], state["momentum_buffer"], state["second_momentum"].view(24, 1), lr=0.05,
        momentum=0.8, weight_decay=1.2, rule="none",
    )  # fmt: skip
    torch.testing.assert_close(param.detach(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("multiplier", [0.5, [1.0, 2.0, 0.5]])
def test_lr_mul_of_a_bank_and_of_its_matrices(multiplier):
    weight, grad = torch.randn(3, 20, 30), torch.randn(3, 20, 30)
    got = step_once(weight, grad, lr_mul=multiplier)
    for i in range(3):
        factor = multiplier[i] if isinstance(multiplier, list) else multiplier
        torch.testing.assert_close(got[i], step_once(weight[i], grad[i], lr_mul=factor), atol=1e-6, rtol=0)


def test_decoupled_decay_ignores_the_multiplier():
    weight, grad = torch.randn(2, 20, 40), torch.zeros(2, 20, 40)
    got = step_once(weight, grad, decay="decoupled", weight_decay=0.5, lr_mul=[3.0, 0.0])
    torch.testing.assert_close(got, weight * (1 - 0.1 * 0.5), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_parameter_steps_in_place(dtype):
    weight, grad = torch.randn(30, 20).to(dtype), torch.randn(30, 20).to(dtype)
    param = nn.Parameter(weight.mT.contiguous().mT)
    param.grad = grad.mT.contiguous().mT
    NorMuon([param], lr=0.1).step()
    torch.testing.assert_close(param.detach(), step_once(weight, grad), atol=1e-6, rtol=0.01)
