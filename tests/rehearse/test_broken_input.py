"""Programs that break, from the command line: one clear line, the exit code, and nothing left behind."""

from __future__ import annotations

import contextlib
import io

import pytest
from rehearse.rehearsed import run_script, stub_or_skip
from torch.utils.cpp_extension import is_ninja_available

from leanstep.cli import run

STEP = "model(torch.ones(2, 4, device='cuda')).sum().backward(); opt.step()"
SETUP = "import torch\nmodel = torch.nn.Linear(4, 4).cuda()\nopt = torch.optim.SGD(model.parameters(), 0.1)\n"
X = "import torch\nx = torch.ones(3, device='cuda')\n"
# name -> (the script, its arguments, exit code, what the line says)
BROKEN = {
    "no CUDA call": ("print(1)\n", (), 3, "the script creates no tensor on the GPU"),
    "ends early": (SETUP + STEP, (), 3, "the script ended after 1 of 3 steps"),
    "ends before a step": (X, (), 3, "the script ended after 0 steps"),
    "CUDA sources": (
        X + "from torch.utils.cpp_extension import load\nload('mine', ['mine.cu'])\n",
        *((), 3, "train.py:4 <module>: a CUDA extension needs a real device"),
    ),
    "crash": (
        X + "import ctypes\nctypes.memset(x.untyped_storage().data_ptr(), 0, 12)\n",
        *((), 3, "train.py:4 <module>: the program ended its own process with signal SIGSEGV"),
    ),
    "leaves its process": (
        X + "import os\nos._exit(5)\n",
        *((), 3, "the program ended its own process with exit code 5"),
    ),
    "numpy of the device": (X + "x.numpy()\n", (), 3, "train.py:3 <module>: the program raised TypeError"),
    "syntax error": ("import torch\ndef f(:\n", (), 3, "train.py:2 <module>: the program raised SyntaxError"),
    "raises": (X + "raise KeyError('lr')\n", (), 3, "train.py:3 <module>: the program raised KeyError: 'lr'"),
    "exit code": (X + "import sys\nsys.exit(4)\n", (), 3, "py:4 <module>: the program ended with exit code"),
    "exit message": (X + "raise SystemExit('no data')\n", (), 3, "py:3 <module>: the program ended: no data"),
    "standard input": (X + "input()\n", (), 3, "train.py:3 <module>: the program raised EOFError"),
    "no such script": (None, (), 2, "no such file: train.py"),
    "unknown device": (X, ("--device", "abacus"), 2, "--device: expected one of v100"),
    "no ranks": (X, ("--ranks", "0"), 2, "'--ranks': Input should be greater than or equal to 1"),
    "no steps": (X, ("--steps", "0"), 2, "'--steps': Input should be greater than or equal to 1"),
}  # fmt: skip
# Programs that do unusual things and are none the worse for it.
SOUND = {
    "arguments": (
        SETUP + "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float)\n"
        f"opt.param_groups[0]['lr'] = p.parse_args().lr\nfor _ in range(4):\n    {STEP}\n",
        ("--", "--lr", "0.5"),
    ),
    "changes directory": (
        SETUP + f"import os, tempfile\nos.chdir(tempfile.mkdtemp())\nfor _ in range(4):\n    {STEP}\n", (),
    ),
    "checkpoints": (
        SETUP + f"for i in range(4):\n    {STEP}\n    torch.save(model.state_dict(), f'ckpt_{{i}}.pt')\n", (),
    ),
    "spawns": (
        SETUP + f"import torch.multiprocessing as mp\ndef work(rank, n):\n    for _ in range(n): {STEP}\n"
        "mp.spawn(work, (4,), nprocs=2)\n", (),
    ),
    "fused SGD": (
        SETUP + "opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)\n"
        f"for _ in range(4):\n    {STEP}\n", (),
    ),
    "kernel of NVRTC": (
        SETUP + "kernel = torch.cuda._compile_kernel('__global__ void f(float* x) {}', 'f')\n"
        f"for _ in range(4):\n    {STEP}\n    kernel((1, 1, 1), (32, 1, 1), (model.weight,))\n", (),
    ),
    "selects no GPU": (
        "import torch, torch.utils.data as d\nmodel = torch.nn.Linear(4, 4)\n"
        "opt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "data = d.TensorDataset(torch.randn(32, 4), torch.randint(0, 4, (32,)))\n"
        "for x, y in d.DataLoader(data, 4, shuffle=True):\n"
        "    torch.nn.functional.cross_entropy(model(x), y).backward(); opt.step()\n", (),
    ),
    "larger than the host": (
        "import torch\nwith torch.no_grad():\n    table = torch.nn.Embedding(1 << 22, 1 << 14)\n"
        + SETUP + f"for _ in range(4):\n    {STEP}\n", (),
    ),
}  # fmt: skip


def command(folder, monkeypatch, text: str | None, options: tuple[str, ...]) -> tuple[int, str]:
    """Exit code and all lines of `leanstep rehearse train.py`, run in an empty folder; what it left there."""
    stub_or_skip()
    monkeypatch.chdir(folder)
    if text is not None:
        (folder / "train.py").write_text(text)
    given = ["rehearse", *(o for o in options if options[0] != "--"), "train.py"]
    given += options if options and options[0] == "--" else ()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run(given)
    assert {p.name for p in folder.iterdir()} <= {"train.py"}
    return code, said.getvalue()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_input_gets_one_line(tmp_path, monkeypatch, name):
    text, options, expected, says = BROKEN[name]
    code, said = command(tmp_path, monkeypatch, text, options)
    assert code == expected, said
    assert any(says in line for line in said.splitlines()), said
    assert "Traceback" not in said
    # Only a script that ran to its end without enough steps has figures.
    assert ("fits" in said) == name.startswith("ends "), said


@pytest.mark.parametrize("name", SOUND)
def test_unusual_programs_are_seen_to_their_last_step(tmp_path, monkeypatch, name):
    code, said = command(tmp_path, monkeypatch, *SOUND[name])
    assert code == 0, said
    assert " per step (" in said


def test_pooling_is_captured(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        SETUP + "pool = torch.compile(torch.nn.MaxPool2d(2))\n"
        "for _ in range(4):\n    model(pool(torch.ones(1, 2, 8).cuda())).sum().backward(); opt.step()\n"
    )
    recording = run_script(script).recording
    assert recording.ended == "steps" and recording.regions


def test_an_extension_of_the_host_is_built_and_called(tmp_path, monkeypatch):
    stub_or_skip()
    if not is_ninja_available():
        pytest.skip("torch builds extensions with ninja, which is not installed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(
        SETUP + "from torch.utils.cpp_extension import load_inline\n"
        "source = '''#include <pybind11/pybind11.h>\nint twice(int x) { return 2 * x; }\n"
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def(\"twice\", &twice); }'''\n"
        "mine = load_inline('mine', source, no_implicit_headers=True)\n"
        "for _ in range(4):\n    model(torch.ones(mine.twice(3), 4).cuda()).sum().backward(); opt.step()\n"
    )
    recording = run_script(script).recording
    assert recording.ended == "steps", recording.refused
    assert any(s.shape == (6, 4) for s in recording.storages.values())
