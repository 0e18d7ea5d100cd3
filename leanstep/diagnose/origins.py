"""What only the whole recording tells: parameters, what optimizers hold, and where values come from.

A value that depends on a parameter is of the model. Tensors used together in one op are on one device, except
for scalars. So data of the host is data that is never used together with the model, neither itself nor
anything computed from it or with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from leanstep.tape import events
from leanstep.tape.events import (
    BACKWARD,
    LEAF,
    NO_STORAGE,
    OPTIMIZER,
    PARAMETER,
    REQUIRES_GRAD,
    TRAINED_LEAF,
    Event,
    Held,
    Tape,
    TensorInfo,
)
from leanstep.tape.lines import IN_SCALER

OF_THE_MODEL, OF_DATA = "of the model", "of data"


class Family:
    """Tensors on one device because an op used them together; `met`: the model is among them."""

    __slots__ = ("met", "on_host", "parent")

    def __init__(self, met: bool = False) -> None:
        self.parent: Family | None = None
        self.met, self.on_host = met, False

    def root(self) -> Family:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def is_hosts_own(self) -> bool:
        return self.on_host or not self.root().met


class Run:
    """A recording's facts about tensors. `read_on` takes in what was recorded since the last call.

    parameters: storage -> a leaf that requires grad and was an input of a forward op, or a view of one.
    frozen: storages of weights that need no gradient. numel: elements of each weight.
    learned: where events use parameters in a forward: place on the tape -> storages.
    reads: place of a host read -> where its value comes from.
    held: parameters of optimizers that stepped; live: those whose gradient was not zero at least once.
    state: storages of parameters, gradients and optimizer state.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.parameters: dict[int, TensorInfo] = {}
        self.frozen: set[int] = set()
        self.numel: dict[int, int] = {}
        self.learned: dict[int, list[int]] = {}
        self.held: dict[int, Held] = {}
        self.live: set[int] = set()
        self.state: set[int] = set()
        self.accelerator = False
        # The latest `Step`.
        self.last_step: Any = None
        self._reads: dict[int, str | Family] = {}
        self._families: dict[int, Family] = {}
        self._of_model: set[int] = set()
        self._model_seen = False
        # Until then: storages that existed before the recording, and what was computed from their graphs.
        self._before: set[int] = set()
        self._done = tape.dropped

    @property
    def held_storages(self) -> set[int]:
        """Storages that some optimizer holds, also one that did not step."""
        return self.held.keys() | self.tape.held

    def read_on(self, last: int) -> None:
        """Take in the events before the `last`-th."""
        for place, event in enumerate(self.tape.between(self._done, last), self._done):
            self._on(place, event)
        self._done = max(self._done, last)

    def forget_before(self, place: int) -> None:
        """Forget tensors that were freed before the `place`-th event: later ones do not use them."""
        alive, freed = self.tape.alive, self.tape.freed

        def stays(storage: int) -> bool:
            return storage in alive or freed.get(storage, 0) >= place

        for sets in (self._of_model, self.state, self.frozen):
            sets.intersection_update([storage for storage in sets if stays(storage)])
        for table in (self._families, self.parameters, self.numel):
            for storage in [storage for storage in table if not stays(storage)]:
                del table[storage]
        for places in (self._reads, self.learned):
            for old in [old for old in places if old < place]:
                del places[old]

    def origin(self, place: int) -> str | None:
        """Return where the value of a host read comes from; None if the host may already have it."""
        origin = self._reads.get(place)
        if isinstance(origin, Family):
            return None if origin.is_hosts_own else OF_DATA
        return origin

    def _on(self, place: int, event: Event) -> None:
        kind = event.kind
        if kind in (events.OP, events.VIEW):
            if event.leaf:
                self.state.update(tensor.storage for tensor in event.results)
            if not event.direct and event.phase == BACKWARD:
                self._of_model.update(tensor.storage for tensor in event.results)
                if event.read and self.accelerator:
                    self._reads[place] = OF_THE_MODEL
                return
            if event.node >= 0 and event.grad and event.phase != BACKWARD and not self._model_seen:
                self._model_seen = not self._is_of_before(event)
            self._on_op(place, event)
        elif kind == events.READ:
            self._on_read(place, event, event.tensors)
        elif kind == events.MODEL:
            for tensor in event.tensors:
                self._family(tensor.storage).root().met = True
        elif kind == events.MOVE:
            # All earlier reads of the tensor were on the host.
            for tensor in event.tensors:
                family = self._families.pop(tensor.storage, None)
                if family is not None:
                    family.on_host = True
        elif kind in (events.UPDATE, events.UPDATED):
            self._on_update(event)

    def _on_update(self, event: Event) -> None:
        for held in event.args:
            self.held[held.storage] = held
            if held.gradient == "live":
                self.live.add(held.storage)
            self.state |= {held.storage, held.grad_storage} - {NO_STORAGE}
            self._of_model.add(held.grad_storage)
        self.state |= set(event.outs) - {NO_STORAGE}

    # Ops

    def _is_of_before(self, event: Event) -> bool:
        """Return whether an op continues a graph of before the recording, such as the mean of a loss."""
        graph = [tensor for tensor in event.tensors if tensor.role & REQUIRES_GRAD]
        if not graph or any(tensor.role & LEAF or self._is_made(tensor.storage) for tensor in graph):
            return False
        self._before.update(tensor.storage for tensor in event.results)
        return True

    def _is_made(self, storage: int) -> bool:
        """Return whether an op of the recording made a storage, from no graph of before."""
        return storage not in self._before and (storage in self._families or storage in self._of_model)

    def _on_op(self, place: int, event: Event) -> None:
        tensors = event.tensors
        of_model, data = False, []
        for tensor in tensors:
            if tensor.storage == NO_STORAGE:
                continue
            if self._is_weight(place, event, tensor):
                of_model = of_model or tensor.storage in self.parameters
            elif tensor.storage in self._of_model or tensor.role & REQUIRES_GRAD:
                of_model = True
            else:
                data.append(tensor)
        if event.read:
            self._on_read(place, event, tensors)
        if event.kind == events.VIEW:
            return
        outs = [tensor.storage for tensor in event.results]
        if of_model:
            self._of_model.update(outs)
            for tensor in data:
                # A scalar may come from the host.
                if tensor.ndim:
                    self._family(tensor.storage).root().met = True
        else:
            self._join(data, outs)

    def _is_weight(self, place: int, event: Event, tensor: TensorInfo) -> bool:
        """Return whether a tensor is a parameter or a frozen weight, and learn it."""
        storage, is_parameter = tensor.storage, bool(tensor.role & PARAMETER)
        if storage in self._of_model and not is_parameter and storage not in self.parameters:
            # An activation, including a detached leaf (detach().requires_grad_()).
            return False
        if event.grad and event.phase not in (BACKWARD, OPTIMIZER):
            if tensor.role & TRAINED_LEAF == TRAINED_LEAF:
                self.parameters.setdefault(storage, tensor)
                self.state.add(storage)
                self.learned.setdefault(place, []).append(storage)
                if storage in self._families:
                    # Recorded before it was used in a forward: what was read of it then is of the model too.
                    self._families[storage].root().met = True
                self.accelerator |= tensor.layout.device not in ("cpu", "meta")
        if storage not in self.parameters and storage not in self.frozen:
            if not is_parameter:
                return False
            self.frozen.add(storage)
        self.numel[storage] = max(self.numel.get(storage, 0), tensor.numel())
        return True

    def _join(self, data: Sequence[TensorInfo], outs: Iterable[int]) -> None:
        """Record an op that reads no value of the model."""
        if not data:
            for storage in outs:
                self._families[storage] = Family()
            return
        joined = [t.storage for t in data if t.ndim] or [t.storage for t in data]
        first = self._family(joined[0]).root()
        for storage in joined[1:]:
            other = self._family(storage).root()
            if other is not first:
                other.parent = first
                first.met |= other.met
        for storage in outs:
            if storage not in self._of_model:
                self._families[storage] = first

    def _family(self, storage: int) -> Family:
        family = self._families.get(storage)
        if family is None:
            # Before the first op of the model, what already exists may be its loss.
            family = self._families[storage] = Family(met=not self._model_seen)
            if not self._model_seen:
                self._before.add(storage)
        return family

    # Reads

    def _on_read(self, place: int, event: Event, tensors: Sequence[TensorInfo]) -> None:
        target = tensors[0] if tensors else None
        if target is None or event.flags & IN_SCALER:
            # A GradScaler checks whether gradients overflowed.
            self._reads[place] = OF_THE_MODEL if event.flags & IN_SCALER else OF_DATA
            return
        storage = target.storage
        of_model = storage in self.parameters or storage in self._of_model or target.role & REQUIRES_GRAD
        if of_model:
            self._reads[place] = OF_THE_MODEL
        elif self.accelerator or storage == NO_STORAGE:
            # On an accelerator the device of the tensor tells; reads of host tensors are no events.
            self._reads[place] = OF_DATA
        else:
            self._reads[place] = self._family(storage)
