"""The module model against the vectors of the record's own code."""

from __future__ import annotations

import pytest
import torch
from gpt.golden import array, fill, fill_parameters, load

from leanstep.gpt import GPT, GPTConfig, ReferenceGPT
from leanstep.gpt.reference import softcap_loss


def vector_model(build):
    golden = load("gpt_forward")
    model = build(GPTConfig.preset("vectors", windows=(1, 3), mtp=tuple(golden["config"]["mtp"])))
    fill_parameters(model, golden["params"])
    tokens, targets, cu = (torch.tensor(golden[k]) for k in ("tokens", "targets", "cu_seqlens"))
    return golden, model, tokens, targets, cu


BUILDS = {
    "modules": ReferenceGPT,
    "modules-banded": lambda c: ReferenceGPT(c, core="banded"),
    "flat": GPT,
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_forward_and_gradients_of_the_record(build):
    golden, model, tokens, targets, cu = vector_model(build)
    tolerance = golden["tolerance"]
    assert (model.hidden(tokens, cu) - array(golden["final_x"])).abs().max() < tolerance["activations"]
    loss = model(tokens, targets, cu)
    assert abs(loss.item() - golden["train_loss_sum"]) < tolerance["loss"]
    assert abs(model.mean_loss(tokens, targets, cu).item() - golden["eval_loss_mean"]) < tolerance["loss"]
    loss.backward()
    assert len(golden["grads"]) == len(list(model.parameters()))
    for name, want in golden["grads"].items():
        got = getattr(model, name.removesuffix(".weight")).grad
        if "b64" in want:
            want = array(want)
            assert (got - want).abs().max() <= tolerance["grads_rel"] * want.abs().max(), name
            continue
        flat = got.double().flatten()
        assert abs(flat.norm().item() / want["norm"] - 1) < tolerance["grads_rel"], name
        along = flat.dot(fill(12345, (flat.numel(),)).double()).item()
        assert abs(along - want["dot_fill_12345"]) < tolerance["grads_rel"] * want["norm"], name
        first = torch.tensor(want["first8"], dtype=torch.float64)
        assert (flat[:8] - first).abs().max() < tolerance["grads_rel"] * first.abs().max(), name


def test_lane_tensors_of_the_record():
    golden, model, tokens, _, cu = vector_model(ReferenceGPT)
    seen: dict[str, dict[int, torch.Tensor]] = {"mlp_inputs": {}, "attn_inputs": {}, "attn_outputs": {}}
    for layer, block in enumerate(model.blocks):
        block.mlp.register_forward_pre_hook(lambda _, a, i=layer: seen["mlp_inputs"].__setitem__(i, a[0]))
        if block.attention is not None:
            block.attention.register_forward_pre_hook(
                lambda _, a, i=layer: seen["attn_inputs"].__setitem__(i, a[0])
            )
            block.attention.register_forward_hook(
                lambda _, a, y, i=layer: seen["attn_outputs"].__setitem__(i, y)
            )
    model.hidden(tokens, cu)
    for kind, layers in seen.items():
        for layer, want in golden[kind].items():
            error = (layers[int(layer)] - array(want)).abs().max()
            assert error < golden["tolerance"]["activations"], (kind, layer)


@pytest.mark.parametrize("case", range(5))
@pytest.mark.parametrize("core", ["dense", "banded"])
def test_one_attention_block(case: int, core):
    golden = load("attention")
    c = golden["cases"][case]
    dim = c["num_heads"] * c["head_dim"]
    config = GPTConfig(
        vocab_size=10,
        num_layers=1,
        mlp_bank_layers=1,
        model_dim=dim,
        num_heads=c["num_heads"],
        head_dim=c["head_dim"],
        mlp_hidden=8,
        window_block=1,
        windows=(c["window"], c["window"]),
        attention_free_layers=(),
        long_window_layers=(),
        paired_layers=(0,) if c["paired"] else (),
        key_offset_layers=(0,) if c["key_offset"] else (),
        value_embed_layers=(0,) if c["ve"] else (),
        parallel_start=None,
        skip_pairs=(),
        backout_layer=None,
    )
    model = ReferenceGPT(config, core=core)
    qkvo = sum(fill(salt, (4 * dim, dim)) for salt in c["qkvo_salts"]) * 0.1
    ve = array(c["ve"]) if c["ve"] else None
    out = model.blocks[0].attention(
        array(c["x"])[0],
        qkvo,
        torch.tensor(c["sa_lambdas"]),
        array(c["attn_gate_w"]),
        ve,
        array(c["ve_gate_w"]),
        model,
        c["cu_seqlens"],
        None,
    )
    assert (out - array(c["out"])[0]).abs().max() < golden["tolerance"]


@pytest.mark.parametrize("case", range(4))
def test_softcapped_multi_token_loss(case: int):
    golden = load("softcap_mtp")
    c = golden["cases"][case]
    logits = array(c["logits"]).requires_grad_()
    losses = softcap_loss(logits, torch.tensor(c["targets"]), tuple(c["mtp_weights"]), (23.0, 5.0, 7.5))
    assert (losses - array(c["losses"])).abs().max() < golden["tolerance"]
    (losses.sum() * c["grad_output"]).backward()
    assert (logits.grad - array(c["grad_logits"])).abs().max() < golden["tolerance"]


def test_initial_values_of_the_record():
    golden = load("gpt_forward")["fresh_init"]
    model = GPT(GPTConfig.preset("vectors"), generator=torch.Generator().manual_seed(1))
    for name, want in golden.items():
        got = getattr(model, name.removesuffix(".weight")).detach()
        if isinstance(want, list):
            assert torch.equal(got, torch.tensor(want)), name
            continue
        assert abs(got.std().item() - want["std"]) <= 0.05 * want["std"], name
        assert abs(got.max().item() - want["max"]) <= 0.25 * abs(want["max"]), name
        assert abs(got.min().item() - want["min"]) <= 0.25 * abs(want["min"]), name
    assert torch.equal(model.embed, model.lm_head.T)
