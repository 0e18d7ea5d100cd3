"""Tapes made by hand: events of a few words, and the steps that rules judge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from leanstep.diagnose.step import Step, steps_of
from leanstep.tape import events
from leanstep.tape.events import Event, Held, Layout, StepSpan, Tape, TensorInfo
from leanstep.tape.lines import Line, Site

KIB, MIB = 1024, 1024 * 1024
HERE = Site(Line("train.py", 7, "loss_fn"))
THERE = Site(Line("train.py", 9, "loss_fn"))
LEAF = events.TRAINED_LEAF | events.PARAMETER
_numbers = itertools.count(1)


def tensor(*shape: int, storage: int = 0, role: int = 0, **more: Any) -> TensorInfo:
    """A tensor with a storage of its own, contiguous float32 on the CPU."""
    dtype, version = more.get("dtype", torch.float32), more.get("version", 0)
    stride = more.get("stride", tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))))
    layout = Layout(shape, stride, dtype, "cpu", math.prod(shape) * dtype.itemsize)
    return TensorInfo(storage or next(_numbers), more.get("offset", 0), version, role, layout)


def sized(num_bytes: int, **more: Any) -> TensorInfo:
    """A tensor of this many bytes."""
    return tensor(num_bytes, dtype=torch.uint8, **more)


def op(name: str, *args: Any, site: Site = HERE, outs: Sequence[Any] | None = None, **more: Any) -> Event:
    """An op; its result is as large as its first argument."""
    if outs is None:
        outs = (args[0]._replace(storage=next(_numbers), role=0),) if args else ()
    return Event(events.OP, name, site, args=args, outs=tuple(outs), **more)


def backward(name: str, *args: Any, **more: Any) -> Event:
    """An op of autograd."""
    return op(name, *args, phase=events.BACKWARD, direct=False, **more)


def read(site: Site = HERE, kind: str = "scalar", **more: Any) -> Event:
    """A read of a value of the model."""
    value = tensor(1, role=events.REQUIRES_GRAD)
    return Event(events.READ, kind, site, args=(value,), read=kind, **more)


def save(value: TensorInfo, site: Site = HERE) -> Event:
    return Event(events.SAVE, "", site, args=(value,))


def update(*held: Held, state: Sequence[int] = (), site: Site = THERE) -> Event:
    return Event(events.UPDATE, "SGD", site, events.OPTIMIZER, args=held, outs=tuple(state), value=1)


def held(weight: TensorInfo, gradient: str = "live", *, trains: bool = True) -> Held:
    return Held(weight.storage, next(_numbers), gradient, trains, weight.layout)


def steps(*parts: Sequence[Event], **spans: Any) -> list[Step]:
    """One step per part."""
    tape = Tape()
    for part in parts:
        first = len(tape.events)
        tape.events += part
        tape.steps.append(StepSpan(first, len(tape.events), **spans))
    tape.alive = {t.storage for event in tape.events for t in (*event.tensors, *event.results)}
    return steps_of(tape)


def matmul(rows: int, inner: int, width: int, **more: Any) -> Event:
    """Activations times a parameter, unless factors are passed."""
    first = more.pop("first", None) or tensor(rows, inner)
    weight = more.pop("weight", None) or tensor(inner, width, role=LEAF)
    out = tensor(rows, width, role=events.REQUIRES_GRAD, dtype=first.dtype)
    return op("mm", first, weight, outs=(out,), **more)


def head(rows: int, inner: int, width: int, **more: Any) -> list[Event]:
    """A head: the product and the softmax that reads it; node 5."""
    product = matmul(rows, inner, width, node=5, **more)
    return [product, op("_log_softmax", product.outs[0], 1, False, site=more.get("site", HERE))]
