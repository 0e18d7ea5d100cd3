"""The recipe against the golden vectors of the record's own code, from the embeddings to the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from speedrun.golden import VECTORS, array, fill, fill_parameters, hidden, load, loss, make

from recipes.speedrun.data import bigram_hash
from recipes.speedrun.reference import Attention, ReferenceGPT, softcap_loss
from recipes.speedrun.train import (
    GPT,
    AttentionLayer,
    Schedule,
    Yarn,
    adam_update,
    attention,
    head_loss,
    rotate,
)

BUILDS = {"flat": GPT, "modules": ReferenceGPT}


def vector_model(build):
    golden = load("gpt_forward")
    model = make(build, VECTORS, 100, windows=(1, 3))
    fill_parameters(model, golden["params"])
    tokens, targets, cu = (torch.tensor(golden[k]) for k in ("tokens", "targets", "cu_seqlens"))
    return golden, model, tokens, targets, cu


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_forward_and_gradients(build):
    golden, model, tokens, targets, cu = vector_model(build)
    tolerance = golden["tolerance"]
    assert (hidden(model, tokens, cu) - array(golden["final_x"])).abs().max() < tolerance["activations"]
    train = loss(model, tokens, targets, cu, tuple(golden["config"]["mtp"]))
    assert abs(train.item() - golden["train_loss_sum"]) < tolerance["loss"]
    with torch.no_grad():
        mean = loss(model, tokens, targets, cu, (1.0,)) / len(tokens)
    assert abs(mean.item() - golden["eval_loss_mean"]) < tolerance["loss"]
    train.backward()
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


@pytest.mark.parametrize("case", range(5))
def test_one_attention_layer(case: int):
    golden = load("attention")
    c = golden["cases"][case]
    dim = c["num_heads"] * c["head_dim"]
    layers = {
        "paired_layers": (0,) if c["paired"] else (),
        "key_offset_layers": (0,) if c["key_offset"] else (),
    }
    shape = replace(VECTORS, model_dim=dim, num_heads=c["num_heads"], attention_free_layers=(), **layers)
    qkvo = sum(fill(salt, (4 * dim, dim)) for salt in c["qkvo_salts"]) * 0.1
    ve = array(c["ve"]) if c["ve"] else None
    x, gate, ve_gate = array(c["x"])[0], array(c["attn_gate_w"]), array(c["ve_gate_w"])
    table = Yarn(c["head_dim"]).table(len(x), c["paired"], x)
    lambdas = torch.tensor(c["sa_lambdas"])
    inputs = (qkvo, lambdas, gate, ve, ve_gate, table, c["cu_seqlens"], c["window"], 0.1)
    modules = Attention(shape, 0)(x, *inputs)
    weights = lambdas[0] * qkvo[: 3 * dim], lambdas[1] * qkvo[3 * dim :]
    layer = AttentionLayer(*weights, gate, ve, ve_gate, table, c["window"], c["paired"], c["key_offset"])
    model = make(GPT, replace(shape, window_block=1), 10, windows=(c["window"], c["window"]))
    documents = model.documents(torch.tensor(c["cu_seqlens"], dtype=torch.int32), len(x))
    for out in (modules, attention(x, layer, c["num_heads"], documents, 0.1)):
        assert (out - array(c["out"])[0]).abs().max() < golden["tolerance"]


@pytest.mark.parametrize("case", range(4))
def test_rotary_and_yarn(case: int):
    golden = load("rotary_yarn")
    c = golden["cases"][case]
    yarn, half, rows = Yarn(c["head_dim"]), c["head_dim"] // 2, c["rows"]

    def check(want: dict) -> None:
        frequencies = yarn.frequencies.repeat_interleave(2)
        assert torch.allclose(frequencies, torch.tensor(want["angular_freq"])[:half], rtol=1e-6)
        assert not any(want["angular_freq"][half:])
        assert abs(yarn.scale - want["attn_scale"]) < 1e-12
        # The vectors' layout: features repeated in pairs, sin with the sign of odd ones, then what is still.
        cos, sin = yarn.table(max(rows) + 1, c["paired"], torch.zeros(()))[:, rows].repeat_interleave(2, -1)
        cos = torch.cat([cos, torch.ones_like(cos)], -1).flatten(1)
        sin = torch.cat([sin, torch.zeros_like(sin)], -1).flatten(1)
        sin = sin * torch.tensor([1.0, -1.0]).repeat(sin.shape[-1] // 2)
        assert (cos - array(want["factor1"])).abs().max() < golden["tolerance"]
        assert (sin - array(want["factor2"])).abs().max() < golden["tolerance"]

    check(c)
    x = array(c["x"])[0]
    heads = x.reshape(len(x), -1, c["head_dim"])
    turned = rotate(heads, yarn.table(len(x), c["paired"], x)).reshape(x.shape)
    assert (turned - array(c["rotary_x"])[0]).abs().max() < golden["tolerance"]
    for step in c["yarn"]:
        yarn.rescale(step["old"], step["new"])
        check(step)


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("chunk_rows", [None, 1, 5, 100])
def test_softcapped_multi_token_loss(case: int, chunk_rows: int | None):
    golden = load("softcap_mtp")
    c = golden["cases"][case]
    logits, targets, mtp = array(c["logits"]), torch.tensor(c["targets"]), tuple(c["mtp_weights"])
    want = array(c["losses"]).double()
    leaf = logits.clone().requires_grad_()
    losses = softcap_loss(leaf, targets, mtp, (23.0, 5.0, 7.5))
    assert (losses - want).abs().max() < golden["tolerance"]
    (losses.sum() * c["grad_output"]).backward()
    assert (leaf.grad - array(c["grad_logits"])).abs().max() < golden["tolerance"]
    # An identity head makes hidden states and logits the same thing.
    leaf = logits.clone().requires_grad_()
    total = head_loss(leaf, torch.eye(logits.shape[1]), targets, mtp, chunk_rows=chunk_rows)
    assert abs(total.item() - want.sum()) < golden["tolerance"] * len(targets)
    (total * c["grad_output"]).backward()
    assert (leaf.grad - array(c["grad_logits"])).abs().max() < golden["tolerance"]


@pytest.mark.parametrize("case", range(2))
def test_bigram_hash(case: int):
    c = load("bigram_hash")["cases"][case]
    for dtype in (torch.int64, torch.int32):
        assert (
            bigram_hash(torch.tensor(c["tokens"], dtype=dtype), c["bigram_vocab_size"]).tolist() == c["ids"]
        )
    golden = load("gpt_forward")
    ids = bigram_hash(torch.tensor(golden["tokens"]), golden["config"]["bigram_vocab_size"])
    assert ids.tolist() == golden["bigram_ids"]


def test_initial_values():
    model = make(GPT, VECTORS, 100)
    for name, want in load("gpt_forward")["fresh_init"].items():
        got = getattr(model, name.removesuffix(".weight")).detach()
        if isinstance(want, list):
            assert torch.equal(got, torch.tensor(want)), name
            continue
        assert abs(got.std().item() - want["std"]) <= 0.05 * want["std"], name
        assert abs(got.max().item() - want["max"]) <= 0.25 * abs(want["max"]), name
        assert abs(got.min().item() - want["min"]) <= 0.25 * abs(want["min"]), name
    assert torch.equal(model.embed, model.lm_head.T)


def test_schedule_at_every_step():
    golden, schedule = load("schedules"), Schedule()
    assert schedule.scheduled == golden["scheduled"] and schedule.num_steps == golden["total"]
    assert [list(b) for b in schedule.boundaries] == golden["boundaries"]
    assert schedule.untie_step == golden["split_step"] and schedule.final_window == golden["ws_post_ext"]
    for row in golden["rows"]:
        here = schedule.at(row["step"])
        assert here.lr_mul == pytest.approx(row["lr_mul"], rel=1e-12), row
        assert here.momentum == pytest.approx(row["muon_momentum"], rel=1e-12), row
        assert (here.stage.tokens, here.stage.max_seq_len) == (row["batch_tokens"], row["max_seq_len"])
        assert list(here.stage.windows) == row["window_blocks"] and here.adam_step == row["adam_step"]
        # Upstream keeps these weights in single precision.
        assert here.mtp == pytest.approx(row["mtp"], abs=1e-7), row


@pytest.mark.parametrize("case", range(2))
def test_adam(case: int):
    golden = load("adam_cautious")
    c = golden["cases"][case]
    half = c["dtype"] == "bfloat16"

    def tensor(entry):
        return array(entry).view(torch.int16).view(torch.bfloat16) if half else array(entry)

    p, (beta1, beta2), lr = tensor(c["p_in"]), c["betas"], c["lr"]
    first, second = torch.zeros(p.shape), torch.zeros(p.shape)
    for t, step in enumerate(c["steps"], 1):
        rate = torch.tensor(lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t))
        decay = torch.tensor(lr * lr * c["weight_decay"] * c["wd_mul"])
        adam_update(p, tensor(step["grad"]), first, second, beta1, beta2, rate, decay)
        want = tensor(step["p"])
        unit = want.float().abs() / 128 if half else 1e-6
        assert ((p.float() - want.float()).abs() <= unit).all()
        assert (first - array(step["exp_avg"])).abs().max() < 1e-6
        assert (second - array(step["exp_avg_sq"])).abs().max() < 1e-6
