"""Megatron-Core: tensor-parallel output layer over gloo equals one rank."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch

VOCAB, WIDTH, TOKENS = 37, 16, 12

pytestmark = pytest.mark.filterwarnings("ignore")


def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    rows = torch.tensor([1, 2, 5, 6, 7, 11])
    upstream = torch.randn(2, len(rows), generator=generator)
    return hidden, weight, tokens, rows, upstream


def plain():
    hidden, weight, tokens, rows, upstream = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    log_p = torch.log_softmax(hidden[rows] @ weight.T / 0.9, -1)
    logp = log_p.gather(1, tokens[rows][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logp * upstream[0] + entropy * upstream[1]).sum().backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


def column_layer(weight, **config):
    """Megatron's own output layer with this rank's rows of a weight."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    settings = ModelParallelConfig(
        use_cpu_initialization=True, perform_initialization=False, params_dtype=weight.dtype, **config
    )
    size = config.get("tensor_model_parallel_size", 1)
    layer = ColumnParallelLinear(
        weight.shape[1], size * len(weight), config=settings, init_method=torch.nn.init.zeros_, bias=False,
        gather_output=False, skip_bias_add=True,
    )  # fmt: skip
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def megatron_rank(rank: int, world_size: int, sequence_parallel: bool, fault: float):
    """Values and gradients of both functions in an untested version, or the complaint about a `fault`."""
    warnings.simplefilter("ignore")
    from importlib import metadata

    metadata.version = lambda package: "0.99.1"
    # Megatron asks for the device of its gathered hidden states.
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core import parallel_state

    from leanstep.integrations import megatron

    if fault:
        original = megatron.linear_logprobs
        megatron.linear_logprobs = lambda *args, **options: original(*args, **options)._replace(
            logp=original(*args, **options).logp + fault
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    whole, weight, tokens, rows, upstream = problem()
    width = -(-VOCAB // world_size)
    full = torch.cat([weight, torch.full((width * world_size - VOCAB, WIDTH), 3.0)])
    config = {"tensor_model_parallel_size": world_size, "sequence_parallel": sequence_parallel}
    layer = column_layer(full[rank * width : (rank + 1) * width], **config)
    if sequence_parallel:
        whole = whole.chunk(world_size)[rank].clone()
    options = {"entropy": "grad", "temperature": 0.9, "vocab_total": VOCAB}
    found = []
    for by_processor in (False, True):
        hidden = whole.clone().requires_grad_()
        if by_processor:
            # Two sequences, the position first, as GPTModel calls it.
            mask = torch.zeros(TOKENS).index_fill(0, rows, 1.0).view(-1, 2).T
            out = megatron.output_processor(
                hidden_states=hidden.unflatten(0, (-1, 2)), output_layer=layer, output_weight=None,
                labels=tokens.view(-1, 2).T, loss_mask=mask, context=options, input_ids=None,
            )  # fmt: skip
            assert out.logp.shape == mask.shape and not out.logp[mask == 0].any()
            logp, entropy = (values.T.flatten()[rows] for values in out[:2])
        else:
            try:
                out = megatron.output_layer_logprobs(hidden, layer, tokens[rows], rows=rows, **options)
            except ValueError as error:
                return str(error)
            logp, entropy = out[:2]
        leaves = (hidden, layer.weight)
        gradients = torch.autograd.grad((logp * upstream[0] + entropy * upstream[1]).sum(), leaves)
        found.append([v.detach().numpy() for v in (logp, entropy, *gradients)])
    if not sequence_parallel:
        # The same from this rank's logits.
        out = megatron.vocab_parallel_logprobs(whole[rows] @ layer.weight.T, tokens[rows], **options)
        np.testing.assert_allclose(out.logp.detach().numpy(), found[0][0], rtol=1e-5, atol=1e-5)
    assert megatron._checked == {"version", "layer"}
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_equal_one(run_ranks, sequence_parallel):
    pytest.importorskip("megatron.core")
    logp, entropy, d_hidden, d_weight = plain()
    for results in zip(*run_ranks(2, megatron_rank, sequence_parallel, 0.0, timeout=120), strict=True):
        for values in results:
            np.testing.assert_allclose(values[0], logp, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(values[1], entropy, rtol=1e-5, atol=1e-5)
        found = [values[2] for values in results]
        for d_own in [np.concatenate(found)] if sequence_parallel else found:
            np.testing.assert_allclose(d_own, d_hidden, rtol=1e-4, atol=1e-5)
        stacked = np.concatenate([values[3] for values in results])
        np.testing.assert_allclose(stacked[:VOCAB], d_weight, rtol=1e-4, atol=1e-5)
        assert not stacked[VOCAB:].any(), "padded columns take no part"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_untested_version_is_compared_with_megatrons_own_cross_entropy(run_ranks, sequence_parallel):
    pytest.importorskip("megatron.core")
    for complaint in run_ranks(2, megatron_rank, sequence_parallel, 0.01, timeout=120):
        assert "log-probs of made-up rows differ from Megatron's own by 0.01" in complaint


# Three samples in one packed row, three padding tokens behind them; nothing of the second one counts.
TOTALS, RESPONSES, PADDING = [7, 5, 9], [3, 4, 5], 3
LOSS_MASKS = [torch.tensor([1, 0, 1]), torch.zeros(4, dtype=torch.long), torch.ones(5, dtype=torch.long)]
WORDS, STEPS, COEFFICIENT = 38, 3, 0.05


def policy_loss(log_probs, entropies, advantages):
    """Masked means per sample, as slime takes them, with the entropy bonus."""
    loss = 0.0
    for logp, entropy, advantage, mask in zip(log_probs, entropies, advantages, LOSS_MASKS, strict=True):
        value = -advantage * logp - COEFFICIENT * entropy
        loss = loss + (value * mask).sum() / mask.sum().clamp(min=1)
    return loss / len(LOSS_MASKS)


def response_rows():
    starts = np.cumsum([0, *TOTALS[:-1]])
    return [
        torch.arange(start + total - response - 1, start + total - 1)
        for start, total, response in zip(starts, TOTALS, RESPONSES, strict=True)
    ]


def stock_scores(logits, tokens):
    """Megatron's own cross entropy, and the entropy from its differentiable sum over ranks."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import (
        reduce_from_tensor_model_parallel_region as sum_over_ranks,
    )
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    targets = torch.cat([*tokens, torch.zeros(PADDING, dtype=torch.long)]).roll(-1)[None]
    logp = -vocab_parallel_cross_entropy(logits.clone(), targets)[0]
    highest = logits[0].detach().amax(-1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    shifted = logits[0] - highest
    total = sum_over_ranks(shifted.exp().sum(-1))
    entropy = total.log() - sum_over_ranks((shifted.exp() * shifted).sum(-1)) / total
    return [logp[rows] for rows in response_rows()], [entropy[rows] for rows in response_rows()]


def layer_scores(hidden, layer, tokens):
    """`output_layer_logprobs` on the response rows: no logits at all."""
    from leanstep.integrations.megatron import output_layer_logprobs

    flat, rows = torch.cat(tokens), torch.cat(response_rows())
    out = output_layer_logprobs(hidden, layer, flat[rows + 1], rows=rows, entropy="grad")
    return out.logp.split(RESPONSES), out.entropy.split(RESPONSES)


def training_rank(rank: int, world_size: int):
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    found = {}
    for method in ("stock", "output layer"):
        generator = torch.Generator().manual_seed(0)
        embedding = torch.randn(WORDS, WIDTH, generator=generator).requires_grad_()
        full = torch.randn(WORDS, WIDTH, generator=generator)
        layer = column_layer(full.chunk(world_size)[rank], tensor_model_parallel_size=world_size)
        optimizer = torch.optim.SGD([embedding, layer.weight], lr=0.3)
        losses, gradients = [], []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 + step)
            tokens = [torch.randint(0, WORDS, (n,), generator=generator) for n in TOTALS]
            advantages = torch.randn(len(TOTALS), generator=generator)
            ids = torch.cat([*tokens, torch.zeros(PADDING, dtype=torch.long)])
            hidden = torch.tanh(embedding[ids])
            if method == "output layer":
                scores = layer_scores(hidden, layer, tokens)
            else:
                logits, _ = layer(hidden[None])
                scores = stock_scores(logits, tokens)
            loss = policy_loss(*scores, advantages)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            gradients.append((embedding.grad.clone().numpy(), layer.weight.grad.clone().numpy()))
            optimizer.step()
        found[method] = losses, gradients
    parallel_state.destroy_model_parallel()
    return found


def test_training_steps_on_two_ranks_equal_megatrons_own_loss(run_ranks):
    pytest.importorskip("megatron.core")
    for found in run_ranks(2, training_rank, timeout=120):
        losses, gradients = found.pop("stock")
        assert len(set(losses)) == STEPS
        for method, (own_losses, own_gradients) in found.items():
            np.testing.assert_allclose(own_losses, losses, rtol=1e-4, atol=1e-6, err_msg=method)
            for step in range(STEPS):
                for ours, theirs in zip(own_gradients[step], gradients[step], strict=True):
                    np.testing.assert_allclose(
                        ours, theirs, rtol=1e-3, atol=1e-5, err_msg=f"{method} step {step}"
                    )


def test_a_copied_layer_uses_its_own_weight():
    pytest.importorskip("megatron.core")
    from leanstep.integrations.megatron import HiddenOutput, apply_leanstep

    hidden, weight, tokens, rows, _ = problem()
    layer = apply_leanstep(column_layer(weight))
    HiddenOutput(layer)
    duplicate = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.mul_(3.0)
        duplicate.weight.mul_(-1.0)
    for each in (layer, duplicate):
        each.zero_grad()
        assert torch.equal(each(hidden)[0], hidden)
        found = each.logprobs(hidden, tokens[rows], rows=rows).logp
        expected = (hidden @ each.weight.T).log_softmax(-1)[rows].gather(1, tokens[rows][:, None])[:, 0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert layer.weight.grad is None and duplicate.weight.grad is not None


def test_fused_accumulation_adds_to_the_weights_main_grad():
    pytest.importorskip("megatron.core")
    from leanstep.integrations.megatron import output_layer_logprobs

    hidden, weight, tokens, rows, _ = problem()
    stock, fused = column_layer(weight), column_layer(weight)
    fused.gradient_accumulation_fusion, fused.weight.main_grad = True, torch.ones_like(weight)
    for layer in (stock, fused):
        output_layer_logprobs(hidden, layer, tokens[rows], rows=rows).logp.sum().backward()
    torch.testing.assert_close(fused.weight.main_grad, 1 + stock.weight.grad)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gather_output", True, "expected gather_output=False"),
        (
            "bias",
            torch.nn.Parameter(torch.zeros(VOCAB)),
            "expected no bias, or one that the layer adds itself",
        ),
        ("weight", None, "weight: this output layer has no weight of its own"),
    ],
)
def test_an_output_layer_that_cannot_be_used_is_refused(name, value, message):
    pytest.importorskip("megatron.core")
    from leanstep.integrations.megatron import HiddenOutput, apply_leanstep

    hidden, weight, tokens, *_ = problem()
    layer = column_layer(weight)
    setattr(layer, name, value)
    with pytest.raises(ValueError, match=message):
        HiddenOutput(layer)
        apply_leanstep(layer).logprobs(hidden, tokens)


def test_an_output_processor_refuses_what_it_cannot_score():
    pytest.importorskip("megatron.core")
    from types import SimpleNamespace

    from leanstep.integrations.megatron import output_processor

    given = {"hidden_states": torch.ones(3, 1, WIDTH), "output_layer": None, "output_weight": None}
    with pytest.raises(ValueError, match=r"labels: expected \[B, S\] ids"):
        output_processor(**given, labels=None)
    with pytest.raises(ValueError, match="use_mup=False"):
        output_processor(**given, labels=torch.zeros(1, 3), config=SimpleNamespace(use_mup=True))
