"""The flat forward against the model of modules, over every switch; the head; attention in bands."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from speedrun.golden import TINY, batch, hidden, loss, make, scramble
from torch.profiler import ProfilerActivity, profile

from recipes.speedrun.reference import ReferenceGPT, dense_mask, softcap_loss
from recipes.speedrun.train import (
    GPT,
    Documents,
    Settings,
    Shape,
    attend,
    band_mask,
    head_loss,
    norm,
)

RECORD = replace(
    Shape(), model_dim=48, num_heads=6, mlp_hidden=96, bigram_vocab_size=301, window_block=5,
    dtype=torch.float32, bank_dtype=torch.float32,
)  # fmt: skip
# Pull request 233's ablations of the model (settings), and other layers (of the shape).
SWITCHES: dict[str, dict] = {
    "as it is": {},
    "post_attn_lambda_single": {"post_attn_lambda_single": True},
    "fold_post_attn": {"post_attn_lambda_single": True, "fold_post_attn": True},
    "fold_post_mlp": {"fold_post_mlp": True},
    "no final_post_mlp": {"final_post_mlp": False},
    "inject before": {"inject": "before"},
    "inject_attnless_layer": {"inject_attnless_layer": True},
    "resid_per_lane": {"resid_per_lane": True},
    "bank by index": {"flat_unbind": False},
    "one lane": {"shape": {"parallel_start": 99}},
    "attention everywhere": {"shape": {"attention_free_layers": ()}},
    "no pairs": {"shape": {"paired_layers": ()}},
    "no key offset": {"shape": {"key_offset_layers": ()}},
    "two skips": {"shape": {"skip_pairs": ((0, 1), (0, 3))}},
}


def built(build, shape: Shape, switch: dict, **fields) -> GPT:
    switch = dict(switch)
    shape = replace(shape, **{**switch.pop("shape", {}), **fields})
    return make(build, shape, **switch)


def results(model: GPT, data) -> dict[str, torch.Tensor]:
    """Loss, final states and every gradient, with an upstream gradient that is not one."""
    tokens, targets, cu = data
    out = {"hidden": hidden(model, tokens, cu).detach()}
    total = loss(model, tokens, targets, cu)
    (total * 0.7).backward()
    out["loss"] = total.detach()
    small = []
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        # A few lambdas are too few values to judge rounding.
        if p.numel() < 1000:
            small.append(p.grad.flatten())
        else:
            out[name] = p.grad
    return {**out, "lambdas and gates": torch.cat(small)}


@pytest.mark.parametrize("shape", [TINY, RECORD], ids=["tiny", "record"])
@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_flat_equals_modules_in_float64(shape: Shape, switch: dict):
    if shape is RECORD and "shape" in switch:
        pytest.skip("the layers of the tiny shape")
    wide = {"dtype": torch.float64, "bank_dtype": torch.float64}
    modules = scramble(built(ReferenceGPT, shape, switch, **wide))
    flat = built(GPT, shape, switch, **wide)
    flat.load_state_dict(modules.state_dict())
    theirs, ours = (results(model, batch()) for model in (modules, flat))
    for name, want in theirs.items():
        assert (ours[name] - want).abs().max() <= 1e-11 * want.abs().max() + 1e-13, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [2, 41, 83, 401])
def test_flat_is_no_further_from_float64_than_modules(dtype: torch.dtype, length: int):
    """Distance from float64, root mean square over elements and seeds: single small tensors are luck."""
    sums: dict[str, torch.Tensor] = {}
    for seed in range(4):
        modules = scramble(built(ReferenceGPT, TINY, {}, dtype=dtype, bank_dtype=dtype), seed)
        flat = built(GPT, TINY, {}, dtype=dtype, bank_dtype=dtype)
        flat.load_state_dict(modules.state_dict())
        truth = copy.deepcopy(modules).double()
        data = batch(length=length, documents=(0, 1, 20, 300))
        ours, theirs, wants = (results(model, data) for model in (flat, modules, truth))
        for name, want in wants.items():
            terms = (ours[name].double() - want, theirs[name].double() - want, want)
            sums[name] = sums.get(name, 0) + torch.stack([x.square().mean() for x in terms])
    for name, (mine, other, size) in sums.items():
        floor = 1e-5 if dtype == torch.float32 else 1e-2
        assert (mine / size).sqrt() <= 3 * (other / size).sqrt() + floor, name


@pytest.mark.parametrize(
    ("folded", "plain"),
    [
        ({"fold_post_mlp": True}, {}),
        ({"post_attn_lambda_single": True, "fold_post_attn": True}, {"post_attn_lambda_single": True}),
    ],
    ids=["fold_post_mlp", "fold_post_attn"],
)
def test_folding_is_an_equivalence(folded: dict, plain: dict):
    wide = {"dtype": torch.float64, "bank_dtype": torch.float64}
    one = scramble(built(GPT, TINY, folded, **wide))
    other = built(GPT, TINY, plain, **wide)
    other.load_state_dict(one.state_dict())
    tokens, targets, cu = batch()
    assert (hidden(one, tokens, cu) - hidden(other, tokens, cu)).abs().max() < 1e-12
    assert abs(loss(one, tokens, targets, cu) - loss(other, tokens, targets, cu)) < 1e-10


def test_fold_post_attn_needs_its_lambda():
    with pytest.raises(ValueError, match="fold_post_attn: expected post_attn_lambda_single=true"):
        Settings(fold_post_attn=True)


def events_of_a_step(model: GPT) -> dict[str, int]:
    tokens, targets, cu = batch()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        loss(model, tokens, targets, cu).backward()
    return {event.key: event.count for event in prof.key_averages()}


def test_a_training_step_selects_nothing_in_its_backward():
    assert events_of_a_step(make(ReferenceGPT))["aten::select_backward"] > 10
    assert events_of_a_step(make(GPT, flat_unbind=False))["aten::select_backward"] > 10
    assert "aten::select_backward" not in events_of_a_step(make(GPT))


def test_a_bfloat16_model_keeps_its_lambdas_in_float32():
    kinds = {name: p.dtype for name, p in make(GPT, replace(TINY, dtype=torch.bfloat16)).named_parameters()}
    assert kinds["embed"] == kinds["smear_gate"] == torch.bfloat16 and kinds["mlp_bank"] == torch.float32
    assert kinds["resid_lambdas"] == kinds["scalars"] == torch.float32


# Attention


def dense(q, k, v, bounds, window, scale):
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=dense_mask(bounds, window), scale=scale)
    return out.transpose(0, 1)


def banded(q, k, v, bounds, window, scale):
    mask = band_mask(bounds, window, q.shape[-1], q.dtype)
    documents = Documents(torch.tensor(bounds), bounds[-1], masks={(window, False): mask})
    return attend(q, k, v, documents, window, False, scale)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(any),
    window=st.integers(0, 90),
    head_dim=st.sampled_from([8, 48, 72]),
)
def test_a_band_is_the_dense_mask(lengths: list[int], window: int, head_dim: int):
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    inputs = [torch.randn(bounds[-1], 2, head_dim, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(bounds[-1], 2, head_dim, dtype=torch.float64)
    found, want = (
        [out, *torch.autograd.grad(out, inputs, upstream)]
        for out in (function(*inputs, bounds, window, 0.2) for function in (banded, dense))
    )
    for ours, theirs in zip(found, want, strict=True):
        assert (ours - theirs).abs().max() < 1e-12


def test_short_documents_make_the_band_narrow():
    wide = band_mask([0, 2048], 1024, 16, torch.float32)
    narrow = band_mask(list(range(0, 2049, 32)), 1024, 16, torch.float32)
    assert narrow.numel() * 10 < wide.numel()


def test_norm_has_float32_s_epsilon_in_every_dtype():
    x = torch.full((1, 4), 1e-4)
    for dtype in (torch.float32, torch.bfloat16):
        want = x / (1e-8 + torch.finfo(torch.float32).eps) ** 0.5
        assert torch.allclose(norm(x.to(dtype)).float(), want, rtol=1e-2)


# Head

CAP = (23.0, 5.0, 7.5)


@pytest.mark.parametrize("rows", [1, 2, 41, 401])
@pytest.mark.parametrize("softcap", [CAP, (90.0, 5.0, 7.5)], ids=["cap", "high cap"])
def test_the_head_is_no_further_from_float64_than_the_plain_formula(rows: int, softcap):
    mtp, vocab, dim = (1.0, 0.5, 0.25), 131, 24
    # Non-contiguous hidden states, and some ignored targets.
    given = torch.randn(dim, rows).T, torch.randn(dim, vocab)
    targets = torch.randint(-1, vocab, (rows,))
    found = []
    for chunked, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
        states, head = (x.to(dtype).detach().requires_grad_() for x in given)
        if chunked:
            total = head_loss(states, head, targets, mtp, softcap, chunk_rows=7)
        else:
            total = softcap_loss(states @ head, targets, mtp, softcap).sum()
        found.append([total.detach(), *torch.autograd.grad(total * 0.37, (states, head))])
    for ours, theirs, want in zip(*found, strict=True):
        scale = want.abs().max()
        error, plain = ((x.double() - want).abs().max() for x in (ours, theirs))
        assert error <= 2 * plain + 5e-7 * scale
