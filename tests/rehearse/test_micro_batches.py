"""Equal micro-batches: their repeated recording equals the one of a program that runs them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rehearse.rehearsed import run_text

from leanstep.rehearse.answers.repeats import Numbers
from leanstep.rehearse.events import Free, Recording

MODEL = """\
import contextlib, gc, torch
from torch.utils.checkpoint import checkpoint
class Out:
    def __init__(self, **parts):
        self.__dict__.update(parts)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(301, 64)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.drop, self.head = torch.nn.Dropout(0.1), torch.nn.Linear(64, 301)
    def forward(self, x, mask=None):
        h = self.embed(x)
        for block in self.blocks:
            h = h + checkpoint(lambda h: block(h).relu(), h, use_reentrant=False)
        if mask is not None and not mask.all():
            h = h * mask[..., None]
        return Out(logits=self.head(self.drop(h)), hidden=h)
def loss_of(out, x):
    gc.collect()  # what is in a cycle does not decide the peak
    return torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), x.flatten())
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
"""
LOOP = """\
for step in range(4):
    for micro in range(6):
        x = torch.randint(301, (4, 33)).cuda()
        out = model(x)
        loss_of(out, x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAMS = {
    "plain": LOOP,
    "gradients stay": LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)"),
    "zeroed late": LOOP.replace("range(6)", "range(1)")
    .replace("range(4)", "range(12)")
    .replace("        loss_of", "        optimizer.zero_grad()\n        loss_of")
    .replace("    optimizer.step()\n    optimizer.zero_grad()\n", "    optimizer.step()\n"),
    "autocast inside": LOOP.replace(
        "        out = model(x)", "        with torch.autocast('cuda', torch.bfloat16): out = model(x)"
    ),
    "autocast around": LOOP.replace(
        "    for micro in range(6):\n",
        "    with torch.autocast('cuda', torch.bfloat16):\n     for micro in range(6):\n",
    ),
    "hidden only": LOOP.replace("loss_of(out, x)", "out.hidden.square().mean()"),
    "output dropped": LOOP.replace("        out = model(x)\n", "").replace(
        "loss_of(out, x)",
        "torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), x.flatten())",
    ),
    "two sizes": LOOP.replace("(4, 33)", "(4, 33 + 7 * (micro % 2))"),
    "masks": LOOP.replace("model(x)", "model(x, (torch.arange(33) < (33 if micro % 3 else 20)).cuda())"),
    "dropout off": LOOP.replace("        out =", "        model.train(micro % 2 == 0)\n        out ="),
    "frozen": LOOP.replace(
        "        out =", "        model.embed.requires_grad_(micro % 2 == 0)\n        out ="
    ),
}
# Nothing of these may be repeated.
UNEQUAL = {
    "two calls": LOOP.replace("loss_of(out, x)", "(loss_of(out, x) + loss_of(model(x), x))"),
    "sum before": LOOP.replace(
        "        out =", "        decay = sum(p.square().sum() for p in model.parameters())\n        out ="
    ).replace("loss_of(out, x)", "(loss_of(out, x) + decay)"),
    "hooks": "seen = []\nmodel.head.register_forward_hook(lambda *a: seen.append(a[-1].shape))\n" + LOOP,
    "update in backward": (
        "for p in model.parameters():\n    p.register_post_accumulate_grad_hook(lambda p: None)\n" + LOOP
    ),
    "a cache": LOOP.replace(
        "        loss_of", "        model.kept = out.hidden.detach()\n        loss_of"
    ).replace(
        "out = model(x)",
        "out = model(x)\n        model.head.seen = [*getattr(model.head, 'seen', ()), micro]",
    ),
}


def recorded(folder: Path, text: str, **options: Any) -> Recording:
    recording = run_text(folder, MODEL + text, steps=12 if "range(12)" in text else 3, **options).recording
    assert recording.refused is None, recording.refused
    return recording


def repeated(recording: Recording) -> int:
    return sum(n for note, n in recording.notes.items() if note.startswith("equal forwards and backwards"))


def shown(recording: Recording) -> list[tuple[Any, ...]]:
    """Every event but frees, with the storages in the order of their first use."""
    numbers: dict[int, int] = {}
    lines = []
    for event in recording.events:
        if isinstance(event, Free):
            continue  # a collection frees in any order
        entry = [type(event).__name__]
        for name in ("name", "kernels", "nbytes", "line", "phase", "step", "kind", "traffic", "products"):
            entry.append(getattr(event, name, None))
        ids = (*getattr(event, "reads", ()), *getattr(event, "writes", ()), *[getattr(event, "storage", -1)])
        entry.append([numbers.setdefault(n, len(numbers)) for n in ids])
        lines.append(tuple(entry))
    return lines


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_repeated_micro_batch_equals_one_that_runs(tmp_path: Path, name: str) -> None:
    whole = recorded(tmp_path, PROGRAMS[name], every_call=True)
    short = recorded(tmp_path, PROGRAMS[name])
    assert repeated(whole) == 0 and repeated(short) >= 6
    first, second = shown(whole), shown(short)
    different = next((pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]), None)
    assert different is None and len(first) == len(second)
    assert short.peak_bytes == whole.peak_bytes


def test_a_module_never_gets_the_number_of_a_deleted_one() -> None:
    number, seen = Numbers(), []
    for _ in range(20):
        module = torch.nn.Linear(2, 2)
        seen += [number(module), number(module)]
        del module
    assert seen == [n for n in range(20) for _ in "ab"]


RANKS = {
    "by hand": LOOP.replace(
        "    optimizer.step()",
        "    for p in model.parameters(): dist.all_reduce(p.grad)\n    optimizer.step()",
    ),
    "ddp": "model = torch.nn.parallel.DistributedDataParallel(model)\n"
    + LOOP.replace("        out =", "        model.require_backward_grad_sync = micro == 5\n        out ="),
}


@pytest.mark.parametrize("name", RANKS)
def test_micro_batches_of_many_ranks_repeat_until_gradients_are_reduced(tmp_path: Path, name: str) -> None:
    text = "import torch.distributed as dist\ndist.init_process_group('nccl')\n" + RANKS[name]
    whole = recorded(tmp_path, text, ranks=8, every_call=True)
    short = recorded(tmp_path, text, ranks=8)
    assert repeated(whole) == 0 and repeated(short) >= 6
    assert shown(whole) == shown(short) and short.peak_bytes == whole.peak_bytes


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_leaves_something_behind_runs(tmp_path: Path, name: str) -> None:
    assert repeated(recorded(tmp_path, UNEQUAL[name])) == 0
