"""What `leanstep plan` runs on fake tensors: each method as a user would call it, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.case import Outputs, Step, Workload
from leanstep.logprob import (
    PolicyObjective,
    Tiles,
    choose_tiles,
    linear_logprobs,
    linear_policy_loss,
    token_logprobs,
)
from leanstep.logprob.memory import Method
from leanstep.measure.peaks import SimulatedPeak, simulate_peak


@dataclass(frozen=True)
class HeadShape:
    """T rows of which N are kept, V columns, D wide, in row chunks."""

    rows: int
    kept: int
    vocab: int
    width: int
    dtype: torch.dtype
    chunk: int


class _ChunkLoss(torch.autograd.Function):
    """Log-prob and entropy of a chunk of logits the way slime's pull 2076 does it.

    A working copy becomes the softmax and, in backward, the gradient of the chunk; autograd then concatenates
    the chunks' gradients into one of full size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        softmax = logits.float().clone()
        softmax.sub_(softmax.amax(-1, keepdim=True)).exp_()
        softmax.div_(softmax.sum(-1, keepdim=True))
        ctx.softmax = softmax
        return softmax[:, 0].log(), softmax[:, 0].clone()

    @staticmethod
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.softmax.mul_((g_entropy - g_logp)[:, None])


class _GatherRows(torch.autograd.Function):
    """index_select with the backward it has on real tensors; on fake ones torch takes an extra copy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.shape = rows, logits.shape
        return logits.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.new_zeros(ctx.shape).index_add_(0, ctx.rows, grad), None


def _gathered_loss(logits: Tensor, chunk: int) -> Tensor:
    total = logits.new_zeros(())
    for part in logits.split(chunk):
        logp, entropy = _ChunkLoss.apply(part)
        total = total + logp.sum() + entropy.sum()
    return total


def _loss_and_gradients(loss: Tensor, leaves: list[Tensor]) -> Outputs:
    return {f"grad{i}": g for i, g in enumerate(torch.autograd.grad(loss, leaves))}


def _head_step(method: Method, shape: HeadShape, inputs: dict[str, Tensor]) -> Outputs:
    hidden, weight = inputs["hidden"].detach(), inputs["weight"].detach()
    tokens, rows = inputs["tokens"], inputs["rows"]
    tile = Tiles(shape.chunk, shape.vocab, "rows")
    if method == "no-grad":
        with torch.no_grad():
            out = linear_logprobs(hidden, weight, tokens, rows=rows, entropy="metric", tile=tile)
        return {"logp": out.logp}
    hidden.requires_grad_()
    if method == "frozen":
        out = linear_logprobs(hidden, weight, tokens, rows=rows, entropy="grad", tile=tile)
        assert out.entropy is not None
        return _loss_and_gradients(out.logp.sum() + out.entropy.sum(), [hidden])
    leaves = [hidden, weight.requires_grad_()]
    if method == "linear":
        out = linear_logprobs(hidden, weight, tokens, rows=rows, entropy="grad", tile=tile)
        assert out.entropy is not None
        return _loss_and_gradients(out.logp.sum() + out.entropy.sum(), leaves)
    if method == "policy":
        old = inputs["old_logp"]
        # The logits of one chunk and two work tiles.
        tile_columns = choose_tiles(shape.kept, shape.vocab, shape.width).columns
        budget = 4 * shape.chunk * (shape.vocab + 2 * tile_columns)
        out = linear_policy_loss(
            hidden,
            weight,
            tokens,
            rows=rows,
            old_logp=old,
            advantages=old,
            objective=PolicyObjective(entropy_coef=0.01),
            normalizer=float(max(shape.kept, 1)),
            budget=budget,
        )
        # The gradients exist already; backward would only look at the scalar that comes in.
        return {"loss": out.loss.detach()}
    logits = torch.nn.functional.linear(hidden, weight)
    if method == "plain":
        logp, entropy = _plain(logits, inputs["all_tokens"])
        del logits
        return _loss_and_gradients(logp.sum() + entropy.sum(), leaves)
    if method == "logits":
        out = token_logprobs(logits, tokens, rows=rows, entropy="grad", chunk_rows=shape.chunk)
        assert out.entropy is not None
        loss = out.logp.sum() + out.entropy.sum()
        del logits
        return _loss_and_gradients(loss, leaves)
    assert method == "gathered-step"
    # The model's output stays alive: whoever computed it still holds it.
    loss = _gathered_loss(_GatherRows.apply(logits.float(), rows), shape.chunk)  # type: ignore[arg-type]
    return _loss_and_gradients(loss, leaves)


def _plain(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def simulate_head(method: Method, shape: HeadShape) -> SimulatedPeak:
    """Peak of one forward and backward of `method` on tensors that hold no memory."""

    def make() -> Workload:
        kept = torch.empty(shape.kept, dtype=torch.int64)
        if method == "gathered-loss":
            return Workload({"logits": torch.empty(shape.kept, shape.vocab)})
        tensors = {
            "hidden": torch.empty(shape.rows, shape.width, dtype=shape.dtype),
            "weight": torch.empty(shape.vocab, shape.width, dtype=shape.dtype),
            "tokens": kept,
            "rows": torch.empty(shape.kept, dtype=torch.int64),
            "old_logp": torch.empty(shape.kept),
            "all_tokens": torch.empty(shape.rows, dtype=torch.int64),
        }
        return Workload(tensors)

    def build(workload: Workload) -> Step:
        def step() -> Outputs:
            if method == "gathered-loss":
                logits = workload.tensors["logits"].detach().requires_grad_()
                return _loss_and_gradients(_gathered_loss(logits, shape.chunk), [logits])
            return _head_step(method, shape, workload.tensors)

        return step

    return simulate_peak(build, make)


def simulate_optimizer(
    matrices: list[tuple[int, int]], adam_sizes: list[int], dtype: torch.dtype, compute: torch.dtype
) -> SimulatedPeak:
    """Peak of the first NorMuon step: state and scratch appear on top of weights and gradients."""
    from leanstep.muon import NorMuon

    def make() -> Workload:
        tensors = {}
        for i, shape in enumerate(matrices):
            tensors[f"w{i}"] = torch.empty(shape, dtype=dtype)
            tensors[f"g{i}"] = torch.empty(shape, dtype=dtype)
        for i, size in enumerate(adam_sizes):
            tensors[f"a{i}"] = torch.empty(size, dtype=dtype)
            tensors[f"h{i}"] = torch.empty(size, dtype=dtype)
        return Workload(tensors)

    def build(workload: Workload) -> Step:
        def parameters(letter: str, grad: str, count: int) -> list[torch.nn.Parameter]:
            found = []
            for i in range(count):
                p = torch.nn.Parameter(workload.tensors[f"{letter}{i}"])
                p.grad = workload.tensors[f"{grad}{i}"]
                found.append(p)
            return found

        groups: list[dict[str, Any]] = []
        if matrices:
            groups.append({"params": parameters("w", "g", len(matrices)), "algorithm": "normuon"})
        if adam_sizes:
            groups.append({"params": parameters("a", "h", len(adam_sizes)), "algorithm": "adam"})

        def step() -> Outputs:
            optimizer = NorMuon(groups, lr=0.02, nonfinite="ignore", compute_dtype=compute)
            optimizer.step()
            state: list[Tensor] = [
                t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)
            ]
            return {f"state{i}": t for i, t in enumerate(state)}

        return step

    return simulate_peak(build, make)
