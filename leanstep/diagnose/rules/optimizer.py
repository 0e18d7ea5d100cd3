"""Updates: loops over parameters, short-lived buffers, copies of weights, unused and missing gradients."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from leanstep.diagnose.advice import Advice
from leanstep.diagnose.findings import (
    Finding,
    Hit,
    Launches,
    Rule,
    Work,
    callers_of,
    listed,
    plural,
    time_text,
)
from leanstep.diagnose.rules.ops import out_of_order
from leanstep.diagnose.step import Op, Step, by_line, grouped
from leanstep.tape.events import (
    BACKWARD,
    FORWARD,
    ON_GPU,
    OPTIMIZER,
    PARAMETER,
    RECOMPUTE,
    UPDATE,
    Held,
    Layout,
)
from leanstep.tape.lines import UNKNOWN, Line, Site
from leanstep.units import size

UPDATE_ADVICE = (
    Advice(
        "zero_grad(set_to_none=True), the default since torch 2.0, writes nothing. Zeros are written one "
        "gradient at a time.",
        "zero_grad(set_to_none=True)",
        code=("zero_grad(",),
    ),
    Advice(
        "clip_grad_norm_(..., foreach=True) computes norms and scales gradients in a few calls. Where the "
        "norm is only logged, compute it every k-th step.",
        "clip_grad_norm_(..., foreach=True)",
        code=("clip_grad_norm_(", "clip_grad_value_("),
    ),
)
ON_CPU_ONLY = Advice(
    "On a GPU torch already updates the parameters together (foreach): this loop is the CPU's. fused=True "
    "updates them in one pass on both.",
    "fused=True (already foreach on a GPU)",
    when=lambda f: bool(f.evidence.get("foreach_on_gpu")),
)
TRAINERS_OPTIMIZER = Advice(
    "The trainer creates the optimizer: --optim adamw_torch_fused, or TrainingArguments("
    'optim="adamw_torch_fused").',
    "--optim adamw_torch_fused",
    code=("optimizer.step(",),
    trainer=True,
)


def unbatched_optimizer(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find optimizers that loop over their parameters instead of updating them together."""
    # On a CPU NorMuon processes one matrix at a time, each on one core: not a loop of the user's.
    lines = by_line(op for op in step.ops if op.phase == OPTIMIZER and not op.in_leanstep)
    if sum(map(len, lines.values())) < limits["ops"]:
        return
    # A line that updates otherwise too keeps the general advice.
    updates = [] if step.run.accelerator else step.of_kind(UPDATE)
    by_default = {e.site.line for e in updates if ON_GPU in e.named}
    by_default -= {e.site.line for e in updates if ON_GPU not in e.named}
    for line, ops in lines.items():
        matmuls = Counter(
            op.matmul_shape for op in ops if op.matmul is not None and op.flops <= limits["flops"]
        )
        repeats = Counter(op.name for op in ops if not op.flops and step.is_small(op, limits["bytes"]))
        same_shape = sum(count for count in matmuls.values() if count > 1)
        if same_shape:
            repeats["matmul"] = same_shape
        if max(repeats.values(), default=0) < limits["repeats"]:
            continue
        groups = max(len(matmuls), 1) if same_shape else len(repeats)
        evidence = {
            "ops": len(ops),
            "repeats": dict(repeats.most_common(3)),
            "groups": groups,
            "written_bytes": sum(op.written_bytes for op in ops),
        }
        if line in by_default:
            evidence["foreach_on_gpu"] = True
        # One pass would read and write as much as two of the kinds of ops do.
        passes = [op for op in ops if not op.flops]
        kinds = len({op.name for op in passes})
        moved = sum(op.read_bytes + op.written_bytes for op in passes) * max(0.0, 1 - 2 / max(kinds, 1))
        work = Work(loop_ops=max(len(ops) - groups, 0), moved_bytes=moved)
        confidence = "medium" if line in by_default else "high"
        yield Hit(line, len(ops), callers_of(op.site for op in ops), OPTIMIZER, evidence, work, confidence)


UNBATCHED_OPTIMIZER = Rule(
    "unbatched-optimizer",
    unbatched_optimizer,
    limits={"repeats": 16, "ops": 64, "bytes": 4 * 1024 * 1024, "flops": 4e9},
    fires_when="an optimizer updates one small tensor at a time",
    what=lambda f: (
        f"The optimizer dispatches {f.evidence['ops']:,} ops from this line, one tensor at a time: "
        f"{listed(f.evidence['repeats'])}."
    ),
    amount=lambda f: f"{f.count:,} ops",
    why="When each parameter gets its own ops, small updates are pure overhead.",
    fix="fused=True (or foreach=True) for torch's optimizers, torch._foreach_* ops in hand-written "
    "updates, leanstep.muon.NorMuon for Muon: it stacks matrices of one shape and multiplies them "
    "together.",
    short_fix="fused=True, _foreach_*, or NorMuon",
    leanstep="leanstep.muon.NorMuon",
    removes="optimizer loop",
    edit="optimizer",
    compiled=Launches(limit="ops"),
    advice=(ON_CPU_ONLY, TRAINERS_OPTIMIZER, *UPDATE_ADVICE),
    traces=True,
)


class _Buffer(NamedTuple):
    """A large buffer made without gradients. `weights`: how many matmuls with a weight ran before."""

    op: Op
    storage: int
    num_bytes: int
    weights: int


def alloc_churn(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find lines that repeatedly allocate and free large buffers under no_grad."""
    for line, groups in grouped(_churned(step, limits), lambda group: group[0][0].op.site).items():
        buffers = [buffer for buffers, _ in groups for buffer in buffers]
        in_use = sum(alive for _, alive in groups)
        count = len(buffers) - in_use
        if count < limits["buffers"]:
            continue
        num_bytes = sum(
            sum(buffer.num_bytes for buffer in buffers) * (len(buffers) - alive) // len(buffers)
            for buffers, alive in groups
        )
        in_optimizer = any(op.phase == OPTIMIZER for op in step.by_line[line])
        evidence = {"buffers": count, "bytes": num_bytes}
        callers = callers_of(buffer.op.site for buffer in buffers)
        phase = OPTIMIZER if in_optimizer else FORWARD
        yield Hit(line, count, callers, phase, evidence, Work(moved_bytes=num_bytes))


def _fresh(step: Step, limits: Mapping[str, float]) -> dict[Site, list[_Buffer]]:
    """Return the buffers of each site."""
    buffers_of: dict[Site, list[_Buffer]] = defaultdict(list)
    weights, done = step.heads.weight_matmuls, 0
    for op in step.ops:
        while done < len(weights) and weights[done] < op.index:
            done += 1
        if op.event.grad or op.largest < limits["bytes"] or op.phase in (BACKWARD, RECOMPUTE):
            continue
        if op.matmul is not None or op.name == "_to_copy" or not op.makes_buffers:
            continue
        for out in op.outs:
            if out.num_bytes >= limits["bytes"]:
                buffers_of[op.site].append(_Buffer(op, out.storage, out.num_bytes, done))
    # The activations of a frozen model are not churn: layers run between one buffer and the next.
    return {
        site: buffers
        for site, buffers in buffers_of.items()
        if buffers[-1].weights - buffers[0].weights < len(buffers) / 2
    }


def _churned(step: Step, limits: Mapping[str, float]) -> Iterator[tuple[list[_Buffer], int]]:
    """Return the buffers of each site, and how many of them are in use: alive after the next step.

    What the last step made may still be held by a variable until it is reassigned. There the step before
    decides, or, without one, all but one value of the site.
    """
    end, before = step.end_of_next, step.before
    earlier = _fresh(before, limits) if end is None and before is not None else {}
    for site, buffers in _fresh(step, limits).items():
        if end is not None:
            alive = _alive(step, buffers, end)
        elif site in earlier:
            alive = _alive(step, earlier[site], step.span.last)
        else:
            alive = max(_alive(step, buffers, step.span.last) - 1, 0)
        yield buffers, min(alive, len(buffers))


def _alive(step: Step, buffers: Sequence[_Buffer], end: int) -> int:
    freed = step.tape.freed
    return sum(freed.get(buffer.storage, end + 1) > end for buffer in buffers)


ALLOC_CHURN = Rule(
    "alloc-churn",
    alloc_churn,
    limits={"buffers": 16, "bytes": 1024 * 1024},
    fires_when="under `no_grad`, a line allocates ≥ 16 buffers ≥ 1 MiB",
    what=lambda f: (
        f"Under no_grad the line allocates {f.count:,} buffers of a megabyte or more, "
        f"{size(f.evidence['bytes'])} per step, and frees them."
    ),
    amount=lambda f: f"{f.count:,} buffers",
    why="Each one costs an unnecessary memory write and an allocation.",
    fix="Work in place (mul_, add_, lerp_, addcmul_) or with out=; fused=True for torch's optimizers.",
    short_fix="in place: lerp_, addcmul_, out=",
    edit="optimizer",
    compiled=Launches(limit="buffers", bytes="bytes"),
    advice=UPDATE_ADVICE,
)


def weight_clone(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find parameters that the step copies; a copy into the other layout is a transposed copy."""
    weights = step.run.parameters.keys() | step.run.held_storages
    copies = [
        op
        for op in step.ops
        if op.name == "clone"
        and op.direct
        and op.phase not in (BACKWARD, RECOMPUTE)
        and op.written_bytes >= MIN_COPY
        and not op.in_leanstep
        and op.tensors[0].storage in weights
        and not out_of_order(op.tensors[0])
    ]
    for line, ops in grouped(copies, lambda op: op.site).items():
        num_bytes = sum(op.written_bytes for op in ops)
        if num_bytes >= limits["bytes"]:
            evidence = {"copies": len(ops), "bytes": num_bytes}
            callers = callers_of(op.site for op in ops)
            yield Hit(line, len(ops), callers, FORWARD, evidence, Work(moved_bytes=2 * num_bytes))


# Smaller copies do not matter.
MIN_COPY = 16 * 1024
WEIGHT_CLONE = Rule(
    "weight-clone",
    weight_clone,
    limits={"bytes": 256 * 1024},
    fires_when="≥ 256 KiB of parameters copied on a line",
    what=lambda f: f"{plural(f.count, 'parameter')} copied, {size(f.evidence['bytes'])} per step.",
    amount=lambda f: plural(f.count, "copy", "copies"),
    why="Every step writes a copy of the weights.",
    fix="Copy into preallocated buffers (torch._foreach_copy_), keep the difference instead of two "
    "copies, or copy every k-th step. A reference policy needs one copy for the whole run.",
    short_fix="one buffer, _foreach_copy_",
)


def unused_grad(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find leaves whose gradients no optimizer uses."""
    if not step.of_kind(UPDATE):
        return
    gradients = {e.leaf: tensor for e in step.events if e.leaf for tensor in e.results}
    written = {t.storage for op in step.ops if op.name.endswith("_") for t in op.tensors[:1] if op.direct}
    held = step.run.held_storages
    unused = {
        leaf: gradient
        for leaf, gradient in gradients.items()
        if leaf not in held and leaf not in written and leaf in step.first_use
        and not _is_read(step, leaf, gradient.storage)
    }  # fmt: skip
    all_bytes = sum(gradient.num_bytes for gradient in unused.values())
    idle = _idle_sites(step) if unused else set()
    backward = [op for op in step.ops if not op.direct]
    idle_flops = sum(op.flops for op in backward if op.site in idle)
    idle_bytes = sum(op.read_bytes + op.written_bytes for op in backward if op.site in idle and not op.flops)
    for line, leaves in grouped(unused, lambda leaf: step.first_use[leaf]).items():
        if len(leaves) < limits["leaves"]:
            continue
        num_bytes = sum(unused[leaf].num_bytes for leaf in leaves)
        flops = sum(op.flops for op in backward if op.line == line)
        # One of the two matmuls in a backward computes the weight's gradient. If the line depends on no
        # trained parameter (a teacher without no_grad), its whole backward is unused.
        part = num_bytes / max(all_bytes, 1)
        work = Work(
            flops=max(flops / 2, idle_flops * part), moved_bytes=idle_bytes * part, held_bytes=num_bytes
        )
        evidence = {"leaves": len(leaves), "gradient_bytes": num_bytes}
        callers = callers_of(step.first_use[leaf] for leaf in leaves)
        yield Hit(line, len(leaves), callers, FORWARD, evidence, work)


def _is_read(step: Step, leaf: int, gradient: int) -> bool:
    """Return whether the script uses the gradient of an input itself, as adversarial examples do."""
    if any(t.role & PARAMETER for op in step.ops for t in op.tensors if t.storage == leaf):
        return False
    return any(
        op.phase != BACKWARD and not op.name.startswith("zero_")
        for op in step.ops
        for tensor in op.tensors
        if tensor.storage == gradient
    )


def _idle_sites(step: Step) -> set[Site]:
    """Return the sites whose ops with gradients depend on no parameter that an optimizer holds."""
    trained = set(step.run.held_storages)
    idle: set[Site] = set()
    busy: set[Site] = set()
    for op in step.ops:
        if op.built_in:
            continue
        depends = any(tensor.storage in trained for tensor in op.tensors)
        if depends:
            trained.update(tensor.storage for tensor in op.outs)
        if op.phase == FORWARD and op.event.grad and op.event.node >= 0:
            (busy if depends else idle).add(op.site)
    return idle - busy


UNUSED_GRAD = Rule(
    "unused-grad",
    unused_grad,
    limits={"leaves": 1},
    fires_when="a leaf that no optimizer holds gets a gradient",
    what=lambda f: (
        f"{plural(f.count, 'leaf', 'leaves')} first used here get a gradient "
        f"({size(f.evidence['gradient_bytes'])}) that no optimizer holds."
    ),
    amount=lambda f: plural(f.count, "leaf", "leaves"),
    why="The backward computes and stores a gradient that is never read.",
    fix="Use requires_grad_(False) or torch.no_grad(), or add the parameters to an optimizer.",
    short_fix="requires_grad_(False), or optimise it",
    cost=time_text,
)


def missing_grad(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find parameters that an optimizer holds and that never get a gradient other than zero."""
    missing: list[tuple[Site, Held]] = []
    routed = None
    for update in {event.value: event for event in step.of_kind(UPDATE)}.values():
        trains = [held for held in update.args if held.trains]
        lost = [held for held in trains if held.storage not in step.run.live]
        if lost and len(lost) == len(trains):
            missing += [(update.site, held) for held in lost]
            continue
        for held in lost:
            routed = _routed(step) if routed is None else routed
            if held.layout not in routed:
                missing.append((step.first_use.get(held.storage, update.site), held))
    # The first gradients of an adapter are zero: its second factor starts at zero.
    few = len(step.tape.steps) < limits["steps"]
    named = [(site, held) for site, held in missing if not (few and held.gradient == "zero")]
    for line, entries in grouped(named, lambda entry: entry[0]).items():
        kinds = Counter(held.gradient for _, held in entries)
        evidence = {
            "gradients": {_KINDS[kind]: count for kind, count in kinds.items()},
            "bytes": sum(held.layout.num_bytes for _, held in entries),
        }
        callers = callers_of(site for site, _ in entries)
        yield Hit(line, len(entries), callers, OPTIMIZER, evidence)


_KINDS = {"none": "no gradient", "zero": "all zeros"}


def _routed(step: Step) -> set[Layout]:
    """Return the layouts of weights that get different numbers of rows on one line, as experts do.

    An expert that no token reached has no gradient: that is no fault.
    """
    elements: dict[tuple[Line, Layout], Counter[int]] = defaultdict(Counter)
    for op in step.ops:
        if op.direct and op.phase in (FORWARD, RECOMPUTE) and op.outs and op.site is not UNKNOWN:
            for tensor in op.tensors:
                held = step.run.held.get(tensor.storage)
                if held is not None:
                    elements[op.line, held.layout][tensor.storage] += op.outs[0].numel()
    return {layout for (_, layout), counts in elements.items() if len(set(counts.values())) > 1}


def _missing(f: Finding) -> str:
    return (
        f"{plural(f.count, 'parameter')} of an optimizer ({size(f.evidence['bytes'])}) never "
        f"{'gets' if f.count == 1 else 'get'} a gradient: {listed(f.evidence['gradients'])} on "
        f"{len(f.counts)} of {len(f.counts)} steps."
    )


MISSING_GRAD = Rule(
    "missing-grad",
    missing_grad,
    limits={"steps": 3},
    fires_when="a parameter that an optimizer holds has no gradient, or only zeros, on every recorded step",
    what=_missing,
    amount=lambda f: plural(f.count, "parameter"),
    why="It is not trained: detached, unused, or multiplied by zero. Weight decay may still change it.",
    fix="Connect it to the loss: look for detach(), no_grad(), .data, a layer that the forward skips, or a "
    "factor of zero. If it is meant to stay as it is, requires_grad_(False).",
    short_fix="connect it to the loss, or freeze it",
    cost=lambda findings: "their training",
)
