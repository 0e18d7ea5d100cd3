"""Check that a model's output for a row does not depend on the rest of the batch; find the line if it does.

A trainer and a generator compute different log-probabilities for the same row because the batch around it
differs: the batch size selects the kernel and how reductions are split. `prove --invariant` runs the model on
the batch, then on single rows, on fewer rows, in reverse order, twice in one batch and padded. It records the
result and the source line of every op and reports the first op whose bits differ for a row. An op over the
whole batch (a statistic) has no rows; it is reported when it changes a row.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from leanstep.prove.first_change import InvarianceRow, TapedOp, Variant, first_change
from leanstep.prove.interpret import interpret_kernels
from leanstep.prove.script_jobs import Job, seeded
from leanstep.prove.sketches import outside_modes
from leanstep.prove.watch import NoDropout
from leanstep.tape.children import (
    ended_afterwards,
    how_it_ended,
    log_to,
    start,
    temporary_folder,
    wait_all,
    write_result,
)
from leanstep.tape.lines import Stack
from leanstep.tape.run import Stop, run_script

# Number of positions that the padded variant adds.
PADDING = 7


@dataclass
class InvarianceProof:
    """The result of `prove train.py --invariant`."""

    script: str
    rows: list[InvarianceRow] = field(default_factory=list)
    variants: int = 0
    ops: int = 0
    notes: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None and self.variants > 0 and not self.rows

    def sentence(self) -> str:
        if self.problem is not None:
            return self.problem
        if not self.rows:
            return f"no row depends on the rest of the batch: {self.ops} ops, {self.variants} variants"
        first = self.rows[0]
        return (
            f"{Path(first.file).name}:{first.line} changes the bits of row {first.row} "
            f"when the row is run {first.variant}: "
            f"{first.op} of {first.shape} and {first.variant_shape}, {first.kind} ({first.difference:.2g})"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "ok": self.ok,
            "verdict": self.sentence(),
            "problem": self.problem,
            "variants": self.variants,
            "ops": self.ops,
            "notes": self.notes,
            "rows": [asdict(row) for row in self.rows],
        }


class _Tape(TorchDispatchMode):
    """Records every op with its outputs and the line that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[TapedOp] = []
        self._stack = Stack()
        self._produced: dict[int, int] = {}
        self._held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        sources = tuple(self._produced[id(t)] for t in read if id(t) in self._produced)
        if func.is_view:
            # A view has the same bits in another shape: its producer is that of its base.
            for output in outputs:
                if sources:
                    self._produced[id(output)] = sources[0]
                    self._held.append(output)
            return result
        site, _ = self._stack.locate(sys._getframe(1), False)
        copies = [t.detach().clone() for t in outputs if t.is_floating_point()]
        for output in outputs:
            self._produced[id(output)] = len(self.ops)
            self._held.append(output)
        line, caller = (site.line, site.caller) if site is not None else (None, None)
        self.ops.append(TapedOp(func._schema.name.removeprefix("aten::"), line, caller, sources, copies))
        return result


def _variants(batch: int, length: int | None) -> list[Variant]:
    whole = tuple(range(batch))
    variants = [Variant("alone", (0,)), Variant("alone", (batch - 1,))] if batch > 1 else []
    variants.append(Variant("in a batch of twice the size", whole + whole))
    if batch > 2:
        variants.append(Variant("in a smaller batch", whole[: (batch + 1) // 2]))
    if batch > 1:
        variants.append(Variant("in another order", whole[::-1]))
    if length is not None:
        variants.append(Variant("with padding behind it", whole, PADDING))
    return variants


def row_invariance(
    function: Callable[..., object],
    *args: Any,
    name: str = "",
    module: nn.Module | None = None,
    **kwargs: Any,
) -> InvarianceProof:
    """Compare every op of `function(*args, **kwargs)` with the same op in runs on other batches of the rows.

        proof = leanstep.prove.row_invariance(model, tokens)
        assert proof.ok, proof.sentence()

    Args:
        function: takes batch-first tensors. It is called up to seven times, without dropout.
        args, kwargs: tensors with the first dimension of the first tensor form the batch; [B, T] integers
            are also padded at the end.
        module: its buffers are restored after every call; by default `function` itself if it is a module.
    """
    proof = InvarianceProof(name or getattr(function, "__name__", type(function).__name__))
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.dim() > 0]
    if not tensors:
        raise ValueError("args: expected at least one tensor with a batch dimension, got none")
    batch = tensors[0].shape[0]
    ids = next((t for t in tensors if t.dim() == 2 and not t.is_floating_point() and len(t) == batch), None)
    length = None if ids is None else ids.shape[1]
    owner = module if module is not None else function if isinstance(function, nn.Module) else None

    def run(variant: Variant | None) -> list[TapedOp]:
        inputs = (args, kwargs) if variant is None else _changed(args, kwargs, variant, batch, length)
        tape = _Tape()
        with _state_restored(owner), tape:
            function(*inputs[0], **inputs[1])
        return tape.ops

    plain = run(None)
    proof.ops = len(plain)
    learned: dict[int, list[tuple[int, int] | None]] = {}
    for variant in _variants(batch, length):
        try:
            other = run(variant)
        except Exception as error:
            # The variant exceeds the model's positions, or the model refuses its batch size.
            proof.notes.append(f"{variant.name}: skipped, the model raised {type(error).__name__}: {error}")
            continue
        proof.variants += 1
        change = first_change(plain, other, variant, batch, length, learned)
        if change is None and len(plain) != len(other):
            counts = f"{len(plain)} and {len(other)} ops"
            proof.notes.append(f"{variant.name}: {counts}, only ops of both runs are compared")
        if change is not None:
            change.model = type(function).__name__ if owner is not None else proof.script
            proof.rows.append(change)
    proof.rows.sort(key=lambda row: row.op_number)
    return proof


@contextlib.contextmanager
def _state_restored(module: nn.Module | None) -> Iterator[None]:
    """Disable dropout inside; restore buffers and the random generator afterwards."""
    buffers = {} if module is None else {n: b.clone() for n, b in module.named_buffers()}
    state = torch.get_rng_state()
    try:
        with NoDropout():
            yield
    finally:
        torch.set_rng_state(state)
        with outside_modes():
            for name, buffer in buffers.items():
                module.get_buffer(name).copy_(buffer)  # type: ignore[union-attr]


def _changed(args: Any, kwargs: Any, variant: Variant, batch: int, length: int | None) -> tuple[Any, Any]:
    rows = torch.tensor(variant.rows)

    def change(tensor: Tensor, name: str = "") -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != batch:
            return tensor
        result = tensor[rows.to(tensor.device)]
        if variant.added and tensor.dim() > 1 and tensor.shape[1] == length:
            last = result[:, -1:].expand(-1, variant.added, *result.shape[2:])
            filler = -100 if "label" in name else 0
            keep = not tensor.is_floating_point() and "mask" not in name and "label" not in name
            behind = last if keep else torch.full_like(last, filler)
            result = torch.cat([result, behind], 1)
        return result

    changed = tree_map_only(Tensor, change, args)
    named = {
        k: change(v, k) if isinstance(v, Tensor) else tree_map_only(Tensor, change, v)
        for k, v in kwargs.items()
    }
    return changed, named


def prove_invariance(job: Job, *, fork: bool = False) -> InvarianceProof:
    """Check the models that a script calls in its first training step, each on the batch of that step."""
    with temporary_folder() as folder:
        child = start(_invariant_child, (job, str(folder)), fork=fork)
        with ended_afterwards([child]):
            wait_all([child])
        target = folder / "proof.pickle"
        if not target.exists():
            how = how_it_ended(child.code)
            return InvarianceProof(job.label, problem=f"{job.label} {how} before its first model call")
        return pickle.loads(target.read_bytes())


def _invariant_child(job: Job, folder: str) -> None:
    with log_to(Path(folder) / "log"):
        interpret_kernels()
        proof = script_invariance(job)
    write_result(Path(folder) / "proof.pickle", proof)


def script_invariance(job: Job) -> InvarianceProof:
    """Do the work of `prove_invariance` in this process."""
    proof = InvarianceProof(job.label)
    watch = _ModelCalls(proof)
    with seeded(job.seed):
        outcome = run_script(job.program, job.argv, watch)
    if outcome.exception is not None:
        proof.problem = f"{job.label} ended with {outcome.exception}: {outcome.said}"
    elif not proof.variants:
        proof.problem = f"{job.label} calls no model with a batch before its first backward()"
    return proof


class _ModelCalls:
    """Replays each outermost model call of the first training step; stops the script at its backward."""

    def __init__(self, proof: InvarianceProof) -> None:
        self.proof = proof
        self._busy = False
        self._seen: set[int] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        call, backward = nn.Module.__call__, torch.autograd.backward
        nn.Module.__call__ = lambda module, *args, **kwargs: self._called(call, module, args, kwargs)
        self._stack.callback(setattr, nn.Module, "__call__", call)
        torch.autograd.backward = self._stop
        self._stack.callback(setattr, torch.autograd, "backward", backward)

    def __exit__(self, *details: Any) -> None:
        self._stack.close()

    def _stop(self, *args: Any, **kwargs: Any) -> None:
        raise Stop

    def _called(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._busy or not torch.is_grad_enabled() or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        self._busy = True
        try:
            if id(module) not in self._seen and _has_batch(args, kwargs):
                self._seen.add(id(module))
                proof = row_invariance(
                    lambda *a, **k: call(module, *a, **k),
                    *args,
                    module=module,
                    name=type(module).__name__,
                    **kwargs,
                )
                for row in proof.rows:
                    row.model = type(module).__name__
                self.proof.rows += proof.rows
                self.proof.variants += proof.variants
                self.proof.ops += proof.ops
                self.proof.notes += proof.notes
            return call(module, *args, **kwargs)
        finally:
            self._busy = False


def _has_batch(args: Any, kwargs: Any) -> bool:
    return any(isinstance(t, Tensor) and t.dim() > 0 for t in tree_flatten((args, kwargs))[0])
