"""Hostile snippets: an edit is exactly the one that is shown, byte for byte, or the place is left alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from leanstep.diagnose.advice import APPLY
from leanstep.fix.offers import changed_files
from leanstep.fix.repairs import Project, repairs_of
from leanstep.fix.source_edits import NotUnderstood

F = "import torch.nn.functional as F\n"
LEAN = "from leanstep.heads import linear_cross_entropy\n"
METHOD = "class A:\n\t@deco\n\tdef f(self, h, y):\n"
ADAM = "import torch\nopt = torch.optim.Adam({})\nopt.step()  # here\n"
HF = "import transformers\n{}  # here\n"
OPT, UNBIND, HEAD, RETAIN = "unbatched-optimizer", "zero-fill", "dead-rows", "retain-graph"
# name: (rule, before, after or None). "# here" marks the line of the finding.
SNIPPETS: dict[str, tuple[str, str, str | None]] = {
    "closing comma and comments": (
        OPT,
        ADAM.format("\n    p,  # all\n    lr=1e-3,  # rate\n"),
        ADAM.format("\n    p,  # all\n    lr=1e-3, fused=True,  # rate\n"),
    ),
    "tabs": (OPT, ADAM.format("\n\tp,\n\tlr=1\n"), ADAM.format("\n\tp,\n\tlr=1, fused=True\n")),
    "CRLF": (OPT, ADAM.format("p").replace("\n", "\r\n"), ADAM.format("p, fused=True").replace("\n", "\r\n")),
    "walrus argument": (OPT, ADAM.format("(p := f())"), ADAM.format("(p := f()), fused=True")),
    "walrus around": (
        OPT,
        "import torch\nif (opt := torch.optim.SGD(p, 1)):\n    opt.step()  # here\n",
        "import torch\nif (opt := torch.optim.SGD(p, 1, fused=True)):\n    opt.step()  # here\n",
    ),
    "generator argument": (OPT, ADAM.format("q for q in p"), None),
    "generator in brackets": (OPT, ADAM.format("(q for q in p)"), ADAM.format("(q for q in p), fused=True")),
    "unpacked": (OPT, ADAM.format("p, **options"), None),
    "differentiable": (OPT, ADAM.format("p, differentiable=True"), None),
    "foreach decided": (OPT, ADAM.format("p, foreach=flag"), None),
    "a name like torch's": (OPT, ADAM.replace("import torch", "import mine as torch").format("p"), None),
    "a partial": (
        OPT,
        "import torch\nfrom functools import partial\n"
        "opt = partial(torch.optim.Adam)(p)\nopt.step()  # here\n",
        None,
    ),
    "an alias of the class": (
        OPT,
        "from torch.optim import AdamW as A\nopt = A(p)\nopt.step()  # here\n",
        "from torch.optim import AdamW as A\nopt = A(p, fused=True)\nopt.step()  # here\n",
    ),
    "in a decorated factory": (
        OPT,
        "import torch\n@cache\ndef f(p):\n\treturn torch.optim.Adam(p)\nopt = f(p)\nopt.step()  # here\n",
        "import torch\n@cache\ndef f(p):\n\treturn torch.optim.Adam(p, fused=True)\n"
        "opt = f(p)\nopt.step()  # here\n",
    ),
    "clipping of another library": (OPT, "import mine\nmine.clip_grad_norm_(p, 1.0)  # here\n", None),
    "clipping by a method": (OPT, "accelerator.clip_grad_norm_(p, 1.0)  # here\n", None),
    "zero_grad with a positional flag": (OPT, "own.zero_grad(False)  # here\n", None),
    "zero_grad beside others": (
        OPT,
        "opt.zero_grad(set_to_none=False); x = False  # here\n",
        "opt.zero_grad(set_to_none=True); x = False  # here\n",
    ),
    "comment above the loop": (
        UNBIND,
        "# layers\nfor i in range(9):  # deep\n\tx = x @ b[i]  # here\n",
        "# layers\nb_pieces = b.unbind(0)\nfor i in range(9):  # deep\n\tx = x @ b_pieces[i]  # here\n",
    ),
    "index rebound in a comprehension": (
        UNBIND,
        "for i in range(9):\n    x = x @ b[i] + sum(i for i in y)  # here\n",
        None,
    ),
    "walrus on the index": (UNBIND, "for i in range(9):\n    x = x @ b[i] + (i := 3)  # here\n", None),
    "bank rebound": (UNBIND, "for i in range(9):\n    x = x @ self.b[i]  # here\n    self.b = y\n", None),
    "bank written in place": (UNBIND, "for i in range(9):\n    x = x @ b[i]  # here\n    b.mul_(2)\n", None),
    "piece written": (UNBIND, "for i in range(9):\n    x = b[i] * 2  # here\n    b[i] = x\n", None),
    "piece under a condition": (UNBIND, "for i in range(9):\n    x = b[i] if i else y  # here\n", None),
    "delayed by a lambda": (UNBIND, "for i in range(9):\n    f.append(lambda: b[i])  # here\n", None),
    "gradients switched on": (
        UNBIND,
        "for i in range(9):\n    with torch.enable_grad():\n        x = x @ b[i]  # here\n",
        None,
    ),
    "a range of one's own": (
        UNBIND,
        "from mine import range\nfor i in range(9):\n    x = b[i]  # here\n",
        None,
    ),
    "an enumeration that starts at one": (
        UNBIND,
        "for i, l in enumerate(ls, 1):\n    x = b[i]  # here\n",
        None,
    ),
    "a loop on one line": (UNBIND, "for i in range(9): x = x @ b[i]  # here\n", None),
    "behind another statement": (UNBIND, "y = 1; z = [b[i] for i in range(9)]  # here\n", None),
    "a second backward now and then": (
        RETAIN,
        "for i in r:\n    l.backward(retain_graph=True)  # here\n    if i % 5:\n        m.backward()\n",
        None,
    ),
    "retain_graph from a variable": (RETAIN, "l.backward(retain_graph=keep)  # here\n", None),
    "not reduced": (
        HEAD,
        F + "l = F.cross_entropy(head(h).view(-1, V), y.view(-1), reduction='none')  # here\n",
        None,
    ),
    "class weights": (HEAD, F + "l = F.cross_entropy(head(h), y, weight=w)  # here\n", None),
    "a method of the logits": (HEAD, F + "l = F.cross_entropy(z.softmax(-1), y)  # here\n", None),
    "a function of torch": (HEAD, F + "import torch\nl = F.cross_entropy(torch.relu(h), y)  # here\n", None),
    "sliced after flattening": (
        HEAD,
        F + "l = F.cross_entropy(head(h).view(-1, V)[:, :-1], y.view(-1))  # here\n",
        None,
    ),
    "logits changed in place": (
        HEAD,
        F + "z = head(h)  # here\nz[:, 3] = -9\nl = F.cross_entropy(z, y)\n",
        None,
    ),
    "hidden changed under an alias": (
        HEAD,
        F + "z = head(h)  # here\ng.mul_(2)\nl = F.cross_entropy(z, y)\n",
        None,
    ),
    "hidden changed by inplace=True": (
        HEAD,
        F + "z = head(h)  # here\nF.relu(g, inplace=True)\nl = F.cross_entropy(z, y)\n",
        None,
    ),
    "dropout before another random number": (
        HEAD,
        F + "z = head(F.dropout(h))  # here\nn = noise()\nl = F.cross_entropy(z, y)\n",
        None,
    ),
    "head replaced": (
        HEAD,
        F + "z = self.head(h)  # here\nself.head = other\nl = F.cross_entropy(z, y)\n",
        None,
    ),
    "logits returned": (
        HEAD,
        F + "def f(h, y):\n    z = head(h)  # here\n    return F.cross_entropy(z, y), z\n",
        None,
    ),
    "logits assigned twice": (
        HEAD,
        F + "z = head(h)\nz = z * 2\nl = F.cross_entropy(z, y)  # here\n",
        None,
    ),
    "loss under a condition": (
        HEAD,
        F + "z = head(h)  # here\nif y is not None:\n    l = F.cross_entropy(z, y)\n",
        None,
    ),
    "walrus in the labels": (HEAD, F + "l = F.cross_entropy(head(h), (y := f()))  # here\n", None),
    "our name is taken": (
        HEAD,
        F + "linear_cross_entropy = 3\nl = F.cross_entropy(head(h), y)  # here\n",
        None,
    ),
    "a comment inside the loss": (HEAD, F + "l = F.cross_entropy(  # loss\n    head(h), y)  # here\n", None),
    "ellipsis slices": (
        HEAD,
        F + "l = F.cross_entropy(head(h)[..., :-1, :].reshape(-1, V), y[..., 1:].reshape(-1))  # here\n",
        F + LEAN + "l = linear_cross_entropy(h[..., :-1, :], head, y[..., 1:], shift=0)  # here\n",
    ),
    "in a decorated method, CRLF and tabs": (
        HEAD,
        (F + METHOD + "\t\tz = self.head(h)  # here\n\t\treturn F.cross_entropy(z, y)\n").replace(
            "\n", "\r\n"
        ),
        (F + LEAN + METHOD + "\t\treturn linear_cross_entropy(h, self.head, y, shift=0)\n").replace(
            "\n", "\r\n"
        ),
    ),
    "a model that is moved at once": (
        "full-vocab",
        HF.format("m = transformers.LlamaForCausalLM(c).to(d)"),
        "import transformers\nfrom leanstep.integrations.transformers import apply_leanstep\n"
        "m = transformers.LlamaForCausalLM(c).to(d)  # here\napply_leanstep(m)\n",
    ),
    "a model among others": ("full-vocab", HF.format("m, n = transformers.LlamaForCausalLM(c), 3"), None),
    "a model in a condition": (
        "full-vocab",
        HF.format("m = transformers.LlamaForCausalLM(c) if c else None"),
        None,
    ),
}


def test_there_are_enough():
    assert len(SNIPPETS) >= 40


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_hostile_snippet_is_edited_rightly_or_left_alone(tmp_path: Path, name: str):
    rule, before, after = SNIPPETS[name]
    path = tmp_path / "train.py"
    path.write_bytes(before.encode())
    number = 1 + next(i for i, line in enumerate(before.splitlines()) if "# here" in line)
    finding = SimpleNamespace(
        rule=rule, short_fix="by hand", leanstep=APPLY if rule == "full-vocab" else None,
        line=SimpleNamespace(file=str(path), number=number, library=False),
    )  # fmt: skip
    try:
        edited = [
            changed_files(repair.edits)[path].decode()
            for repair in repairs_of(Project(path, [path]), finding)  # type: ignore[arg-type]
        ]
    except NotUnderstood as reason:
        assert after is None and len(str(reason)) > 10, reason
        return
    assert edited[0] == after
    compile(edited[0], name, "exec")
