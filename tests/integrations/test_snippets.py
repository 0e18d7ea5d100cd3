"""The snippets of docs/integrations.md for packages that are not installed, run against stubs of call sites.

Signatures and calling conventions as read in the repositories in November 2026: pytorch/torchtitan
torchtitan/components/loss.py, OpenRLHF/OpenRLHF openrlhf/models/actor.py and utils.py, NVIDIA-NeMo/RL
nemo_rl/distributed/model_utils.py, PrimeIntellect-ai/prime-rl src/prime_rl/trainer/models/layers/lm_head.py.
"""

from __future__ import annotations

import abc
import inspect
import sys
import types
from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch
from docstring_code import python_blocks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

DOCS = Path(__file__).parent.parent.parent / "docs" / "integrations.md"
B, T, D, V = 2, 5, 8, 37


def snippet(package: str) -> str:
    """The one code block that imports from `package`."""
    (found,) = [block for block in python_blocks(DOCS) if f"from {package}" in block]
    return found


def run(monkeypatch: pytest.MonkeyPatch, package: str, module: str, stub: types.ModuleType) -> dict[str, Any]:
    """The snippet's names, after it ran with `module` of a package that holds nothing but the stub."""
    names = module.split(".")
    parent = None
    for depth in range(1, len(names) + 1):
        path = ".".join(names[:depth])
        one = stub if depth == len(names) else types.ModuleType(path)
        if parent is not None:
            setattr(parent, names[depth - 1], one)
        monkeypatch.setitem(sys.modules, path, one)
        parent = one
    space: dict[str, Any] = {}
    exec(compile(snippet(package), str(DOCS), "exec"), space)
    return space


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def assert_same(ours: Tensor, theirs: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(ours, theirs)
    upstream = draw(*theirs.shape)
    for a, b in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_torchtitan(monkeypatch):
    class BaseLoss(abc.ABC):
        @abc.abstractmethod
        def __init__(self, config, *, compile_config=None): ...

    class ChunkedLossWrapper(BaseLoss):
        def __init__(self, config, *, compile_config=None):
            self.lm_head = None

        def set_lm_head(self, lm_head):
            self.lm_head = lm_head

        def __call__(self, pred, labels, global_valid_tokens=None, **loss_inputs):
            loss = cross_entropy(self.lm_head(pred).double(), labels, reduction="sum", ignore_index=-100)
            return loss if global_valid_tokens is None else loss / global_valid_tokens, {}

    stub = types.ModuleType("loss")
    stub.BaseLoss = BaseLoss
    lean = run(monkeypatch, "torchtitan", "torchtitan.components.loss", stub)["LeanLoss"]
    assert parameters(lean.__call__)[:3] == parameters(ChunkedLossWrapper.__call__)[:3]
    head = nn.Linear(D, V, bias=False).double()
    hidden, labels = draw(T, D).requires_grad_(), torch.tensor([3, -100, 36, 0, -100])
    for count in (None, torch.tensor(3.0)):
        found = []
        for loss_class in (lean, ChunkedLossWrapper):
            loss_fn = loss_class(None, compile_config=None)
            loss_fn.set_lm_head(head)
            value, metrics = loss_fn(hidden, labels, count, anything=1)
            assert metrics == {}
            found.append(value)
        assert_same(*found, hidden, head.weight)


def test_openrlhf(monkeypatch):
    def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0]

    def compute_entropy(logits: Tensor) -> Tensor:
        return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)

    stub = types.ModuleType("actor")
    stub.log_probs_from_logits, stub.compute_entropy = log_probs_from_logits, compute_entropy
    run(monkeypatch, "openrlhf", "openrlhf.models.actor", stub)
    assert stub.log_probs_from_logits is not log_probs_from_logits
    for ours, theirs in (
        (stub.log_probs_from_logits, log_probs_from_logits),
        (stub.compute_entropy, compute_entropy),
    ):
        assert parameters(ours) == parameters(theirs)
    logits, labels = draw(B, T, V).requires_grad_(), torch.arange(B * T).view(B, T)
    ours = stub.log_probs_from_logits(logits, labels, temperature=0.7)
    assert_same(ours, log_probs_from_logits(logits, labels, 0.7), logits)
    assert_same(stub.compute_entropy(logits), compute_entropy(logits), logits)


def test_nemo_rl(monkeypatch):
    calls = []

    def from_parallel_logits_to_logprobs(
        vocab_parallel_logits, target, vocab_start_index, vocab_end_index, tp_group,
        inference_only=False, cp_group=None, chunk_size=None, sampling_params=None,
    ):  # fmt: skip
        calls.append((inference_only, cp_group, sampling_params))
        log_p = vocab_parallel_logits.log_softmax(-1)
        return log_p.gather(-1, target.roll(-1, -1)[..., None])[..., 0][:, :-1]

    stub = types.ModuleType("model_utils")
    stub.from_parallel_logits_to_logprobs = from_parallel_logits_to_logprobs
    run(monkeypatch, "nemo_rl", "nemo_rl.distributed.model_utils", stub)
    ours = stub.from_parallel_logits_to_logprobs
    assert parameters(ours)[:7] == parameters(from_parallel_logits_to_logprobs)[:7]
    logits, target = draw(B, T, V).requires_grad_(), torch.arange(B * T).view(B, T)
    expected = from_parallel_logits_to_logprobs(logits, target, 0, V, None)
    calls.clear()
    assert_same(ours(logits, target, 0, V, None, chunk_size=64), expected, logits)
    assert not ours(logits, target, 0, V, None, inference_only=True).requires_grad and not calls
    torch.testing.assert_close(ours(logits, target, 0, V, None, sampling_params="top-k"), expected)
    torch.testing.assert_close(ours(logits, target, 0, V, None, False, "cp", chunk_size=2), expected)
    assert calls == [(False, None, "top-k"), (False, "cp", None)]


def test_prime_rl(monkeypatch):
    class PrimeLmOutput(TypedDict, total=False):
        logprobs: Tensor | None
        entropy: Tensor | None

    class FusedOutputLinear(nn.Linear):
        def __init__(self, in_features: int, out_features: int, chunk_size: int):
            super().__init__(in_features, out_features, bias=False)
            self.chunk_size = chunk_size

        def forward(self, hidden_states, labels=None, temperature=None):
            log_p = (super().forward(hidden_states) / temperature[..., None]).log_softmax(-1)
            logprobs = log_p.gather(-1, labels[..., None])[..., 0]
            return PrimeLmOutput(logprobs=logprobs, entropy=-(log_p.exp() * log_p).sum(-1).detach())

    stub = types.ModuleType("lm_head")
    stub.PrimeLmOutput, stub.FusedOutputLinear = PrimeLmOutput, FusedOutputLinear
    run(monkeypatch, "prime_rl", "prime_rl.trainer.models.layers.lm_head", stub)
    lean = stub.FusedOutputLinear
    assert issubclass(lean, FusedOutputLinear)
    assert parameters(lean.forward) == parameters(FusedOutputLinear.forward)
    stock = FusedOutputLinear(D, V, chunk_size=4).double()
    head = lean(in_features=D, out_features=V, chunk_size=4)
    head.weight = stock.weight
    hidden, labels = draw(B, T, D).requires_grad_(), torch.arange(B * T).view(B, T)
    temperature = draw(B, T).abs() + 0.5
    theirs, ours = (one(hidden, labels=labels, temperature=temperature) for one in (stock, head))
    assert ours.keys() == theirs.keys() and not ours["entropy"].requires_grad
    torch.testing.assert_close(ours["entropy"], theirs["entropy"])
    assert_same(ours["logprobs"], theirs["logprobs"], hidden, stock.weight)
