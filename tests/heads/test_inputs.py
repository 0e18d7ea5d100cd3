"""Kinds of heads: modules, adapters, sharded weights. An adapter is used or rejected, never ignored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanstep.heads import Head, linear_logprobs

T, D, V, RANK = 8, 6, 31, 2


def hidden_and_targets(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(T, D, generator=g, dtype=torch.float64), torch.randint(0, V, (T,), generator=g)


def test_a_linear_module_brings_its_bias():
    hidden, tokens = hidden_and_targets()
    head = nn.Linear(D, V, dtype=torch.float64)
    expected = torch.log_softmax(head(hidden), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(linear_logprobs(hidden, head, tokens).logp, expected)
    with pytest.raises(ValueError, match=r"head\.bias: expected None"):
        linear_logprobs(hidden, Head(head, head.bias), tokens)


@pytest.mark.filterwarnings("ignore")
def test_a_peft_layer_is_unwrapped():
    lora = pytest.importorskip("peft.tuners.lora")
    hidden, tokens = hidden_and_targets()
    hidden = hidden.float()
    base = nn.Linear(D, V, bias=False)
    config = lora.LoraConfig(r=RANK, lora_alpha=6, init_lora_weights=False)
    layer = lora.Linear(base, "default", config, r=RANK, lora_alpha=6)
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
    expected = torch.log_softmax(layer(hidden), -1).gather(1, tokens[:, None])[:, 0]
    actual = linear_logprobs(hidden, layer, tokens).logp
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    grads = [torch.autograd.grad(x.sum(), layer.lora_A["default"].weight)[0] for x in (actual, expected)]
    torch.testing.assert_close(*grads, atol=2e-5, rtol=2e-5)
    layer.merge()
    torch.testing.assert_close(linear_logprobs(hidden, layer, tokens).logp, actual, atol=2e-5, rtol=2e-5)


def hooked():
    head = nn.Linear(D, V)
    head.register_forward_hook(lambda *_: None)
    return head


class Adapter(nn.Module):
    """An adapter around a head that is not LoRA."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(D, V)


class OddLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Low(Adapter):
    """The attributes of PEFT's LoRA layer."""

    def __init__(self, adapters=("a",), bias=False, dropout=0.0):
        super().__init__()
        self.lora_A = nn.ModuleDict({name: nn.Linear(D, RANK, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(RANK, V, bias=bias) for name in adapters})
        self.lora_dropout = nn.ModuleDict({name: nn.Dropout(dropout) for name in adapters})
        self.scaling, self.active_adapters = dict.fromkeys(adapters, 1.0), list(adapters)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Low(("a", "b")), "head: 2 active adapters on Low"),
        (lambda: Low(bias=True), "head: adapter 'a' on Low has a bias"),
        (lambda: Low(dropout=0.5), "head: adapter 'a' drops out its input"),
        (Adapter, "head: adapter Adapter is not LoRA"),
        (lambda: OddLinear(D, V), "head: expected nn.Linear or a LoRA layer around one, got OddLinear"),
        (lambda: nn.Conv1d(D, V, 1), "head: expected nn.Linear or a LoRA layer around one, got Conv1d"),
        (lambda: "head", "head: expected a tensor, a Head or a module, got str"),
        (hooked, "head: Linear has forward hooks"),
    ],
)
def test_what_cannot_be_expressed_is_refused(make, message):
    hidden, tokens = hidden_and_targets()
    with pytest.raises(ValueError, match=message):
        linear_logprobs(hidden.float(), make(), tokens)


def sharded_run(rank, world_size):
    """logp, d hidden, local d weight and its placement on one rank, for Shard(0) and Replicate weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    hidden, tokens = hidden_and_targets(rank)
    weight = torch.randn(V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    results = []
    for placement in (Shard(0), Replicate()):
        sharded = distribute_tensor(weight.clone(), mesh, [placement]).requires_grad_()
        h = hidden.clone().requires_grad_()
        out = linear_logprobs(h, sharded, tokens, entropy="grad")
        (out.logp.sum() + out.entropy.sum()).backward()
        assert sharded.grad.placements == (placement,)
        results.append([x.numpy() for x in (out.logp.detach(), h.grad, sharded.grad.full_tensor())])
    return results


def test_a_dtensor_weight_gets_the_averaged_gradient_with_its_placement(run_ranks):
    weight = torch.randn(V, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    ranks = run_ranks(2, sharded_run)
    total = torch.zeros_like(weight)
    alone = []
    for rank in range(2):
        hidden, tokens = hidden_and_targets(rank)
        h, w = hidden.requires_grad_(), weight.clone().requires_grad_()
        out = linear_logprobs(h, w, tokens, entropy="grad")
        (out.logp.sum() + out.entropy.sum()).backward()
        alone.append((out.logp.detach(), h.grad))
        total += w.grad / 2
    for rank, results in enumerate(ranks):
        for arrays in results:
            logp, h_grad, w_grad = (torch.from_numpy(x) for x in arrays)
            torch.testing.assert_close(logp, alone[rank][0])
            torch.testing.assert_close(h_grad, alone[rank][1])
            torch.testing.assert_close(w_grad, total)
