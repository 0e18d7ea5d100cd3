"""What `leanstep plan` computes: devices, formulas, and every method on tensors that hold no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from leanstep.case import Outputs, Step, Workload
from leanstep.commands import BadInput
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
from leanstep.logprob.engine.peak_memory import Method, plan_memory
from leanstep.measure.peaks import SimulatedPeak, simulate_peak
from leanstep.preference import LensBatch, LensConfig, SamplingConfig, lens_loss

MIB, GIB = 2**20, 2**30
# What nvidia-smi reports, in MiB: less than the name on the box.
DEVICES_MIB = {
    "rtx4090": 24564,
    "a100-40": 40960,
    "a100-80": 81920,
    "h100": 81559,
    "h200": 143771,
    "b200": 183359,
}


def parse_devices(names: str | None, device_gb: float | None, reserve_gb: float) -> dict[str, int]:
    """Name -> bytes left for the plan, smallest device first."""
    if reserve_gb < 0:
        raise BadInput(f"--reserve-gb: expected 0 or more, got {reserve_gb:g}")
    if device_gb is not None and device_gb <= 0:
        raise BadInput(f"--device-gb: expected more than 0, got {device_gb:g}")
    chosen = {name: mib * MIB for name, mib in DEVICES_MIB.items()}
    if names is not None:
        wanted = [name.strip().lower() for name in names.split(",")]
        for name in wanted:
            if name not in chosen:
                raise BadInput(f"--devices: no device {name!r}; there are {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in wanted}
    elif device_gb is not None:
        chosen = {}
    if device_gb is not None:
        chosen[f"{device_gb:g} GiB"] = round(device_gb * GIB)
    reserve = round(reserve_gb * GIB)
    return {name: max(size - reserve, 0) for name, size in sorted(chosen.items(), key=lambda item: item[1])}


def judge(total_bytes: int, capacities: dict[str, int], largest: str) -> dict[str, dict[str, Any]]:
    """Per device: whether the total fits and, if not, what is missing and what takes most."""
    verdicts: dict[str, dict[str, Any]] = {}
    for name, capacity in capacities.items():
        missing = total_bytes - capacity
        why = None
        if missing > 0:
            why = (
                f"needs {total_bytes / GIB:.2f} GiB of {capacity / GIB:.2f} free, "
                f"{missing / GIB:.2f} too many; most of it: {largest}"
            )
        verdicts[name] = {"fits": missing <= 0, "why": why}
    return verdicts


def device_table(
    title: str,
    rows: list[dict[str, Any]],
    columns: Sequence[tuple[str, Callable[[dict[str, Any]], str]]],
    capacities: dict[str, int],
) -> Table:
    """The rows with their figures, and yes or no under each device."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, (name, _) in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for name, capacity in capacities.items():
        table.add_column(f"{name}\n{capacity / GIB:.0f}", justify="center", no_wrap=True)
    previous = None
    for row in rows:
        marks = ["yes" if v["fits"] else "[dim]no[/dim]" for v in row["devices"].values()]
        label = columns[0][1](row)
        cells = [label if label != previous else "", *(value(row) for _, value in columns[1:])]
        table.add_row(*cells, *marks)
        previous = label
    return table


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
    targets, rows = inputs["tokens"], inputs["rows"]
    tuning = Tuning(tile=Tiles(shape.chunk, shape.vocab, "rows"))
    if method == "no-grad":
        with torch.no_grad():
            out = linear_logprobs(hidden, weight, targets, rows=rows, entropy="metric", tuning=tuning)
        return {"logp": out.logp}
    hidden.requires_grad_()
    if method == "frozen":
        out = linear_logprobs(hidden, weight, targets, rows=rows, entropy="grad", tuning=tuning)
        assert out.entropy is not None
        return _loss_and_gradients(out.logp.sum() + out.entropy.sum(), [hidden])
    leaves = [hidden, weight.requires_grad_()]
    if method == "linear":
        out = linear_logprobs(hidden, weight, targets, rows=rows, entropy="grad", tuning=tuning)
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
            targets,
            PolicyBatch(old, old),
            rows=rows,
            objective=PolicyObjective(entropy_coef=0.01),
            normalizer=float(max(shape.kept, 1)),
            tuning=Tuning(budget=budget),
        )
        # The gradients exist already; backward would only look at the scalar that comes in.
        return {"loss": out.loss.detach()}
    logits = torch.nn.functional.linear(hidden, weight)
    if method == "plain":
        logp, entropy = _plain(logits, inputs["all_tokens"])
        del logits
        return _loss_and_gradients(logp.sum() + entropy.sum(), leaves)
    if method == "logits":
        out = token_logprobs(
            logits, targets, rows=rows, entropy="grad", tuning=Tuning(tile=(shape.chunk, None))
        )
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


def longest_batch(capacity: int, vocab: int, hidden: int, dtype: Any, chunk: int, simulated: bool) -> int:
    """The most rows that fit, all of them kept, by the figure that the rows above are judged by.

    Memory grows linearly with whole chunks of rows: two sizes tell the rest.
    """

    def total(rows: int) -> int:
        if simulated:
            peak = simulate_head("linear", HeadShape(rows, rows, vocab, hidden, dtype, chunk))
            return peak.input_bytes + peak.peak_bytes
        return plan_memory(rows, vocab, hidden, 1.0, dtype=dtype, chunk=chunk, kernels=True).total_bytes

    few, many = 4 * chunk, 8 * chunk
    least, most = total(few), total(many)
    each = (most - least) / (many - few)
    fixed = least - each * few
    if fixed >= capacity or each <= 0:
        return 0
    # A last partial chunk may cost up to one more than its share.
    rows = int((capacity - fixed) / each)
    return max(0, rows - rows % chunk) if rows >= chunk else rows


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


Sharding = Literal["replicated", "ZeRO-1", "ZeRO-2"]
SHARDINGS: tuple[Sharding, ...] = ("replicated", "ZeRO-1", "ZeRO-2")


def layer_matrices(layers: int, dim: int, hidden: int) -> list[tuple[int, int]]:
    """Four attention matrices and two of the MLP per layer."""
    return [*[(dim, dim)] * (4 * layers), *[(hidden, dim)] * (2 * layers)]


def plan_optimizer(
    optimizer: str,
    sharding: Sharding,
    world: int,
    layers: int,
    dim: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    scratch_bytes: int | None,
) -> dict[str, int]:
    """Bytes on the fullest rank, by what they hold.

    ZeRO-1 shards the state, ZeRO-2 the gradients as well. Muon needs whole matrices, so they are dealt out
    whole: the fullest rank has ceil(count / world) of each shape. Adam's tensors are cut evenly.
    """
    size = dtype.itemsize
    matrices = layer_matrices(layers, dim, hidden)
    elements = sum(r * c for r, c in matrices)
    tables = 2 * vocab * dim
    # A bfloat16 weight keeps 16 more bits, so that the pair is a float32 master.
    master = 2 if dtype == torch.bfloat16 else 0
    share = world if sharding != "replicated" else 1
    owned = [
        (-(-count // share), shape)
        for shape, count in {s: matrices.count(s) for s in dict.fromkeys(matrices)}.items()
    ]
    table_share = -(-tables // share)
    if optimizer == "adamw":
        # torch's AdamW on bf16 weights is usually given fp32 masters: 4 bytes, not 2.
        held = -(-elements // share) + table_share
        state = held * (8 + (4 if master else 0))
        scratch = 0
    else:
        lines = sum(n * max(shape) for n, shape in owned)
        state = sum(n * shape[0] * shape[1] for n, shape in owned) * (4 + master) + 4 * lines
        state += table_share * (8 + master)
        largest = max(r * c for r, c in matrices)
        # Without a simulation: the normalised update, its next iterate and three square products.
        scratch = (
            scratch_bytes if scratch_bytes is not None else largest * (4 + 2 * size) + 3 * dim * dim * size
        )
    grads = (elements + tables) * size
    if sharding == "ZeRO-2":
        grads = sum(n * shape[0] * shape[1] for n, shape in owned) * size + table_share * size
    return {
        "weights": (elements + tables) * size,
        "gradients": grads,
        "state": state,
        "scratch": scratch,
    }


def simulate_scratch(dim: int, hidden: int, dtype: torch.dtype) -> int:
    """Scratch of one real step over one matrix of each shape: what appears beyond the state."""
    shapes = list(dict.fromkeys([(dim, dim), (hidden, dim)]))
    peak = simulate_optimizer(shapes, [], dtype, dtype)
    return peak.extra_bytes


LENS_METHODS = {
    "fused": "leanstep.preference.lens_loss: closed-form gradient",
    "eager": "the same under autograd, dense rows (what torch.compile sees)",
}
# [P, W] fp32 tensors alive at the peak, counted on fake tensors.
_PAIR_TENSORS = {"fused": 11, "eager": 11}


def plan_objective(
    method: str, samples: int, variants: int, tokens: int, width: int, pairs: int
) -> dict[str, int]:
    """Bytes by what they hold; a sequence has at most all pairs of its variants."""
    contexts = samples * variants
    count = samples * min(pairs, variants * (variants - 1) // 2)
    return {
        "inputs": contexts * width * 14 + samples * variants * 20,
        "tables": (contexts + count) * (tokens + 1),
        "pair tensors": _PAIR_TENSORS[method] * count * width * 4,
    }


def make_objective_inputs(samples: int, variants: int, tokens: int, width: int) -> dict[str, torch.Tensor]:
    contexts = samples * variants
    return {
        "scores": torch.empty(contexts, width),
        "pos": torch.empty(contexts, width, dtype=torch.int64),
        "lod": torch.empty(contexts, width, dtype=torch.int8),
        "valid": torch.empty(contexts, width, dtype=torch.bool),
        "loss": torch.empty(samples, variants),
        "row": torch.empty(samples, variants, dtype=torch.int64),
        "tokens": torch.empty(contexts, dtype=torch.int64),
        "baseline": torch.empty(samples, dtype=torch.int64),
    }


def simulate_objective(
    method: str, samples: int, variants: int, tokens: int, width: int, pairs: int
) -> SimulatedPeak:
    """Forward and backward of the real objective on fake tensors."""
    config = LensConfig(sampling=SamplingConfig(max_pairs=pairs, num_random_variants=max(variants - 1, 1)))

    def build(workload: Workload) -> Step:
        def step() -> Outputs:
            t: dict[str, Any] = dict(workload.tensors)
            scores = t.pop("scores").detach().requires_grad_()
            result = lens_loss(scores, LensBatch(**t, num_tokens=tokens), config, backend=method)
            (grad,) = torch.autograd.grad(result.loss, scores)
            return {"grad": grad}

        return step

    return simulate_peak(build, lambda: Workload(make_objective_inputs(samples, variants, tokens, width)))
