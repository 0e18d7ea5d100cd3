"""The steps that `leanstep plan` judges, as CUDA code. Runs inside a rehearsal, for shapes only:

    python -m leanstep.commands.plan_workloads '[{"what": "head", "method": "linear", "rows": 205280, ...}]'

Each job is two steps of the rehearsal: its inputs are made, then its work is done.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.lens import LensBatch, LensConfig, SamplingConfig, lens_loss
from leanstep.logprob import (
    PolicyBatch,
    PolicyObjective,
    Tiles,
    Tuning,
    choose_tiles,
    linear_logprobs,
    linear_policy_loss,
    token_logprobs,
)
from leanstep.muon import NorMuon

DEVICE = "cuda"
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# What a job made and must stay alive until its work is done, and the parameters among it.
Made = tuple[Callable[[], Any], Sequence[Tensor]]


@dataclass(frozen=True)
class HeadShape:
    """T rows of which N are kept, V columns, D wide, in row chunks."""

    method: str
    rows: int
    kept: int
    vocab: int
    width: int
    dtype: str
    chunk: int


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def head(shape: HeadShape) -> Made:
    """Log-prob and entropy with gradients by one of the methods of `plan logprob`."""
    if shape.method == "gathered-loss":
        logits = empty(shape.kept, shape.vocab).requires_grad_()
        return lambda: torch.autograd.grad(_gathered_loss(logits, shape.chunk), [logits]), []
    dtype = DTYPES[shape.dtype]
    inputs = {
        "hidden": empty(shape.rows, shape.width, dtype=dtype),
        "weight": empty(shape.vocab, shape.width, dtype=dtype),
        "tokens": empty(shape.kept, dtype=torch.int64),
        "rows": empty(shape.kept, dtype=torch.int64),
    }
    if shape.method == "policy":
        inputs["old_logp"] = empty(shape.kept)
    if shape.method == "plain":
        inputs["all_tokens"] = empty(shape.rows, dtype=torch.int64)
    return lambda: head_step(shape, inputs), []


def head_step(shape: HeadShape, inputs: dict[str, Tensor]) -> list[Tensor]:
    """One forward and backward; returns what a caller would keep."""
    method = shape.method
    hidden, weight = inputs["hidden"].detach(), inputs["weight"].detach()
    targets, rows = inputs["tokens"], inputs["rows"]
    tuning = Tuning(tile=Tiles(shape.chunk, shape.vocab, "rows"))
    if method == "no-grad":
        with torch.no_grad():
            out = linear_logprobs(hidden, weight, targets, rows=rows, entropy="metric", tuning=tuning)
        return [out.logp]
    leaves = [hidden.requires_grad_()]
    if method != "frozen":
        leaves.append(weight.requires_grad_())
    if method in ("frozen", "linear"):
        out = linear_logprobs(hidden, weight, targets, rows=rows, entropy="grad", tuning=tuning)
        assert out.entropy is not None
        return list(torch.autograd.grad(out.logp.sum() + out.entropy.sum(), leaves))
    if method == "policy":
        old = inputs["old_logp"]
        # The logits of one chunk and two work tiles.
        tile_columns = choose_tiles(shape.kept, shape.vocab, shape.width).columns
        budget = 4 * shape.chunk * (shape.vocab + 2 * tile_columns)
        out = linear_policy_loss(
            hidden,
            weight,
            targets,
            PolicyBatch(old, old),
            rows=rows,
            objective=PolicyObjective(entropy_coef=0.01),
            normalizer=float(max(shape.kept, 1)),
            tuning=Tuning(budget=budget),
        )
        # The gradients exist already; backward would only look at the scalar that comes in.
        return [out.loss]
    logits = torch.nn.functional.linear(hidden, weight)
    if method == "plain":
        logp, entropy = _plain(logits, inputs["all_tokens"])
        del logits
        return list(torch.autograd.grad(logp.sum() + entropy.sum(), leaves))
    if method == "logits":
        tuning = Tuning(tile=(shape.chunk, None))
        out = token_logprobs(logits, targets, rows=rows, entropy="grad", tuning=tuning)
        assert out.entropy is not None
        loss = out.logp.sum() + out.entropy.sum()
        del logits
        return list(torch.autograd.grad(loss, leaves))
    assert method == "gathered-step"
    # The model's output stays alive: whoever computed it still holds it.
    loss = _gathered_loss(logits.float().index_select(0, rows), shape.chunk)
    return list(torch.autograd.grad(loss, leaves))


def _plain(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


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


def _gathered_loss(logits: Tensor, chunk: int) -> Tensor:
    total = logits.new_zeros(())
    for part in logits.split(chunk):
        logp, entropy = _ChunkLoss.apply(part)
        total = total + logp.sum() + entropy.sum()
    return total


@dataclass(frozen=True)
class OptimizerShape:
    """Four attention matrices and two of the MLP per layer, an embedding and a head (both Adam's)."""

    optimizer: str
    sharding: str
    layers: int
    dim: int
    hidden: int
    vocab: int
    dtype: str

    def matrices(self) -> list[tuple[int, int]]:
        square, wide = (self.dim, self.dim), (self.hidden, self.dim)
        return [*[square] * (4 * self.layers), *[wide] * (2 * self.layers)]

    def tables(self) -> list[tuple[int, int]]:
        return [(self.vocab, self.dim)] * 2


def optimizer(shape: OptimizerShape) -> Made:
    """One step on weights and gradients that are there: state and scratch appear on top of them."""
    if not dist.is_initialized():
        dist.init_process_group()
    dtype = DTYPES[shape.dtype]
    if shape.optimizer == "adamw" and shape.sharding == "ZeRO-1":
        return _flat_adamw(shape, dtype)
    make = _shard if shape.sharding == "FSDP2" else empty
    matrices, tables = (
        [torch.nn.Parameter(make(*size, dtype=dtype)) for size in sizes]
        for sizes in (shape.matrices(), shape.tables())
    )
    params = [*matrices, *tables]
    for p in params:
        p.grad = torch.empty_like(p)
    if shape.optimizer == "adamw":
        return _adamw(params), params
    groups = [
        {"params": matrices, "algorithm": "normuon"},
        {"params": tables, "algorithm": "adam"},
    ]
    mesh = dist.group.WORLD if shape.sharding == "ZeRO-1" else None
    return NorMuon(groups, lr=0.02, mesh=mesh, nonfinite="ignore").step, params


@functools.cache
def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def _shard(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    local = empty(-(-rows // dist.get_world_size()), columns, dtype=dtype)
    size = torch.Size((rows, columns))
    return DTensor.from_local(local, _mesh(), [Shard(0)], run_check=False, shape=size, stride=(columns, 1))


def _adamw(params: list[torch.nn.Parameter]) -> Callable[[], None]:
    """torch's fused AdamW; 16-bit weights have fp32 masters, as they usually do: weights, too."""
    masters = params
    if params[0].dtype != torch.float32:
        masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    update = torch.optim.AdamW(masters, lr=1e-3, fused=True)

    def step() -> None:
        for p, master in zip(params, masters, strict=True):
            if master is not p:
                assert p.grad is not None
                master.grad = p.grad.to(master.dtype)
        update.step()
        if masters is not params:
            for p, master in zip(params, masters, strict=True):
                p.detach().copy_(master.detach())

    return step


def _flat_adamw(shape: OptimizerShape, dtype: torch.dtype) -> Made:
    """Weights and gradients as one buffer each, a rank's share of state: ZeRO-1 as Megatron lays it out."""
    world = dist.get_world_size()
    share = -(-sum(r * c for r, c in (*shape.matrices(), *shape.tables())) // world)
    weights = torch.nn.Parameter(empty(share * world, dtype=dtype))
    weights.grad = torch.empty_like(weights)
    mine = torch.nn.Parameter(empty(share, dtype=torch.float32))
    update = torch.optim.AdamW([mine], lr=1e-3, fused=True)

    def step() -> None:
        assert weights.grad is not None
        part = weights.grad.new_empty(share)
        dist.reduce_scatter_tensor(part, weights.grad)
        mine.grad = part.float()
        update.step()
        dist.all_gather_into_tensor(weights.detach(), mine.detach().to(dtype))

    return step, [weights]


@dataclass(frozen=True)
class ObjectiveShape:
    """Contexts of `width` entries over `tokens` tokens, and preference pairs between them."""

    method: str
    samples: int
    variants: int
    tokens: int
    width: int
    pairs: int


def objective(shape: ObjectiveShape) -> Made:
    """The controller objective, forward and backward."""
    variants = shape.variants
    config = LensConfig(
        sampling=SamplingConfig(max_pairs=shape.pairs, num_random_variants=max(variants - 1, 1))
    )
    contexts = shape.samples * variants
    scores = empty(contexts, shape.width).requires_grad_()
    batch = LensBatch(
        pos=empty(contexts, shape.width, dtype=torch.int64),
        lod=empty(contexts, shape.width, dtype=torch.int8),
        valid=empty(contexts, shape.width, dtype=torch.bool),
        loss=empty(shape.samples, variants),
        row=empty(shape.samples, variants, dtype=torch.int64),
        tokens=empty(contexts, dtype=torch.int64),
        baseline=empty(shape.samples, dtype=torch.int64),
        num_tokens=shape.tokens,
    )

    def step() -> Any:
        result = lens_loss(scores, batch, config, backend=shape.method)
        return torch.autograd.grad(result.loss, scores)

    return step, []


class Pace(torch.optim.Optimizer):
    """Ends a step of the rehearsal and does nothing else."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1, device=DEVICE, requires_grad=True)], {})

    def step(self, params: Sequence[Tensor]) -> None:  # type: ignore[override]
        self.param_groups[0]["params"] = params


KINDS: dict[str, tuple[type, Callable[[Any], Made]]] = {
    "head": (HeadShape, head),
    "optimizer": (OptimizerShape, optimizer),
    "objective": (ObjectiveShape, objective),
}


def main(jobs: list[dict[str, Any]]) -> None:
    pace = Pace()
    for job in jobs:
        record, make = KINDS[job.pop("what")]
        work, params = make(record(**job))
        pace.step(params)
        kept = work()
        pace.step(params)
        del kept, work, params
        gc.collect()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
