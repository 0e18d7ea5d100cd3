"""Programs that cannot be rehearsed, and machines on which nothing can: one clear line each."""

from __future__ import annotations

import shutil

import pytest
from rehearse.rehearsed import run_script, stub_or_skip

from leanstep.rehearse.answers import fake_device
from leanstep.rehearse.answers.fake_device import RehearsalError
from leanstep.rehearse.events import Launch, Request
from leanstep.rehearse.stage import rehearse

REFUSED = {
    "pointer": (
        "import torch\nx = torch.ones(3, device='cuda')\ntry:\n    x.item()\nexcept Exception:\n    pass\n"
        "x.data_ptr()\n",
        7,
        "data_ptr() of a device tensor needs a real device",
    ),
    "extension": (
        "import torch\nfrom torch.utils.cpp_extension import load_inline\n\n"
        "load_inline('mine', cpp_sources='', cuda_sources='__global__ void f() {}')\n",
        4,
        "a CUDA extension needs a real device",
    ),
    "binary": (
        "import torch\nx = torch.ones(3, device='cuda')\nimport some_cuda_package\n",
        3,
        "an import failed: No module named 'some_cuda_package'",
    ),
    "ordinal": (
        "import torch\nwhere = torch.device('cuda:3')\nw = torch.nn.Linear(3, 3)\nw.to(where)\n",
        4,
        "the program raised RuntimeError: CUDA error: invalid device ordinal: cuda:3; only cuda:0 exists",
    ),
    "chosen": (
        "import torch\ntorch.cuda.set_device(0)\nx = torch.ones(3).to('cuda:0')\ntorch.cuda.set_device(1)\n",
        4,
        "the program raised RuntimeError: CUDA error: invalid device ordinal: cuda:1; only cuda:0 exists",
    ),
    "bounds": (
        "import torch\nx = torch.ones(4, 8, device='cuda')\nx.as_strided((4, 4), (8, 1), 4)\n"
        "x.as_strided((), (), 31)\n"
        "x[2:].as_strided((2, 8), (8, 1), 17)\n",
        5,
        "the program raised RuntimeError: as_strided: size [2, 8], stride [8, 1], storage_offset 17 need 33 "
        "elements, out of bounds for a storage of 32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_cannot_be_rehearsed_is_refused_with_its_line(tmp_path, name):
    text, number, reason = REFUSED[name]
    script = tmp_path / "train.py"
    script.write_text(text)
    recording = run_script(script).recording
    assert recording.ended == "refused"
    assert recording.refused is not None
    assert recording.refused.reason.startswith(reason)
    assert "\n" not in recording.refused.reason
    assert recording.refused.line is not None
    assert (recording.refused.line.number, recording.refused.line.file) == (number, str(script))


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("leanstep.cpu.find_compiler", lambda: None)
    with pytest.raises(RehearsalError, match=r"no C\+\+ compiler .* builds a small library for torch once"):
        fake_device.library()


def test_a_torch_whose_hooks_differ(tmp_path, monkeypatch):
    source = tmp_path / "stub.cpp"
    source.write_text("#error hooks have moved\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fake_device, "SOURCE", source)
    with pytest.raises(RehearsalError, match="CUDA hooks differ from those of torch 2") as caught:
        fake_device.library()
    assert "\n" not in str(caught.value)


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    stub_or_skip()
    source, home = tmp_path / "stub.cpp", tmp_path / "home"
    source.write_text("int nothing;\n")
    home.write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(fake_device, "SOURCE", source)
    assert fake_device.library(tmp_path).parent == tmp_path
    with pytest.raises(RehearsalError, match="TMPDIR: expected a folder where a library can be built"):
        fake_device.library(home)


def test_a_torch_without_a_private_name(monkeypatch):
    monkeypatch.setattr(fake_device, "NEEDED", ("_C._current_autograd_node", "_C._no_such_name"))
    with pytest.raises(RehearsalError, match=r"has no torch\._C\._no_such_name"):
        fake_device.check()


def test_a_torch_built_for_rocm(tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+rocm7.1'\ncuda = None\nhip = '7.1.5'\n")
    monkeypatch.setattr(fake_device, "torch_folder", lambda: tmp_path)
    with pytest.raises(RehearsalError, match=r"2\.13\.0\+rocm7\.1 is built for ROCm 7\.1\.5: .* CUDA build"):
        fake_device.library()


def test_a_failure_inside_a_library_is_shown_at_the_line_of_the_script(tmp_path):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "deep.py").write_text("def work(x):\n    return x.data_ptr()\n")
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(library)!r})\nimport deep, torch\n"
        "x = torch.ones(2, device='cuda')\ndeep.work(x)\n"
    )
    recording = rehearse(Request(str(script), device="a100"), quiet=True)
    assert recording.refused is not None
    assert (recording.refused.line.number, recording.refused.line.file) == (4, str(script))
    assert recording.refused.reason.endswith("(in deep.py:2 work)")


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a real nvidia-smi")
def test_a_script_that_logs_nvidia_smi_is_told_what_this_is(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import subprocess, torch\ntorch.ones(2, device='cuda')\n"
        "said = subprocess.run(['nvidia-smi'], check=True, capture_output=True, text=True).stdout\n"
        "raise RuntimeError(said.strip())\n"
    )
    recording = rehearse(Request(str(script), device="a100"), quiet=True)
    assert "a100, simulated; no device is installed" in recording.refused.reason


def test_threads_of_the_program_find_the_device(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import queue, threading, torch\n"
        "ready = queue.Queue()\n"
        "def load():\n"
        "    for _ in range(4):\n"
        "        batch = torch.ones(8, 4, pin_memory=True)\n"
        "        ready.put(batch.to('cuda', non_blocking=True))\n"
        "threading.Thread(target=load, daemon=True).start()\n"
        "model = torch.nn.Linear(4, 4).cuda()\n"
        "opt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(4):\n"
        "    model(ready.get(timeout=60)).sum().backward()\n    opt.step()\n"
    )
    recording = rehearse(Request(str(script), device="a100"), quiet=True)
    assert recording.ended == "steps", recording.refused
    copies = [e for e in recording.events if isinstance(e, Launch) and e.name == "to device"]
    assert {(e.line.number, e.phase) for e in copies if e.line.function == "load"} == {(6, "forward")}
