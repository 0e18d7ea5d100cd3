"""The same answers and the same kernels on CPU builds and CUDA builds of torch."""

from __future__ import annotations

import json

import pytest
import torch
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script

from leanstep.rehearse.answers import fake_device, torch_cuda
from leanstep.rehearse.answers.fake_device import RehearsalError
from leanstep.rehearse.events import Launch


@pytest.fixture(scope="module")
def builds(tmp_path_factory) -> Rehearsed:
    return run_script(SCRIPTS / "builds.py", capture=tmp_path_factory.mktemp("builds"))


@pytest.fixture(scope="module")
def said(builds) -> dict:
    assert builds.recording.refused is None
    return json.loads(builds.printed.splitlines()[-1])


def test_a_script_cannot_make_a_real_device_visible(said):
    assert (said["own variable"], said["variable of CUDA"], said["after deletion"]) == ("0", "", "")


def test_versions_and_configuration_are_answered(said):
    assert said["config"] is True
    assert said["versions"] == ["str", "int"]


def test_tensor_types_of_the_device_know_tensors(said):
    assert said["instances"] == [True, False]


@pytest.mark.parametrize("mark", ["silu", "mish", "rms norm"])
def test_an_op_that_cuda_has_a_kernel_for_is_one_launch_in_backward(builds, mark):
    if mark == "rms norm" and "_fused_rms_norm" not in torch_cuda.OWN_KERNELS:
        pytest.skip("CUDA's kernel for RMSNorm came with torch 2.9")
    own = [
        e.name
        for e in builds.recording.events
        if isinstance(e, Launch) and e.phase == "backward" and builds.is_at(e.line, mark)
    ]
    name = {"rms norm": "_fused_rms_norm_backward"}.get(mark, f"{mark}_backward")
    assert own.count(name) == 1
    assert not {"mul", "sigmoid", "mean", "rsqrt"} & set(own)


def test_cuda_has_kernels_for_no_other_composite_op():
    """On a CUDA build: what the tape would take apart there and not on a CPU build, or the reverse."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}
    composite = {
        n[6:] for n in names if torch._C._dispatch_has_kernel(n) and has(n, "CompositeImplicitAutograd")
    }
    own = {n for n in composite if has(f"aten::{n}", "CUDA")}
    assert set(torch_cuda.OWN_KERNELS) <= composite
    assert own == (set(torch_cuda.OWN_KERNELS) if torch.version.cuda else set())


def test_an_op_without_a_fake_implementation_is_refused_not_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmine = torch.library.Library('mine', 'DEF')\n"
        "mine.define('twice(Tensor x) -> Tensor')\n"
        "mine.impl('twice', lambda x: x + x.new_tensor(x.data_ptr()), 'CUDA')\n"
        "x = torch.ones(3, device='cuda')\ntorch.ops.mine.twice(x)\n"
    )
    refused = run_script(script).recording.refused
    assert refused is not None and refused.line is not None
    assert refused.line.number == 6
    assert refused.reason.startswith("a custom op without a fake implementation: mine.twice")


def test_a_call_outside_the_rehearsal_is_one_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nx = torch.ones(3, device='cuda')\n"
        "raise RuntimeError('CUDA error: CUDA driver version is insufficient for CUDA runtime version')\n"
    )
    refused = run_script(script).recording.refused
    assert refused is not None
    assert refused.reason.startswith("a call bypassed the rehearsal and asked CUDA for a real device")


def test_libraries_that_the_linker_does_not_find_come_from_the_nvidia_packages(tmp_path, monkeypatch):
    package = tmp_path / "nvidia" / "cublas" / "lib"
    package.mkdir(parents=True)
    (package / "libcublas.so.13").write_text("")
    loaded = []

    def load(name, mode):
        if name.endswith("libtorch_cuda.so") and "libcublas.so.13" not in loaded:
            raise OSError("libcublas.so.13: cannot open shared object file: No such file or directory")
        if name.endswith("libother.so"):
            raise OSError("libcufft.so.12: cannot open shared object file: No such file or directory")
        loaded.append(name.rpartition("/")[2])

    monkeypatch.setattr(fake_device.ctypes, "CDLL", load)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    fake_device._load(tmp_path / "libtorch_cuda.so")
    assert loaded == ["libcublas.so.13", "libtorch_cuda.so"]
    with pytest.raises(RehearsalError, match=r"libother\.so needs libcufft\.so\.12, which is not installed"):
        fake_device._load(tmp_path / "libother.so")
