"""Ops that are too small, too many or needless: storms, activations by hand, fills, copies, idle launches."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch

from leanstep.diagnose.findings import Finding, Hit, Launches, Rule, Work, callers_of, listed, plural
from leanstep.diagnose.step import Op, Step, grouped, pairs
from leanstep.tape.events import BACKWARD, FORWARD, OPTIMIZER, TensorInfo
from leanstep.units import size

CASTS = frozenset({"_to_copy", "convert_element_type", "to", "float", "half", "bfloat16"})
_ADDS = ("add", "add_", "sub", "sub_", "copy_")
_FOREACH_ADDS = ("_foreach_add_", "_foreach_add", "_foreach_sub_", "_foreach_sub", "_foreach_copy_")


def op_storm(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find lines that repeat a tiny op many times, in forward and backward together."""
    for line, ops in step.by_line.items():
        ops = [op for op in ops if op.phase != OPTIMIZER]
        tiny = [op for op in ops if step.is_small(op, limits["tiny_bytes"])]
        direct = [op for op in tiny if op.direct]
        repeats = Counter(op.name for op in direct)
        most = max(repeats.values(), default=0)
        if most < limits["repeats"] or len(tiny) < limits["ops"]:
            continue
        # A loop over layers reads new parameters in each iteration; each accumulated batch repeats it.
        if _weights_read(step, ops) >= most / max(step.backward_runs, 1) / 2:
            continue
        evidence = {
            "forward_ops": len(direct),
            "backward_ops": len(tiny) - len(direct),
            "repeats": dict(repeats.most_common(3)),
            "mean_bytes": sum(op.read_bytes + op.written_bytes for op in ops) // max(len(tiny), 1),
        }
        phase = Counter(op.phase for op in direct).most_common(1)[0][0]
        callers = callers_of(op.site for op in direct)
        yield Hit(line, len(direct), callers, phase, evidence, Work(ops=len(tiny)))


def _weights_read(step: Step, ops: list[Op]) -> int:
    """Return how many weights are read from the first to the last run of an op that the line repeats.

    Without gradients, a model that runs repeatedly decodes or acts. That loop is no storm, so every read
    counts, not every weight.
    """
    spans: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for op in ops:
        if op.direct:
            spans[op.site, op.name, op.phase, op.event.chain].append(op.index)
    return max(
        (step.weights_read(places[0], places[-1], distinct=not key[3]) for key, places in spans.items()
         if len(places) >= MIN_REPEATS),
        default=0,
    )  # fmt: skip


# The weights read between the runs of an op are counted from this many runs on.
MIN_REPEATS = 8

OP_STORM = Rule(
    "op-storm",
    op_storm,
    limits={"repeats": 32, "ops": 100, "tiny_bytes": 256 * 1024},
    fires_when="a line repeats a tiny op (≤ 256 KiB) ≥ 32 times (≥ 100 times with its backward)",
    what=lambda f: (
        f"The line dispatches {f.evidence['forward_ops']:,} tiny ops ({listed(f.evidence['repeats'])}) and "
        f"its backward {f.evidence['backward_ops']:,} more, on average {size(f.evidence['mean_bytes'])} each."
    ),
    amount=lambda f: f"{f.count:,} tiny ops",
    why="Each op costs microseconds of dispatch (and a launch on a GPU), however little it computes.",
    fix="Replace the loop by tensor ops over all items at once. leanstep.lens does this for a "
    "controller, leanstep.heads for per-token log-probs.",
    short_fix="one tensor op over all items",
    removes="small ops",
    compiled=Launches(limit="repeats"),
    traces=True,
)


def gelu_by_hand(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find an activation with tanh or erf that consists of five or more elementwise ops."""
    for line, ops in step.by_line.items():
        ops = [op for op in ops if op.direct and op.phase == FORWARD]
        large = [op for op in ops if not op.flops and op.largest >= limits["op_bytes"]]
        counts = Counter(op.name for op in large)
        moved = sum(op.read_bytes + op.written_bytes for op in large)
        calls = max(counts["tanh"], counts["erf"])
        cubic = counts["erf"] or counts["pow"] >= calls or counts["mul"] >= 5 * calls
        if not calls or not cubic or counts["mul"] < 2 * calls or not counts["add"]:
            continue
        if any(op.flops for op in ops) or len(large) < limits["ops"] * calls or moved < limits["bytes"]:
            continue
        evidence = {"ops": dict(counts.most_common(6)), "calls": calls, "bytes": moved}
        # One fused op reads and writes as much as one of these; the backward of each op writes as much again.
        work = Work(moved_bytes=2 * moved * (1 - calls / len(large)))
        yield Hit(line, len(large), callers_of(op.site for op in large), FORWARD, evidence, work)


GELU_BY_HAND = Rule(
    "gelu-by-hand",
    gelu_by_hand,
    limits={"ops": 5, "op_bytes": 64 * 1024, "bytes": 1024 * 1024},
    fires_when="an activation with tanh or erf, written as ≥ 5 elementwise ops on one line",
    what=lambda f: (
        f"An activation function built from {f.count // f.evidence['calls']} elementwise ops "
        f"({listed(f.evidence['ops'])}), {size(f.evidence['bytes'])} moved in the forward alone."
    ),
    amount=lambda f: f"{f.count:,} ops",
    why="Each op reads and writes the whole activation, and saves some of it for the backward.",
    fix='torch.nn.functional.gelu(x, approximate="tanh") (or "none" for erf): one op, one saved tensor.',
    short_fix='F.gelu(x, approximate="tanh")',
    compiled=Launches(limit="ops"),
    traces=True,
)


# Backward ops that write a whole buffer for a small gradient, their first argument.
_WHOLE_BUFFER = ("select_backward", "slice_backward", "unfold_backward", "diagonal_backward")
# Ops that write a small gradient into zeros -> position of the gradient.
_INTO_ZEROS = {
    "index_put": 2,
    "index_put_": 2,
    "_index_put_impl_": 2,
    "scatter_add": 3,
    "scatter_add_": 3,
    "index_add": 3,
    "index_add_": 3,
}
# What a compiler makes of them.
_FILLS = frozenset(_WHOLE_BUFFER) | frozenset(_INTO_ZEROS) | {
    "select_scatter", "slice_scatter", "embedding_dense_backward", "new_zeros", "zeros", "full", "scatter",
    "constant_pad_nd", "as_strided_scatter", "index_select_backward", "_unsafe_index_put", "zeros_like",
}  # fmt: skip


def zero_fill(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find backward ops that write a whole buffer of zeros for a small gradient."""
    zeros: set[int] = set()
    fills: list[Op] = []
    for op in step.ops:
        if op.phase != BACKWARD:
            continue
        if op.name in ("zeros", "new_zeros", "zeros_like"):
            zeros.update(tensor.storage for tensor in op.outs)
        gradient = _filled(op, zeros)
        if gradient is not None and op.outs[0].num_bytes >= limits["ratio"] * gradient.num_bytes:
            fills.append(op)
    for line, ops in grouped(fills, lambda op: op.site).items():
        written = sum(op.outs[0].num_bytes for op in ops)
        if len(ops) < limits["ops"] or written < limits["bytes"]:
            continue
        merges = sum(not op.direct and op.name in ("add", "add_") for op in step.by_line[line])
        evidence = {"ops": dict(Counter(op.name for op in ops)), "bytes": written, "merging_adds": merges}
        # Written once by the fill, then read and written again by the add that accumulates it.
        work = Work(moved_bytes=written * (3 if merges else 1))
        yield Hit(line, len(ops), callers_of(op.site for op in ops), BACKWARD, evidence, work)


def _filled(op: Op, zeros: set[int]) -> TensorInfo | None:
    """Return the gradient for which an op writes a whole buffer."""
    args = op.event.args
    if op.name in _WHOLE_BUFFER:
        return args[0]
    if op.name in _INTO_ZEROS and op.outs and args[0].storage in zeros:
        zeros.discard(args[0].storage)
        return args[_INTO_ZEROS[op.name]]
    return None


ZERO_FILL = Rule(
    "zero-fill",
    zero_fill,
    limits={"ops": 4, "ratio": 4, "bytes": 256 * 1024},
    fires_when="≥ 4 backward ops write a buffer ≥ 4 × their gradient",
    what=lambda f: (
        f"The backward of this line writes {f.count:,} whole buffers ({listed(f.evidence['ops'])}), "
        f"{size(f.evidence['bytes'])} in total, each for a gradient at most a quarter of its size."
    ),
    amount=lambda f: f"{f.count:,} fills",
    why="For each indexed piece, autograd fills a full-size buffer with zeros and then adds all buffers up.",
    fix="Take all pieces with one op: unbind, split, or a loss over the whole tensor. For parameter "
    "banks use the accessor of recipes.speedrun, which writes every slice of the gradient once.",
    short_fix="unbind/split once; one loss for all",
    leanstep="recipes.speedrun",
    removes="fill",
    edit="unbind",
    compiled=Launches(limit="ops", ops=_FILLS, backward=True, as_large=True),
)


def transposed_copy(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find copies or adds across memory layouts."""
    least = limits["op_bytes"]
    changes = [
        (op, tensor, kind, bool(operands & step.run.state))
        for op in step.ops
        if op.direct and op.largest >= least
        for tensor, kind, operands in layout_changes(op)
        if tensor.num_bytes >= least
    ]
    for line, group in grouped(changes, lambda change: change[0].site).items():
        of_state = [change for change in group if change[3]]
        others = [change for change in group if not change[3]]
        num_bytes = sum(tensor.num_bytes for _, tensor, _, _ in others)
        if num_bytes >= max(limits["bytes"], limits["share"] * step.written_bytes):
            of_state += others
        if not of_state:
            continue
        in_optimizer = any(op.direct and op.phase == OPTIMIZER for op in step.by_line[line])
        num_bytes = sum(tensor.num_bytes for _, tensor, _, _ in of_state)
        evidence = {
            "kinds": dict(Counter(kind for _, _, kind, _ in of_state)),
            "bytes": num_bytes,
            "step_written_bytes": step.written_bytes,
        }
        callers = callers_of(op.site for op, *_ in of_state)
        phase = OPTIMIZER if in_optimizer else FORWARD
        yield Hit(line, len(of_state), callers, phase, evidence, Work(strided_bytes=2 * num_bytes))


def layout_changes(op: Op) -> Iterator[tuple[TensorInfo, str, set[int]]]:
    """Return (tensor, kind, storages) of the copies and adds of an op across layouts."""
    if op.name == "clone":
        contiguous = dict(op.event.named).get("memory_format") == torch.contiguous_format
        if contiguous and out_of_order(op.tensors[0]):
            yield op.outs[0], "copy", {op.tensors[0].storage}
    elif op.name in _ADDS or op.name in _FOREACH_ADDS:
        for first, second in pairs(op):
            if type(second) is TensorInfo and different_order(first, second):
                kind = "copy" if op.name == "copy_" else "add"
                yield (op.outs[0] if op.name in _ADDS else first), kind, {first.storage, second.storage}


def different_order(a: TensorInfo, b: TensorInfo) -> bool:
    """Return whether two tensors of one shape store their dimensions in different orders."""
    if a.shape != b.shape or a.ndim < 2:
        return False
    first, second = a.layout.stride, b.layout.stride
    # A dimension of stride 0 is broadcast and has no position in the order.
    dims = [d for d, length in enumerate(a.shape) if length > 1 and first[d] and second[d]]
    return sorted(dims, key=lambda d: -first[d]) != sorted(dims, key=lambda d: -second[d])


def out_of_order(tensor: TensorInfo) -> bool:
    """Return whether dimensions are not stored outermost first: a transposed view, not merely a slice."""
    layout = tensor.layout
    strides = [s for s, length in zip(layout.stride, layout.shape, strict=True) if length > 1 and s]
    return any(outer < inner for outer, inner in itertools.pairwise(strides))


TRANSPOSED_COPY = Rule(
    "transposed-copy",
    transposed_copy,
    limits={"op_bytes": 256 * 1024, "bytes": 1024 * 1024, "share": 0.05},
    fires_when="a copy or add of ≥ 256 KiB between memory layouts",
    what=lambda f: (
        f"{listed(f.evidence['kinds'])} across memory layouts, {size(f.evidence['bytes'])} per step: it "
        "reads along one axis and writes along the other."
    ),
    amount=lambda f: plural(f.count, "copy", "copies"),
    why="A strided pass is several times slower than a contiguous one, and a matmul accepts either "
    "layout at no cost.",
    fix="Pass the transposed view to the matmul, and store state in the layout in which it is used. The "
    "transpose-copy and transpose-add kernels of leanstep.muon and recipes.speedrun do the remaining "
    "transposes in tiles.",
    short_fix="pass the view; keep one layout",
    leanstep="leanstep.muon",
    removes="strided",
    compiled=Launches(
        ops=frozenset({"clone", "copy", "copy_", "contiguous", "add", "add_"}) | CASTS, bytes="op_bytes"
    ),
    traces=True,
)


def indexed_weight(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find rows of a parameter read with weight[ids], whose backward is an index_put that sorts."""
    reads = [op for op in step.ops if op.name == "index" and _looks_up_rows(step, op)]
    for line, ops in grouped(reads, lambda op: op.site).items():
        read = sum(op.written_bytes for op in ops)
        if read < limits["bytes"]:
            continue
        shapes = Counter(f"{list(op.tensors[0].shape)}[{list(op.tensors[1].shape)}]" for op in ops)
        evidence = {"shapes": dict(shapes.most_common(3)), "bytes": read}
        # The backward reads the gradient and adds it row by row: about twice the necessary writes.
        yield Hit(
            line, len(ops), callers_of(op.site for op in ops), FORWARD, evidence, Work(moved_bytes=2 * read)
        )


def _looks_up_rows(step: Step, op: Op) -> bool:
    if not op.direct or op.phase != FORWARD or op.event.node < 0 or op.in_leanstep:
        return False
    source, indices = op.event.args[:2]
    if len(indices) != 1 or type(indices[0]) is not TensorInfo or source.ndim != 2:
        return False
    return indices[0].dtype in (torch.int64, torch.int32) and source.storage in step.run.parameters


INDEXED_WEIGHT = Rule(
    "indexed-weight",
    indexed_weight,
    limits={"bytes": 256 * 1024},
    fires_when="`weight[ids]` reads ≥ 256 KiB of a parameter's rows, with gradients",
    what=lambda f: (
        f"Rows of a parameter are read with weight[ids]: {listed(f.evidence['shapes'])}, "
        f"{size(f.evidence['bytes'])} per step."
    ),
    amount=lambda f: plural(f.count, "look-up"),
    why="The backward of indexing is an accumulating index_put, which sorts the ids on a GPU; "
    "the backward of an embedding is one kernel.",
    fix="torch.nn.functional.embedding(ids, weight): the same rows, a cheaper backward.",
    short_fix="F.embedding(ids, weight)",
)


def idle_launches(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find phases where the device is idle because the host launches small kernels one by one."""
    for hit in step.idle("launch"):
        if hit.evidence["share"] >= limits["share"] and hit.count >= limits["launches"]:
            yield hit


def _idle(f: Finding, between: str) -> str:
    e = f.evidence
    return f"The device is idle for {e['share']:.0%} of the step {between} ({listed(e['by'])})."


LAUNCH_BOUND = Rule(
    "launch-bound",
    idle_launches,
    limits={"share": 0.10, "launches": 16},
    fires_when="in a trace: the device is idle between ≥ 16 launches of a phase for ≥ 10 % of the step",
    what=lambda f: _idle(f, f"between {f.count:,} launches of the {f.phase}"),
    amount=lambda f: f"{f.count:,} launches",
    why="The device finishes each kernel before the host has launched the next one.",
    fix='torch.compile, CUDA graphs (mode="reduce-overhead"), larger batches, fused=True optimizers: '
    "fewer launches, each with more work.",
    short_fix="torch.compile, CUDA graphs",
    needs="trace",
)


def gaps(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find gaps where the device waits for the next batch."""
    for hit in step.idle("pause"):
        if hit.evidence["share"] >= limits["share"]:
            yield hit


STEP_GAP = Rule(
    "step-gap",
    gaps,
    limits={"share": 0.05},
    fires_when="in a trace: the device is idle for ≥ 5 % of the step while the next batch is prepared",
    what=lambda f: _idle(f, "while the next batch is prepared"),
    amount=lambda f: plural(f.count, "gap"),
    why="The loader is slower than the step, or does not prefetch.",
    fix="num_workers, prefetch_factor and persistent_workers of the DataLoader, cheaper preparation, "
    "pin_memory.",
    short_fix="more workers, prefetching",
    needs="trace",
)
