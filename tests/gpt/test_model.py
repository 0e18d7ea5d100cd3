"""The flattened model equals the modules: same parameters in, same loss and gradients out, every switch."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from gpt.golden import scramble
from torch.profiler import ProfilerActivity, profile

from leanstep.gpt import GPT, GPTConfig, ReferenceGPT

TINY = {"vocab_size": 200, "bigram_vocab_size": 301, "windows": (1, 2), "window_block": 7}
RECORD = {
    "vocab_size": 150,
    "model_dim": 48,
    "num_heads": 6,
    "head_dim": 8,
    "mlp_hidden": 96,
    "bigram_vocab_size": 301,
    "window_block": 5,
    "dtype": "float32",
}
OFF: dict = {
    "attention_free_layers": (),
    "key_offset_layers": (),
    "paired_layers": (),
    "value_embed_layers": (),
    "attention_gate": False,
    "bigram_vocab_size": 0,
    "smear": False,
    "x0_inject": False,
    "parallel_start": None,
    "skip_pairs": (),
    "backout_layer": None,
    "softcap": None,
}

SWITCHES: dict[str, dict] = {
    "as it is": {},
    "post_attn_lambda_single": {"post_attn_lambda_single": True},
    "fold_post_attn": {"post_attn_lambda_single": True, "fold_post_attn": True},
    "fold_post_mlp": {"fold_post_mlp": True},
    "no final_post_mlp": {"final_post_mlp": False},
    "inject before": {"inject": "before"},
    "inject_attention_free": {"inject_attention_free": True},
    "resid_per_lane": {"resid_per_lane": True},
    "one lane": {"parallel_start": None},
    "no backout": {"backout_layer": None},
    "no skip": {"skip_pairs": ()},
    "two skips": {"skip_pairs": ((0, 1), (0, 3))},
    "no smear": {"smear": False},
    "no gate": {"attention_gate": False},
    "no value embeddings": {"value_embed_layers": ()},
    "no bigram": {"bigram_vocab_size": 0},
    "no x0": {"x0_inject": False},
    "no injection": {"x0_inject": False, "bigram_vocab_size": 0},
    "no pairs": {"paired_layers": ()},
    "no key offset": {"key_offset_layers": ()},
    "attention everywhere": {"attention_free_layers": ()},
    "no softcap": {"softcap": None},
    "one token ahead": {"mtp": (1.0,)},
    "head as stored": {"transposed_head": False},
    "respect_docs": {"respect_docs": True},
    "odd heads": {"num_heads": 1, "head_dim": 64, "paired_layers": ()},
    "everything off": OFF,
}


def batch(config: GPTConfig, length: int = 83, documents: tuple[int, ...] = (0, 20, 21, 21, 60)):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(0, config.vocab_size, (length,), generator=generator)
    targets = torch.randint(0, config.vocab_size, (length,), generator=generator)
    bounds = [b for b in documents if b < length] + [length]
    return inputs, targets, torch.tensor(bounds, dtype=torch.int32)


def results(model, inputs, targets, cu):
    """Loss, final states and every gradient, with an upstream gradient that is not one."""
    model.zero_grad(set_to_none=True)
    hidden = model.hidden(inputs, cu)
    loss = model(inputs, targets, cu)
    (loss * 0.7).backward()
    out = {"loss": loss.detach(), "hidden": hidden.detach()}
    for name, p in model.named_parameters():
        out[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    return out


def pooled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the small gradients: a few lambdas are too few values to judge rounding."""
    small = [name for name, x in tensors.items() if x.numel() < 1000 and name not in ("loss", "hidden")]
    large = {name: x for name, x in tensors.items() if name not in small}
    return {**large, "lambdas and gates": torch.cat([tensors[name].flatten() for name in small])}


def assert_no_further(config: GPTConfig, factor: float = 2.0, seeds: int = 3, **kwargs) -> None:
    """Distance from float64, root mean square over elements and seeds: single small tensors are luck.

    Divided by the gradient's size over all seeds, not by each seed's: where a sum over the batch happens to
    cancel, that seed alone would decide.
    """
    sums: dict[str, list[float]] = {}
    for seed in range(seeds):
        plain = scramble(ReferenceGPT(config), seed)
        flat = GPT(config)
        flat.load_state_dict(plain.state_dict())
        truth = copy.deepcopy(plain).double()
        data = batch(config, **kwargs)
        candidates, plains, truths = (pooled(results(model, *data)) for model in (flat, plain, truth))
        assert candidates.keys() == plains.keys() == truths.keys()
        for name, want in truths.items():
            terms = (candidates[name].double() - want, plains[name].double() - want, want)
            squares = [x.square().mean().item() for x in terms]
            sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0, 1e-60)), squares, strict=True)]
    for name, want in truths.items():
        k = factor if want.numel() >= 1000 else max(factor, 3)
        mine, other = ((error / sums[name][2]) ** 0.5 for error in sums[name][:2])
        # A handful of scalars, each a sum over the batch that cancels: 7e-6 was seen with SSE products.
        floor = 1e-6 if want.numel() >= 100 else 1e-5
        assert mine <= k * other + floor, f"{name}: relative error {mine:.2e} against {other:.2e}"


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_flat_equals_modules_tiny(switch: dict):
    assert_no_further(GPTConfig.preset("tiny", **{**TINY, **switch}))


@pytest.mark.parametrize("switch", [name for name in SWITCHES if name != "odd heads"])
def test_flat_equals_modules_record(switch: str):
    assert_no_further(GPTConfig.preset("record-74", **{**RECORD, **SWITCHES[switch]}), seeds=2)


@pytest.mark.parametrize("length", [1, 2, 41, 401])
def test_flat_equals_modules_at_odd_lengths(length: int):
    assert_no_further(GPTConfig.preset("tiny", **TINY), length=length, documents=(0, 1, 300))


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_flat_equals_modules_in_float64(switch: dict):
    config = GPTConfig.preset("tiny", **{**TINY, **switch, "dtype": "float64"})
    plain = scramble(ReferenceGPT(config))
    flat = GPT(config)
    flat.load_state_dict(plain.state_dict())
    data = batch(config)
    ours, theirs = results(flat, *data), results(plain, *data)
    for name, want in theirs.items():
        assert (ours[name] - want).abs().max() <= 1e-11 * want.abs().max() + 1e-13, name


def test_flat_bfloat16_is_no_further_from_the_truth_than_modules():
    assert_no_further(GPTConfig.preset("tiny", **TINY, dtype="bfloat16"), factor=3, seeds=12)


@pytest.mark.parametrize("model_class", [GPT, ReferenceGPT])
@pytest.mark.parametrize(
    ("folded", "open_"),
    [
        ({"fold_post_mlp": True}, {}),
        ({"post_attn_lambda_single": True, "fold_post_attn": True}, {"post_attn_lambda_single": True}),
    ],
    ids=["fold_post_mlp", "fold_post_attn"],
)
def test_folding_is_an_equivalence(model_class, folded: dict, open_: dict):
    made = []
    for switch in (folded, open_):
        model = model_class(GPTConfig.preset("tiny", **{**TINY, **switch}, dtype="float64"))
        if made:
            model.load_state_dict(made[0].state_dict())
        made.append(model if made else scramble(model))
    data = batch(made[0].config)
    first, second = (model.hidden(data[0], data[2]) for model in made)
    assert (first - second).abs().max() < 1e-12
    assert abs(made[0](*data) - made[1](*data)) < 1e-10


def test_a_gpu_compiles_the_loss_and_a_cpu_on_request():
    expected = {"auto": {"cpu": False, "cuda": True, "xpu": False}, "plain": {"cpu": False, "cuda": False}}
    expected["compiled"] = {"cpu": True, "cuda": True}
    for run, devices in expected.items():
        model = GPT(GPTConfig.preset("tiny"), run=run)
        assert {device: model._compiles_loss(torch.device(device)) for device in devices} == devices


def test_an_unknown_way_to_run_is_named():
    with pytest.raises(ValueError, match="run: expected auto or plain or compiled, got 'fast'"):
        GPT(GPTConfig.preset("tiny"), run="fast")


def test_build_follows_flat_forward():
    from leanstep.gpt import build_model

    assert type(build_model(GPTConfig.preset("tiny"))) is GPT
    assert type(build_model(GPTConfig.preset("tiny", flat_forward=False))) is ReferenceGPT


def test_switched_off_features_have_no_parameters():
    config = GPTConfig.preset("tiny", **{**TINY, **OFF})
    left = {name for name, _ in GPT(config).named_parameters()}
    assert left == {"embed", "lm_head", "attn_bank", "mlp_bank", "post_lambdas", "resid_lambdas", "scalars"}
    assert GPT(config).scalars.numel() == 2 * config.num_layers


def events_of_a_step(model, data) -> dict[str, int]:
    model(*data).backward()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        model(*data).backward()
    return {event.key: event.count for event in prof.key_averages()}


def test_a_training_step_selects_nothing_in_its_backward():
    config = GPTConfig.preset("tiny", **TINY)
    data = batch(config)
    assert events_of_a_step(scramble(ReferenceGPT(config)), data)["aten::select_backward"] > 10
    assert "aten::select_backward" not in events_of_a_step(scramble(GPT(config)), data)


def test_a_second_derivative_is_refused_not_wrong():
    config = GPTConfig.preset("tiny", **TINY)
    model, data = scramble(GPT(config)), batch(config)
    (grad,) = torch.autograd.grad(model(*data), [model.embed], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_two_runs_are_bitwise_equal_and_inputs_stay():
    config = GPTConfig.preset("tiny", **TINY)
    model, data = scramble(GPT(config)), batch(config)
    before = [x.clone() for x in data]
    first, second = results(model, *data), results(model, *data)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(a, b) for a, b in zip(before, data, strict=True))


def test_padded_boundaries_change_nothing():
    config = GPTConfig.preset("tiny", **TINY)
    model, (inputs, targets, cu) = scramble(GPT(config)), batch(config)
    padded = torch.cat([cu, cu[-1:].expand(9)])
    assert torch.equal(model(inputs, targets, cu), model(inputs, targets, padded))


def test_documents_are_independent_when_respected():
    config = GPTConfig.preset("tiny", **TINY, respect_docs=True)
    model, (inputs, _, cu) = scramble(GPT(config)), batch(config)
    together = model.hidden(inputs, cu)
    for first, last in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if last > first:
            alone = model.hidden(inputs[first:last])
            assert (together[first:last] - alone).abs().max() < 2e-5


def test_the_future_does_not_matter():
    config = GPTConfig.preset("tiny", **TINY)
    model, (inputs, _, cu) = scramble(GPT(config)), batch(config)
    changed = inputs.clone()
    changed[50:] = (changed[50:] + 1) % config.vocab_size
    a, b = model.hidden(inputs, cu), model.hidden(changed, cu)
    assert torch.equal(a[:50], b[:50]) and not torch.equal(a[50:], b[50:])


def test_a_token_sees_only_its_window():
    config = GPTConfig.preset("plain", num_layers=1, long_window_layers=(0,), windows=(1, 1), window_block=9)
    model = scramble(GPT(config))
    inputs = torch.randint(0, 512, (40,))
    changed = inputs.clone()
    changed[10] = (changed[10] + 1) % 512
    moved = (model.hidden(inputs) != model.hidden(changed)).any(-1).nonzero()[:, 0].tolist()
    assert moved == list(range(10, 20))


def test_schedule_state_restores_windows_and_yarn():
    config = GPTConfig.preset("tiny", **TINY)
    model, data = scramble(GPT(config)), batch(config)
    model.set_windows(2, 4)
    model.set_windows(3, 6)
    model.untie()
    fresh = GPT(config)
    fresh.load_state_dict(model.state_dict())
    assert not torch.equal(fresh(*data), model(*data))
    fresh.load_schedule_state(json.loads(json.dumps(model.schedule_state())))
    assert torch.equal(fresh(*data), model(*data)) and not fresh.tied


def test_a_final_window_leaves_yarn_alone():
    model = GPT(GPTConfig.preset("tiny"))
    scale = model.rotary.attention_scale
    model.set_windows(1, 20, yarn=False)
    assert model.rotary.attention_scale == scale and model.windows == (1, 20)
    model.set_windows(1, 40)
    assert model.rotary.attention_scale > scale


@pytest.mark.parametrize("transposed", [True, False])
def test_tying_moves_gradients_and_values(transposed: bool):
    config = GPTConfig.preset("tiny", **TINY, transposed_head=transposed)
    model, data = GPT(config), batch(config)
    model(*data).backward()
    both = model.head_weight_gradient() + model.embed.grad
    model.tie_gradients()
    assert model.embed.grad is None
    assert torch.allclose(model.head_weight_gradient(), both)
    with torch.no_grad():
        model.lm_head.add_(1.5)
    model.copy_tied()
    assert torch.equal(model.embed, model.head_weight())
    model.untie()
    with torch.no_grad():
        model.lm_head.add_(1.0)
    model.copy_tied()
    assert not torch.equal(model.embed, model.head_weight())


def test_hidden_and_head_weight_give_the_loss():
    config = GPTConfig.preset("plain")
    model, (inputs, targets, cu) = scramble(GPT(config)), batch(config)
    logits = model.hidden(inputs, cu) @ model.head_weight().T
    assert torch.allclose(model.logits(model.hidden(inputs, cu)), logits, atol=1e-4)
    want = torch.nn.functional.cross_entropy(logits, targets)
    assert torch.allclose(model.mean_loss(inputs, targets, cu), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long)), "inputs"),
        ((torch.zeros(3), torch.zeros(3, dtype=torch.long)), "inputs"),
        ((torch.zeros(3, dtype=torch.long), torch.zeros(4, dtype=torch.long)), "targets"),
        (
            (torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long), torch.tensor([0, 2])),
            "cu_seqlens",
        ),
        (
            (torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long), torch.tensor([0, 2, 1, 3])),
            "cu_seqlens",
        ),
    ],
)
def test_bad_input_is_named(arguments, words: str):
    with pytest.raises(ValueError, match=words):
        GPT(GPTConfig.preset("tiny"))(*arguments)
