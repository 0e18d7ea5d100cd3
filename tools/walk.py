"""How many files a reader visits: `python tools/walk.py` traces two calls and exits 1 beyond the bounds.

Counts, with one torch thread, the files of the package that a call enters and how often it changes file, for
`linear_logprobs` forward and backward on one tile and for `NorMuon.step` on two matrices and two biases.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import leanstep
from leanstep.logprob import linear_logprobs
from leanstep.muon import NorMuon, split_params

PACKAGE = str(Path(leanstep.__file__).parent)


class Walk(NamedTuple):
    files: int
    changes: int


BOUNDS = {"linear_logprobs": Walk(9, 60), "NorMuon.step": Walk(7, 60)}


def walk(call: Callable[[], Any]) -> Walk:
    """The files of the package that `call` enters, in whichever thread, and the changes between them."""
    visited: set[str] = set()
    changes, last = 0, ""

    def on_event(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal changes, last
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            visited.add(name)
            changes += name != last
            last = name

    sys.setprofile(on_event)
    threading.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Walk(len(visited), changes)


def measure() -> dict[str, Walk]:
    """Both walks, on the second call: what is made once is not part of the path."""

    def head() -> None:
        hidden = torch.randn(32, 16, requires_grad=True)
        weight = torch.randn(200, 16, requires_grad=True)
        out = linear_logprobs(hidden, weight, torch.randint(0, 200, (32,)), entropy="grad")
        (out.logp.sum() + out.entropy.sum()).backward()

    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
    optimizer = NorMuon(split_params(model), lr=0.02)

    def gradients() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        head()
        gradients()
        optimizer.step()
        found = {"linear_logprobs": walk(head)}
        gradients()
        return {**found, "NorMuon.step": walk(optimizer.step)}
    finally:
        torch.set_num_threads(threads)


def main() -> int:
    beyond = False
    for name, found in measure().items():
        bound = BOUNDS[name]
        beyond |= found.files > bound.files or found.changes > bound.changes
        print(
            f"{name}: {found.files} files (at most {bound.files}), "
            f"{found.changes} changes (at most {bound.changes})"
        )
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
