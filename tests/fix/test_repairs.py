"""What `fix` would edit, and what it leaves alone: one text in, one text out, nothing runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from leanstep.fix.repairs import Project, repairs_of
from leanstep.fix.source_edits import Edit, NotUnderstood, apply

HERE = "  # here"


def repaired(tmp_path: Path, rule: str, text: str, variant: int = 0, newline: str = "\n") -> str:
    """The file after the repair of a finding on the line marked `# here`."""
    path = tmp_path / "train.py"
    path.write_bytes(text.strip("\n").replace("\n", newline).encode() + newline.encode())
    number = 1 + next(i for i, line in enumerate(text.strip("\n").splitlines()) if line.endswith(HERE))
    line = SimpleNamespace(file=str(path), number=number, library=False)
    finding = SimpleNamespace(rule=rule, line=line, leanstep=None, short_fix="read less often")
    found = repairs_of(Project(path, [path]), finding)  # type: ignore[arg-type]
    return apply(path.read_bytes(), found[variant].edits).decode()


REPAIRS = {
    "fused": (
        "unbatched-optimizer",
        """
import torch
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in data:
    optimizer.step()  # here
""",
        """
import torch
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for batch in data:
    optimizer.step()  # here
""",
    ),
    "fused in place of False, imported by another name, closing comma": (
        "unbatched-optimizer",
        """
from torch import optim
from torch.optim import SGD as Plain
other = optim.Adam(b, lr=1)
opt = Plain(
    a,
    lr=1e-3, fused=False,
)
opt.step()  # here
""",
        """
from torch import optim
from torch.optim import SGD as Plain
other = optim.Adam(b, lr=1)
opt = Plain(
    a,
    lr=1e-3, fused=True,
)
opt.step()  # here
""",
    ),
    "foreach where nothing is fused": (
        "unbatched-optimizer",
        """
import torch.optim as optim
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
optimizer.step()  # here
""",
        """
import torch.optim as optim
optimizer = optim.Adadelta(model.parameters(), lr=1.0, foreach=True)
optimizer.step()  # here
""",
    ),
    "zero_grad": (
        "unbatched-optimizer",
        "opt.zero_grad(set_to_none=False)  # here",
        "opt.zero_grad(set_to_none=True)  # here",
    ),
    "clip": (
        "unbatched-optimizer",
        """
import torch
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
""",
        """
import torch
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)  # here
""",
    ),
    "a bank": (
        "zero-fill",
        """
def forward(self, x):
    for i in range(self.layers):
        x = x + act(x @ self.bank[i])  # here
        x = x * self.bank[i].sum()
    return x
""",
        """
def forward(self, x):
    bank_pieces = self.bank.unbind(0)
    for i in range(self.layers):
        x = x + act(x @ bank_pieces[i])  # here
        x = x * bank_pieces[i].sum()
    return x
""",
    ),
    "a bank with two indices": (
        "zero-fill",
        """
for i in range(n):
    up, down = bank[i, 0], bank[i, 1].T  # here
    q, k = (bank[i, j] for j in range(2))
""",
        """
bank_pieces = bank.unbind(0)
for i in range(n):
    up, down = bank_pieces[i][0], bank_pieces[i][1].T  # here
    q, k = (bank_pieces[i][j] for j in range(2))
""",
    ),
    "positions": (
        "zero-fill",
        """
logits = head(x)
for t in range(T):
    loss = loss + F.cross_entropy(logits[:, t], y[0])  # here
""",
        """
logits = head(x)
logits_pieces = logits.unbind(1)
for t in range(T):
    loss = loss + F.cross_entropy(logits_pieces[t], y[0])  # here
""",
    ),
    "rows before the head": (
        "dead-rows",
        """
import torch.nn.functional as F
import torch

hidden = model(ids)
logits = self.head(hidden)  # here
loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), ignore_index=-1)
""",
        """
import torch.nn.functional as F
import torch
from leanstep.heads import linear_cross_entropy

hidden = model(ids)
loss = linear_cross_entropy(hidden[:, :-1], self.head, labels[:, 1:], shift=0, ignore_index=-1)
""",
    ),
    "rows before the head, in one line": (
        "dead-rows",
        """
from torch.nn.functional import cross_entropy
loss = cross_entropy(head(a + b).flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)  # here
""",
        """
from torch.nn.functional import cross_entropy
from leanstep.heads import linear_cross_entropy
loss = linear_cross_entropy((a + b), head, labels, shift=0, label_smoothing=0.1)  # here
""",
    ),
    "a graph that is kept": (
        "retain-graph",
        "loss.backward(retain_graph=True)  # here",
        "loss.backward(retain_graph=False)  # here",
    ),
}


@pytest.mark.parametrize("name", REPAIRS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["unix", "dos"])
def test_a_repair_changes_what_it_must_and_no_other_byte(tmp_path: Path, name: str, newline: str):
    rule, before, after = REPAIRS[name]
    expected = after.strip("\n").replace("\n", newline) + newline
    assert repaired(tmp_path, rule, before, newline=newline) == expected


# rule, text, a word of the reason
LEFT_ALONE = {
    "arguments unpacked": (
        "unbatched-optimizer",
        "import torch\nopt = torch.optim.AdamW(p, lr=1, **extra)\nopt.step()  # here",
        "unpacked with *: add fused=True there",
    ),
    "fused decided elsewhere": (
        "unbatched-optimizer",
        "import torch\nopt = torch.optim.AdamW(p, lr=1, fused=use_fused)\nopt.step()  # here",
        "fused is set to use_fused",
    ),
    "not torch's": (
        "unbatched-optimizer",
        "from mine import AdamW\nopt = AdamW(p, lr=1)\nopt.step()  # here",
        "creates opt",
    ),
    "an update by hand": (
        "unbatched-optimizer",
        "for p in ps:\n    p.sub_(p.grad)  # here",
        "written by hand",
    ),
    "zero_grad as it should be": ("unbatched-optimizer", "opt.zero_grad()  # here", "to None already"),
    "a bank that changes in the loop": (
        "zero-fill",
        "for i in range(9):\n    x = x @ bank[i]  # here\n    bank = bank * 2",
        "no piece",
    ),
    "an index that is no counter": (
        "zero-fill",
        "for row in ids:\n    x = x + table[row]  # here",
        "no piece",
    ),
    "a bank that may be None": (
        "zero-fill",
        "for i in range(9):\n    if bank is not None:\n        x = x @ bank[i]  # here",
        "no piece",
    ),
    "logits that are used again": (
        "dead-rows",
        "import torch.nn.functional as F\nlogits = head(h)  # here\n"
        "loss = F.cross_entropy(logits.view(-1, V), y.view(-1))\nprint(logits.argmax())",
        "outside the loss",
    ),
    "classes that are not last": (
        "dead-rows",
        "import torch.nn.functional as F\nlogits = head(h)  # here\n"
        "loss = F.cross_entropy(logits.transpose(1, 2), y)",
        "not the rows of the logits",
    ),
    "logits of two heads": (
        "dead-rows",
        "import torch.nn.functional as F\nlogits = a(h) + b(h)  # here\nloss = F.cross_entropy(logits, y)",
        "not head(hidden)",
    ),
    "another loss": (
        "dead-rows",
        "logits = head(h)  # here\nloss = my_loss(logits, y)",
        "no F.cross_entropy",
    ),
    "a rule without a mechanical repair": ("op-storm", "x = x + 1  # here", "by hand"),
    "a read": ("host-sync", "total += loss.item()  # here", "without you; by hand: read less"),
    "a cast": ("duplicate-cast", "a = h.float() + h.float()  # here", "by hand"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_not_understood_is_left_alone(tmp_path: Path, name: str):
    rule, text, reason = LEFT_ALONE[name]
    with pytest.raises(NotUnderstood, match=re.escape(reason)):
        repaired(tmp_path, rule, text)


def test_two_banks_on_a_line_are_tried_apart_and_together(tmp_path: Path):
    text = "for i in range(9):\n    x = x @ a[i] + b[i]  # here"
    assert "b_pieces" not in repaired(tmp_path, "zero-fill", text, 0)
    assert "a_pieces" not in repaired(tmp_path, "zero-fill", text, 1)
    both = repaired(tmp_path, "zero-fill", text, 2)
    assert both.startswith("a_pieces = a.unbind(0)\nb_pieces = b.unbind(0)\nfor")
    assert "x @ a_pieces[i] + b_pieces[i]" in both


def test_names_that_exist_are_not_taken(tmp_path: Path):
    text = "bank_pieces = 1\nfor i in range(9):\n    x = x @ bank[i]  # here"
    assert "bank_pieces_2 = bank.unbind(0)" in repaired(tmp_path, "zero-fill", text)


def test_a_file_that_is_no_python_is_left_alone(tmp_path: Path):
    with pytest.raises(NotUnderstood, match="cannot be parsed"):
        repaired(tmp_path, "retain-graph", "print 'hello'  # here")


def test_edits_that_meet_are_refused():
    path = Path("x.py")
    one, other = Edit(path, 2, 5, "a"), Edit(path, 4, 6, "b")
    with pytest.raises(NotUnderstood):
        apply(b"0123456789", [one, other])
    assert apply(b"0123456789", [one, one, Edit(path, 5, 6, "b")]) == b"01ab6789"


def test_a_compiled_module_among_the_files_is_passed_by(tmp_path: Path) -> None:
    """An extension outside site-packages counts as the user's file, and is no source."""
    binary, script = tmp_path / "_fast.so", tmp_path / "train.py"
    binary.write_bytes(b"\x7fELF\x02\x01\xb8\x00 coding\n" + bytes(range(256)))
    script.write_text("import torch\noptimizer = torch.optim.AdamW(parameters)\noptimizer.step()\n")
    line = SimpleNamespace(file=str(script), number=3, library=False)
    finding = SimpleNamespace(rule="unbatched-optimizer", line=line, leanstep=None)
    (edit,) = repairs_of(Project(script, [binary, script]), finding)[0].edits  # type: ignore[arg-type]
    assert "fused=True" in edit.text
