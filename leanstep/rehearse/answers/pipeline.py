"""Pipeline parallel (`torch.distributed.pipelining`): one rank's stages, without the stages of other ranks.

A stage learns the shapes of its inputs and gradients from its neighbours. Gradients have the shapes of the
stage's own outputs. Inputs come from the rehearsal of the previous rank (`Request.received`), or, if a rank
holds several stages, have the shapes of what this rank sent last. The wait for other stages is computed from
the schedule's order, assuming that all stages are like this rank's.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from leanstep.rehearse.answers.stand_ins import after_import
from leanstep.rehearse.events import Stall
from leanstep.rehearse.pipelines import Work, waiting_share
from leanstep.rehearse.refusals import Refused
from leanstep.rehearse.tape import Tape


def install(tape: Tape) -> None:
    """Replace communication between stages as soon as the program imports pipelining."""
    objects = _Objects(tape)
    dist.send_object_list = objects.send
    dist.recv_object_list = objects.receive
    pieces = _Pieces(tape)
    after_import("torch.distributed.pipelining.stage", lambda module: _answer_stage(module, objects, pieces))
    after_import("torch.distributed.pipelining.schedules", lambda module: _watch(tape, module, pieces))


class _Objects:
    """Python objects between ranks: shapes that a stage sends to the next one."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self.waiting = list(tape.recording.request.received)
        self.last: Any = None

    def send(self, object_list: list[Any], dst: int | None = None, *_: Any, **kwargs: Any) -> None:
        self.last = list(object_list)
        group, rank = kwargs.get("group"), kwargs.get("group_dst")
        if dst is None and rank is not None:
            dst = dist.get_global_rank(group, rank) if group is not None else rank
        if dst is not None:
            with contextlib.suppress(Exception):  # an object that only its own process can use
                shapes = tree_map_only(FakeTensor, _shape_alone, self.last)
                self.tape.recording.sent.append((dst, pickle.dumps(shapes)))

    def receive(self, object_list: list[Any], *_: Any, **__: Any) -> None:
        if self.waiting:
            self.last = pickle.loads(self.waiting.pop(0))
        elif self.last is None:
            raise Refused(
                "recv_object_list: the object exists only on another rank; use --rank 0, which receives none"
            )
        object_list[:] = self.last
        line = self.tape.lines.here()
        self.tape.shadows.assume(line, "recv_object_list", "what the previous rank sends")


def _shape_alone(tensor: FakeTensor) -> torch.Tensor:
    """Before torch 2.11, a stage sends meta tensors; fake tensors cannot be pickled."""
    with _disable_current_modes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _answer_stage(module: Any, objects: _Objects, pieces: _Pieces) -> None:
    """Since torch 2.11, stages vote on how shapes are inferred, and also send gradient shapes back."""
    pieces.watch(module)
    stage = module.PipelineStage
    if not hasattr(stage, "_recv_meta"):
        return
    receive = stage._recv_meta

    def shapes(self: Any, src_stage: int) -> Any:
        if src_stage < self.stage_index:
            return receive(self, src_stage)
        gradients = module._derive_grad_metas(self._stage_meta.outputs)
        return module._StageBackwardMeta(backward_metas=gradients)

    def vote(self: Any, *_: Any, **__: Any) -> Any:
        return torch.zeros(1, dtype=torch.int32, device=self.device)  # 0: run each stage once

    stage._recv_meta = shapes
    stage._warmup_forward_vote = vote
    stage._warmup_backward_result = vote


# Methods of a stage -> kinds of work.
_METHODS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


class _Pieces:
    """Device seconds per kind of work since the schedule's step began."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.times: dict[str, list[float]] = {}

    def watch(self, module: Any) -> None:
        base = module._PipelineStageBase
        for name, kind in _METHODS.items():
            if hasattr(base, name):
                setattr(base, name, self._timed(getattr(base, name), kind))

    def _timed(self, run: Any, kind: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.tape.clock.stream_end(0)
            try:
                return run(*args, **kwargs)
            finally:
                self.times.setdefault(kind, []).append(self.tape.clock.stream_end(0) - began)

        return timed

    def costs(self) -> dict[str, float]:
        """Return mean seconds by kind. Each part of a split backward counts as half of a whole one."""
        means = {kind: sum(times) / len(times) for kind, times in self.times.items()}
        backward = means.get("B", 0.0) + means.get("W", 0.0)
        split = "W" in means
        return {
            "F": means.get("F", 0.0),
            "B": backward,
            "I": means["B"] if split and "B" in means else backward / 2,
            "W": means["W"] if split else backward / 2,
        }


def _watch(tape: Tape, module: Any, pieces: _Pieces) -> None:
    """Add the wait for other ranks to each step of a schedule, with a note of its share."""
    if hasattr(module, "_build_p2p_edge_groups"):  # since torch 2.15
        module._build_p2p_edge_groups = _with_fake_group(module._build_p2p_edge_groups)
    for schedule in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        schedule.__init__ = _stepped(tape, schedule.__init__, pieces)


def _with_fake_group(build: Any) -> Any:
    """A fake group cannot be split, so torch uses the group of all stages for every pair of ranks."""

    def edges(*args: Any) -> Any:
        answer, dist.get_backend = dist.get_backend, dist.distributed_c10d.get_backend
        try:
            return build(*args)
        finally:
            dist.get_backend = answer

    return edges


def _stepped(tape: Tape, build: Any, pieces: _Pieces) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        stages = args[0] if args else kwargs.get("stage", kwargs.get("stages"))
        first: Any = stages[0] if isinstance(stages, (list, tuple)) else stages
        run = self._step_microbatches

        def step(*args: Any, **kwargs: Any) -> Any:
            pieces.times.clear()
            mark = tape.mark(0)
            result = run(*args, **kwargs)
            share = _share(self, first, pieces.costs())
            tape.add(Stall(mark, share))
            where = f"stage {first.stage_index} of {first.num_stages} only (others: --rank)"
            wait = f"waiting for other stages, assumed equal, adds {share:.0%} to the step"
            tape.notes[f"pipeline, {type(self).__name__}: {where}; {wait}"] += 1
            return result

        self._step_microbatches = step

    return init


def _share(schedule: Any, stage: Any, costs: dict[str, float]) -> float:
    if type(schedule).__name__ in ("ScheduleGPipe", "Schedule1F1B"):
        return (stage.group_size - 1) / schedule._n_microbatches
    order = getattr(schedule, "pipeline_order", None)
    if not order:
        return 0.0
    work = {rank: list(_work(actions)) for rank, actions in order.items()}
    return waiting_share(work, stage.group_rank, costs)


def _work(actions: Iterable[Any]) -> Iterator[Work]:
    """Yield the actions that take time, in order."""
    for action in actions:
        if action is None:
            continue
        if getattr(action, "sub_actions", None):
            yield from _work(action.sub_actions)
        elif action.computation_type.value in ("F", "B", "I", "W"):
            yield Work(action.stage_index, action.computation_type.value, action.microbatch_index)
