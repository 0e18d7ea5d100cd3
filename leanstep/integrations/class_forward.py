"""Handle some calls of one model's forward, so that copies of the model handle them too.

    handle_calls(model, handler)
    model(...)                     # runs handler(model, stock, ...); stock(...) is the original forward

`model.forward = new` is lost or shared: `copy.deepcopy` keeps what a closure refers to (the copy would run
the original model), pickle stores a bound method by its name, `nn.DataParallel` copies attributes into
replicas as they are, and FSDP2 exchanges the class. Three rules make a replacement that all of them carry:

- The class that defines `forward` gets, once, a forward that looks for handlers on `self` and otherwise calls
  the original. The object keeps its class, so `config.architectures`, isinstance, FSDP2's subclass and
  registries keyed by class see what they saw before.
- The handlers are an attribute of the object, `_leanstep_forwards`. They are plain picklable objects without
  a reference to the model, which they receive with every call.
- Unpickling that attribute prepares the class again, in whatever process that happens.

A forward set on the object itself before (by accelerate's device hooks, for example) is called as `stock`.
One set later wraps this one, as it would wrap the class's.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

_ATTRIBUTE = "_leanstep_forwards"
_STOCK = "_leanstep_stock"


class Forwards:
    """The handlers of one object, and the forward that the object had of its own."""

    def __init__(self, owner: type, handlers: tuple[Any, ...], own: Callable[..., Any] | None = None) -> None:
        self.owner, self.handlers, self.own = owner, handlers, own
        self.own_runs = False
        _prepare(owner)

    def call_own(self, *args: Any, **kwargs: Any) -> Any:
        """Run `own`; the class's forward, where it ends, must then not come back here."""
        assert self.own is not None
        self.own_runs = True
        try:
            return self.own(*args, **kwargs)
        finally:
            self.own_runs = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Forwards:
        # A bound method or a partial in `own` refers to the object, which `memo` maps to its copy.
        return Forwards(self.owner, copy.deepcopy(self.handlers, memo), copy.deepcopy(self.own, memo))

    def __reduce__(self) -> Any:
        # Pickle loses a forward of the object's own, with leanstep as without.
        return Forwards, (self.owner, self.handlers)


def handle_calls(module: nn.Module, handler: Callable[..., Any]) -> None:
    """Call `handler(module, stock, *args, **kwargs)` for every forward of `module` and of its copies.

    Handlers of several types stack, the newest outside; one of the same type is replaced.
    """
    forwards, kind = vars(module).get(_ATTRIBUTE), type(handler)
    if forwards is None:
        owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
        forwards = Forwards(owner, (), vars(module).pop("forward", None))
    others = tuple(h for h in forwards.handlers if type(h) is not kind)
    # A new record: a shallow copy of the module shares the old one.
    vars(module)[_ATTRIBUTE] = Forwards(forwards.owner, (*others, handler), forwards.own)


def handler_of(module: nn.Module, kind: type) -> Any:
    """Return the module's handler of this type, or None."""
    forwards = vars(module).get(_ATTRIBUTE)
    handlers = () if forwards is None else forwards.handlers
    return next((h for h in handlers if type(h) is kind), None)


def _prepare(owner: type) -> None:
    """Make `owner.forward` look for handlers on `self`; does nothing if it does so already."""
    stock = vars(owner)["forward"]
    if hasattr(stock, _STOCK):
        return

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        forwards = getattr(self, _ATTRIBUTE, None)
        # A subclass that calls `super().forward` is handled where its own forward is defined.
        if forwards is None or forwards.owner is not owner or forwards.own_runs:
            return stock(self, *args, **kwargs)
        call = functools.partial(stock, self) if forwards.own is None else forwards.call_own
        for handler in forwards.handlers:
            call = functools.partial(handler, self, call)
        return call(*args, **kwargs)

    # `generate` and Trainer read the signature; accelerate follows `__wrapped__` to undo its own wrappers.
    forward.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    del forward.__wrapped__
    setattr(forward, _STOCK, stock)
    owner.forward = forward  # type: ignore[attr-defined]
