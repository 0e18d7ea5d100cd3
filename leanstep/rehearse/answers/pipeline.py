"""Pipeline parallel (`torch.distributed.pipelining`): one rank's stages, without the stages of other ranks.

A stage learns the shapes of its inputs and gradients from its neighbours. Gradients have the shapes of the
stage's own outputs. Inputs come from the rehearsal of the rank before (`Request.received`), or, where a rank
holds several stages, have the shapes of what this rank sent last. The wait for other stages is not seen: the
note says how much it adds.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from leanstep.rehearse.answers.stand_ins import after_import
from leanstep.rehearse.refusals import Refused
from leanstep.rehearse.tape import Tape


def install(tape: Tape) -> None:
    """Answer what a stage asks of its neighbours, as soon as the program imports pipelining."""
    objects = _Objects(tape)
    dist.send_object_list = objects.send
    dist.recv_object_list = objects.receive
    after_import("torch.distributed.pipelining.stage", lambda module: _answer_stage(module, objects))
    after_import("torch.distributed.pipelining.schedules", lambda module: _note_schedule(tape, module))


class _Objects:
    """Python objects between ranks: shapes that a stage sends to the next one."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self.waiting = list(tape.recording.request.received)
        self.last: Any = None

    def send(self, object_list: list[Any], dst: int | None = None, *_: Any, **given: Any) -> None:
        self.last = list(object_list)
        group, rank = given.get("group"), given.get("group_dst")
        if dst is None and rank is not None:
            dst = dist.get_global_rank(group, rank) if group is not None else rank
        if dst is not None:
            with contextlib.suppress(Exception):  # an object that only its own process understands
                shapes = tree_map_only(FakeTensor, _shape_alone, self.last)
                self.tape.recording.sent.append((dst, pickle.dumps(shapes)))

    def receive(self, object_list: list[Any], *_: Any, **__: Any) -> None:
        if self.waiting:
            self.last = pickle.loads(self.waiting.pop(0))
        elif self.last is None:
            raise Refused("recv_object_list: only another rank knows the object; --rank 0 receives none")
        object_list[:] = self.last
        line = self.tape.lines.here()
        self.tape.shadows.assume(line, "recv_object_list", "what the rank before sends")


def _shape_alone(tensor: FakeTensor) -> torch.Tensor:
    """Before torch 2.11 a stage sends tensors of the meta device; fake ones cannot be pickled."""
    with _disable_current_modes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _answer_stage(module: Any, objects: _Objects) -> None:
    """Since torch 2.11 stages vote on how shapes are found, and send those of gradients back as well."""
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


def _note_schedule(tape: Tape, module: Any) -> None:
    if hasattr(module, "_build_p2p_edge_groups"):  # since torch 2.15
        module._build_p2p_edge_groups = _with_fake_group(module._build_p2p_edge_groups)
    for schedule in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        schedule.__init__ = _noted(tape, schedule.__init__)


def _with_fake_group(build: Any) -> Any:
    """A fake group cannot be split: with it torch uses the group of all stages for every pair of ranks."""

    def edges(*args: Any) -> Any:
        answer, dist.get_backend = dist.get_backend, dist.distributed_c10d.get_backend
        try:
            return build(*args)
        finally:
            dist.get_backend = answer

    return edges


def _noted(tape: Tape, build: Any) -> Any:
    def init(self: Any, *args: Any, **given: Any) -> None:
        build(self, *args, **given)
        stages = args[0] if args else given.get("stage", given.get("stages"))
        first: Any = stages[0] if isinstance(stages, (list, tuple)) else stages
        name, wait = type(self).__name__, "the wait for other stages is left out"
        if name in ("ScheduleGPipe", "Schedule1F1B"):
            share = (first.group_size - 1) / self._n_microbatches
            wait += f": with equal stages it adds {share:.0%} to the step"
        stage = f"stage {first.stage_index} of {first.num_stages} alone (others: --rank)"
        tape.notes[f"pipeline, {name}: {stage}; {wait}"] += 1

    return init
