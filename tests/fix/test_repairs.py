"""What `fix` would edit, byte for byte, and what it leaves alone: one text in, one text out, nothing runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from leanstep.diagnose.advice import APPLY
from leanstep.fix.repairs import Project, repairs_of
from leanstep.fix.source_edits import Edit, NotUnderstood, apply

HERE = "  # here"
OPTIMIZER, ROWS = "unbatched-optimizer", "dead-rows"
F = "import torch.nn.functional as F\n"
LEAN = "from leanstep.heads import linear_cross_entropy\n"
METHOD = "class A:\n\t@deco\n\tdef f(self, h, y):\n"
ADAM = "import torch\nopt = torch.optim.Adam({})\nopt.step()  # here\n"
HF = "import transformers\n{}  # here\n"
HF_AFTER = (
    "import transformers\nfrom leanstep.integrations.transformers import apply_leanstep\n{}  # here\n{}\n"
)


def repaired(tmp_path: Path, rule: str, text: str, variant: int = 0, newline: str = "\n") -> str:
    """The file after the repair of a finding on the line marked `# here`.

    The loss of a model that computes it from labels is in transformers: `full-vocab` is such a finding.
    """
    path = tmp_path / "train.py"
    path.write_bytes(text.strip("\n").replace("\n", newline).encode() + newline.encode())
    number = 1 + next(i for i, line in enumerate(text.strip("\n").splitlines()) if line.endswith(HERE))
    in_library = rule == "full-vocab"
    line = SimpleNamespace(
        file="loss_utils.py" if in_library else str(path), number=number, library=in_library
    )
    advice = APPLY if in_library else None
    finding = SimpleNamespace(rule=rule, line=line, leanstep=advice, short_fix="read less often")
    found = repairs_of(Project(path, [path]), finding)  # type: ignore[arg-type]
    return apply(path.read_bytes(), found[variant].edits).decode()


REPAIRS = {
    "fused": (
        OPTIMIZER,
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
        OPTIMIZER,
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
        OPTIMIZER,
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
    "closing comma and comments": (
        OPTIMIZER,
        ADAM.format("\n    p,  # all\n    lr=1e-3,  # rate\n"),
        ADAM.format("\n    p,  # all\n    lr=1e-3, fused=True,  # rate\n"),
    ),
    "tabs": (OPTIMIZER, ADAM.format("\n\tp,\n\tlr=1\n"), ADAM.format("\n\tp,\n\tlr=1, fused=True\n")),
    "walrus argument": (OPTIMIZER, ADAM.format("(p := f())"), ADAM.format("(p := f()), fused=True")),
    "walrus around": (
        OPTIMIZER,
        "import torch\nif (opt := torch.optim.SGD(p, 1)):\n    opt.step()  # here\n",
        "import torch\nif (opt := torch.optim.SGD(p, 1, fused=True)):\n    opt.step()  # here\n",
    ),
    "generator in brackets": (
        OPTIMIZER,
        ADAM.format("(q for q in p)"),
        ADAM.format("(q for q in p), fused=True"),
    ),
    "in a decorated factory": (
        OPTIMIZER,
        "import torch\n@cache\ndef f(p):\n\treturn torch.optim.Adam(p)\nopt = f(p)\nopt.step()  # here\n",
        "import torch\n@cache\ndef f(p):\n\treturn torch.optim.Adam(p, fused=True)\n"
        "opt = f(p)\nopt.step()  # here\n",
    ),
    "zero_grad beside others": (
        OPTIMIZER,
        "opt.zero_grad(set_to_none=False); x = False  # here",
        "opt.zero_grad(set_to_none=True); x = False  # here",
    ),
    "zero_grad with a positional flag": (
        OPTIMIZER,
        "opt.zero_grad(False)  # here",
        "opt.zero_grad(True)  # here",
    ),
    "clip": (
        OPTIMIZER,
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
    "comment above the loop": (
        "zero-fill",
        "# layers\nfor i in range(9):  # deep\n\tx = x @ b[i]  # here\n",
        "# layers\nb_pieces = b.unbind(0)\nfor i in range(9):  # deep\n\tx = x @ b_pieces[i]  # here\n",
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
        ROWS,
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
        ROWS,
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
    "ellipsis slices": (
        ROWS,
        F + "l = F.cross_entropy(head(h)[..., :-1, :].reshape(-1, V), y[..., 1:].reshape(-1))  # here\n",
        F + LEAN + "l = linear_cross_entropy(h[..., :-1, :], head, y[..., 1:], shift=0)  # here\n",
    ),
    "rows before the head, in a decorated method": (
        ROWS,
        F + METHOD + "\t\tz = self.head(h)  # here\n\t\treturn F.cross_entropy(z, y)\n",
        F + LEAN + METHOD + "\t\treturn linear_cross_entropy(h, self.head, y, shift=0)\n",
    ),
    "a graph that is kept": (
        "retain-graph",
        "loss.backward(retain_graph=True)  # here",
        "loss.backward(retain_graph=False)  # here",
    ),
    "wherever a causal LM is made": (
        "full-vocab",
        """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("name")


def make(config, name):
    if name:
        model = AutoModelForCausalLM.from_pretrained(
            name,
        )
    else:
        model = AutoModelForCausalLM.from_config(config)  # here
    return model
""",
        """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from leanstep.integrations.transformers import apply_leanstep

tokenizer = AutoTokenizer.from_pretrained("name")


def make(config, name):
    if name:
        model = AutoModelForCausalLM.from_pretrained(
            name,
        )
        apply_leanstep(model)
    else:
        model = AutoModelForCausalLM.from_config(config)  # here
        apply_leanstep(model)
    return model
""",
    ),
    "a causal LM that is moved at once": (
        "full-vocab",
        HF.format("m = transformers.LlamaForCausalLM(c).to(d)"),
        HF_AFTER.format("m = transformers.LlamaForCausalLM(c).to(d)", "apply_leanstep(m)"),
    ),
    "a causal LM as an attribute": (
        "full-vocab",
        HF.format("self.model = transformers.AutoModelForCausalLM.from_pretrained('x')"),
        HF_AFTER.format(
            "self.model = transformers.AutoModelForCausalLM.from_pretrained('x')",
            "apply_leanstep(self.model)",
        ),
    ),
}


@pytest.mark.parametrize("name", REPAIRS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["unix", "dos"])
def test_a_repair_changes_what_it_must_and_no_other_byte(tmp_path: Path, name: str, newline: str):
    rule, before, after = REPAIRS[name]
    expected = after.strip("\n").replace("\n", newline) + newline
    assert repaired(tmp_path, rule, before, newline=newline) == expected
    compile(expected, name, "exec")


# rule, text, a word of the reason
LEFT_ALONE = {
    "arguments unpacked": (OPTIMIZER, ADAM.format("p, **options"), "unpacked with *: add fused=True there"),
    "fused decided elsewhere": (OPTIMIZER, ADAM.format("p, fused=flag"), "fused is set to flag"),
    "generator argument": (OPTIMIZER, ADAM.format("q for q in p"), "gets a generator without brackets"),
    "differentiable": (
        OPTIMIZER,
        ADAM.format("p, differentiable=True"),
        "torch.optim.Adam has differentiable=True",
    ),
    "not torch's": (
        OPTIMIZER,
        ADAM.replace("import torch", "import mine as torch").format("p"),
        "creates opt",
    ),
    "a partial": (
        OPTIMIZER,
        "import torch\nfrom functools import partial\nopt = partial(torch.optim.Adam)(p)\nopt.step()  # here",
        "creates opt",
    ),
    "an update by hand": (OPTIMIZER, "for p in ps:\n    p.sub_(p.grad)  # here", "written by hand"),
    "clipping of another library": (
        OPTIMIZER,
        "import mine\nmine.clip_grad_norm_(p, 1.0)  # here",
        "written by hand",
    ),
    "clipping by a method": (OPTIMIZER, "accelerator.clip_grad_norm_(p, 1.0)  # here", "written by hand"),
    "zero_grad as it should be": (OPTIMIZER, "opt.zero_grad()  # here", "to None already"),
    "a second backward now and then": (
        "retain-graph",
        "for i in r:\n    l.backward(retain_graph=True)  # here\n    if i % 5:\n        m.backward()",
        "another backward under a condition",
    ),
    "retain_graph from a variable": (
        "retain-graph",
        "l.backward(retain_graph=keep)  # here",
        "no backward(retain_graph=True)",
    ),
    "logits that are used again": (
        ROWS,
        F + "logits = head(h)  # here\n"
        "loss = F.cross_entropy(logits.view(-1, V), y.view(-1))\nprint(logits.argmax())",
        "outside the loss",
    ),
    "logits changed in place": (
        ROWS,
        F + "z = head(h)  # here\nz[:, 3] = -9\nl = F.cross_entropy(z, y)",
        "outside the loss",
    ),
    "logits assigned twice": (
        ROWS,
        F + "z = head(h)\nz = z * 2\nl = F.cross_entropy(z, y)  # here",
        "assigned 2 times",
    ),
    "classes that are not last": (
        ROWS,
        F + "logits = head(h)  # here\nloss = F.cross_entropy(logits.transpose(1, 2), y)",
        "not the rows of the logits",
    ),
    "logits of two heads": (
        ROWS,
        F + "logits = a(h) + b(h)  # here\nloss = F.cross_entropy(logits, y)",
        "not head(hidden)",
    ),
    "a method of the logits": (
        ROWS,
        F + "l = F.cross_entropy(z.softmax(-1), y)  # here",
        "not head(hidden): z.softmax(-1)",
    ),
    "a function of torch": (
        ROWS,
        F + "import torch\nl = F.cross_entropy(torch.relu(h), y)  # here",
        "not head(hidden): torch.relu(h)",
    ),
    "another loss": (ROWS, "logits = head(h)  # here\nloss = my_loss(logits, y)", "no F.cross_entropy"),
    "not reduced": (
        ROWS,
        F + "l = F.cross_entropy(head(h).view(-1, V), y.view(-1), reduction='none')  # here",
        "not reduced",
    ),
    "class weights": (
        ROWS,
        F + "l = F.cross_entropy(head(h), y, weight=w)  # here",
        "has weight=, which linear_cross_entropy does not take",
    ),
    "sliced after flattening": (
        ROWS,
        F + "l = F.cross_entropy(head(h).view(-1, V)[:, :-1], y.view(-1))  # here",
        "sliced after it was flattened",
    ),
    "hidden changed under an alias": (
        ROWS,
        F + "z = head(h)  # here\ng.mul_(2)\nl = F.cross_entropy(z, y)",
        "the hidden states may change",
    ),
    "hidden changed by inplace=True": (
        ROWS,
        F + "z = head(h)  # here\nF.relu(g, inplace=True)\nl = F.cross_entropy(z, y)",
        "the hidden states may change",
    ),
    "dropout before another random number": (
        ROWS,
        F + "z = head(F.dropout(h))  # here\nn = noise()\nl = F.cross_entropy(z, y)",
        "computed on the line of the head",
    ),
    "head replaced": (
        ROWS,
        F + "z = self.head(h)  # here\nself.head = other\nl = F.cross_entropy(z, y)",
        "the head may change",
    ),
    "logits of two names": (
        ROWS,
        F + "z = w = head(h)  # here\nl = F.cross_entropy(z, y)",
        "assigned to several names",
    ),
    "rows that are regrouped": (
        ROWS,
        F + "l = F.cross_entropy(head(h).view(B, V, T), y)  # here",
        "does not flatten the rows",
    ),
    "head under a condition": (
        ROWS,
        F + "if a:\n    z = head(h)  # here\nl = F.cross_entropy(z, y)",
        "in different blocks",
    ),
    "loss under a condition": (
        ROWS,
        F + "z = head(h)  # here\nif y is not None:\n    l = F.cross_entropy(z, y)",
        "under a condition",
    ),
    "walrus in the labels": (ROWS, F + "l = F.cross_entropy(head(h), (y := f()))  # here", "assign a name"),
    "our name is taken": (
        ROWS,
        F + "linear_cross_entropy = 3\nl = F.cross_entropy(head(h), y)  # here",
        "has a linear_cross_entropy of its own",
    ),
    "a comment inside the loss": (
        ROWS,
        F + "l = F.cross_entropy(  # loss\n    head(h), y)  # here",
        "comments inside the call",
    ),
    "a rule without a mechanical repair": ("op-storm", "x = x + 1  # here", "by hand"),
    "a read": ("host-sync", "total += loss.item()  # here", "without you; by hand: read less"),
    "a cast": ("duplicate-cast", "a = h.float() + h.float()  # here", "by hand"),
}
# Pieces that one unbind before the loop could change, or that may not be read for every index.
NO_PIECES = {
    "a bank that changes in the loop": "for i in range(9):\n    x = x @ bank[i]  # here\n    bank = bank * 2",
    "an attribute rebound": "for i in range(9):\n    x = x @ self.b[i]  # here\n    self.b = y",
    "a bank written in place": "for i in range(9):\n    x = x @ b[i]  # here\n    b.mul_(2)",
    "a piece written": "for i in range(9):\n    x = b[i] * 2  # here\n    b[i] = x",
    "an index that is no counter": "for row in ids:\n    x = x + table[row]  # here",
    "an index rebound in a comprehension": "for i in range(9):\n    x = x @ b[i] + sum(i for i in y)  # here",
    "a walrus on the index": "for i in range(9):\n    x = x @ b[i] + (i := 3)  # here",
    "under a condition": "for i in range(9):\n    if b is not None:\n        x = x @ b[i]  # here",
    "in a conditional expression": "for i in range(9):\n    x = b[i] if i else y  # here",
    "delayed by a lambda": "for i in range(9):\n    f.append(lambda: b[i])  # here",
    "gradients on": "for i in range(9):\n    with torch.enable_grad():\n        x = x @ b[i]  # here",
    "a range of one's own": "from mine import range\nfor i in range(9):\n    x = b[i]  # here",
    "an enumeration from one": "for i, l in enumerate(ls, 1):\n    x = b[i]  # here",
    "a loop on one line": "for i in range(9): x = x @ b[i]  # here",
    "behind another statement": "y = 1; z = [b[i] for i in range(9)]  # here",
}
LEFT_ALONE |= {name: ("zero-fill", text, "no piece") for name, text in NO_PIECES.items()}
# What is no assignment of a causal LM to a name.
NO_MODEL = (
    "model = transformers.AutoModel.from_pretrained('x')",
    "model = Own.from_pretrained('x')",
    "model, tokenizer = load()",
    "models.append(transformers.LlamaForCausalLM(config))",
    "m, n = transformers.LlamaForCausalLM(c), 3",
    "m = transformers.LlamaForCausalLM(c) if c else None",
)
LEFT_ALONE |= {made: ("full-vocab", HF.format(made), "apply_leanstep(model) by hand") for made in NO_MODEL}


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
    finding = SimpleNamespace(rule=OPTIMIZER, line=line, leanstep=None)
    (edit,) = repairs_of(Project(script, [binary, script]), finding)[0].edits  # type: ignore[arg-type]
    assert "fused=True" in edit.text
