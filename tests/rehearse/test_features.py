"""Features of torch and its neighbours that programs use: they run, or the refusal names them."""

from __future__ import annotations

import json

import pytest
import torch
from rehearse.rehearsed import SCRIPTS, run_script

from leanstep.rehearse import refusals
from leanstep.rehearse.events import Launch

RANKS = 4


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    capture = tmp_path_factory.mktemp("features")
    saved = capture / "weights.pt"
    torch.save({"weight": torch.arange(2.0, 9.0)}, saved)
    rehearsed = run_script(SCRIPTS / "features.py", str(saved), capture=capture, steps=1000, ranks=RANKS)
    assert rehearsed.recording.refused is None, rehearsed.recording.refused
    return rehearsed


@pytest.fixture(scope="module")
def seen(features) -> dict:
    return json.loads(features.printed.splitlines()[-1])


def test_backward_functions_make_tensors_of_the_device(seen):
    assert seen["equal in backward"] is True


def test_a_compiled_function_pins_memory(seen):
    assert seen["pinned in a compiled function"] == [4, 16]


def test_equal_blocks_share_a_backend(seen):
    # Dynamo compiles code again for another backend, and gives up after eight of them.
    assert seen["backends of three blocks"] == [3, 1]


def test_convolutions_keep_channels_last(seen):
    assert seen["channels last"] == [False, True]


def test_a_mask_of_booleans_is_converted_for_the_memory_efficient_kernel(features):
    calls = [
        e for e in features.recording.events if isinstance(e, Launch) and features.is_at(e.line, "masked")
    ]
    kinds = [k.kind for e in calls for k in e.kernels]
    assert kinds == ["pointwise", "fill", "pointwise", "attention_efficient"]


def test_a_checkpoint_is_loaded_onto_the_device(seen):
    assert seen["loaded"] == ["cuda", [2.0, 3.0]]


def test_storages_have_addresses_to_compare(seen):
    assert seen["storages"] == [True, False]


def test_the_default_generators(seen):
    assert seen["generator"] == [3, [3]]


def test_flash_attn_is_a_package_with_its_padding(seen):
    assert seen["flash-attn"] == ["2.8.3", True]
    assert seen["unpadded"] == [[8, 8], [0, 1, 2, 5, 6, 7, 8, 9], [0, 3, 8], 5, [3, 5]]
    assert seen["padded"] == [2, 5, 8]


def test_fsdp1_shards_gathers_and_scatters(features, seen):
    assert seen["shards"] == 3 * (64 * 64 + 64) // RANKS
    names = [
        kernel.name
        for event in features.recording.events
        if isinstance(event, Launch)
        for kernel in event.kernels
        if kernel.kind == "collective"
    ]
    # Two iterations, three layers; some stay gathered between forward and backward.
    assert names.count("reduce_scatter") == 2 * 3
    assert names.count("all_gather") >= 2 * 3


def test_a_long_triton_kernel_is_captured_in_a_bounded_time():
    recording = run_script(SCRIPTS / "long_kernel.py", steps=2).recording
    assert recording.refused is None, recording.refused
    names = [e.name for e in recording.events if isinstance(e, Launch)]
    assert names.count("triton::copy_kernel") == 2
    assert "clone" not in names  # it writes its output alone: nothing is copied first


def test_attention_visits_the_blocks_of_each_batchs_mask():
    recording = run_script(SCRIPTS / "masks.py").recording
    assert recording.refused is None, recording.refused
    assert len(recording.regions) == 2  # forward and backward: the mask breaks no graph
    assert not [a for a in recording.assumed if a.kind == "density of a block mask"]
    flops = [
        [k.flops for k in event.kernels]
        for event in recording.events
        if isinstance(event, Launch) and event.name.startswith("fused_attention")
    ]
    whole, blocks = 4 * 4096 * 4096 * 64, 32 * 32
    # 16 documents of 2 blocks: 3 block pairs each. 2 of 16, windows of 8 blocks: 8 and the part block before.
    short, long = 16 * 3, 2 * sum(min(i, 9) for i in range(1, 17))
    each = [whole * visited / blocks for visited in (short, short, long)]
    assert flops == [[part] for forward in each for part in (forward, 2.5 * forward)]


def test_a_shape_error_leaves_no_traceback_of_internals(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n\ndef inner(x):\n    return x @ x\n\ninner(torch.ones(2, 3, device='cuda'))\n"
    )
    refused = run_script(script, capture=tmp_path).recording.refused
    assert refused.reason.startswith("the program raised RuntimeError") and "\n" not in refused.reason
    assert refused.line.number == 4
    assert "Traceback" not in capfd.readouterr().err


UNSUPPORTED = {
    "nn.Embedding(9, 4, sparse=True).cuda()(torch.arange(3).cuda()).sum().backward()": refusals.SPARSE,
    "torch.eye(4).to_sparse().cuda()": refusals.SPARSE,
    "torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], device='cuda')": refusals.NESTED,
    "nn.Linear(4, 4).cuda()(torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged, "
    "device='cuda'))": refusals.NESTED,
    "torch.export.export(nn.Linear(4, 4).cuda(), (torch.ones(2, 4, device='cuda'),))": refusals.EXPORT,
    "nn.LSTM(4, 8).cuda()(torch.randn(3, 2, 4, device='cuda'))": refusals.RECURRENT,
    "nn.GRUCell(4, 8).cuda()(torch.randn(2, 4, device='cuda'))": refusals.RECURRENT,
    "nn.LazyLinear(10)": refusals.LAZY,
    "torch.cuda.FloatTensor(4, 8)": refusals.TENSOR_TYPE,
    "torch.ones(2).type('torch.cuda.HalfTensor')": refusals.TENSOR_TYPE,
    "torch.set_default_tensor_type(torch.cuda.DoubleTensor)": refusals.TENSOR_TYPE,
    "nn.functional.ctc_loss(torch.randn(9, 2, 5, device='cuda').log_softmax(-1), "
    "torch.ones(2, 3).long(), [9, 9], [3, 3])": refusals.CTC,
}


@pytest.mark.parametrize("call", UNSUPPORTED)
def test_what_no_rehearsal_runs_is_refused_in_one_sentence(tmp_path, call):
    script = tmp_path / "train.py"
    script.write_text(f"import torch\nfrom torch import nn\n{call}\n")
    refused = run_script(script).recording.refused
    assert refused is not None and refused.line is not None
    assert (refused.line.number, refused.reason) == (3, UNSUPPORTED[call])


def test_a_graph_that_torch_cannot_capture_is_named_in_the_verdict(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport torch._dynamo.backends.common as backend\n"
        "def fails(*args, **kwargs):\n    raise ValueError('no such graph')\n"
        "backend.aot_module_simplified = fails\n"
        "f = torch.compile(lambda x: x.sin() + 1)\n"
        "f(torch.ones(3, device='cuda'))\n"
    )
    notes = [note for note in run_script(script).recording.notes if "counted as eager code" in note]
    assert len(notes) == 1
    assert "train.py:" in notes[0] and "no such graph" in notes[0]


CUDNN = """
import sys
import torch
import torch.nn.functional as F

cuda = torch.backends.cuda
cuda.enable_flash_sdp(False), cuda.enable_mem_efficient_sdp(False)
cuda.enable_math_sdp(sys.argv[1] == "math")
weight = torch.zeros(1, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(2):
    q, k, v = (torch.zeros(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    (F.scaled_dot_product_attention(q * weight.bfloat16(), k, v, is_causal=True)).float().sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("others", "fused"), [("none", True), ("math", False)])
def test_attention_is_cudnns_where_every_other_kernel_is_switched_off(tmp_path, others, fused):
    (tmp_path / "script.py").write_text(CUDNN)
    recording = run_script(tmp_path / "script.py", others, steps=2).recording
    assert recording.refused is None, recording.refused
    kinds = {k.kind for e in recording.events if isinstance(e, Launch) for k in e.kernels}
    assert ("attention" in kinds) == ("attention_bwd" in kinds) == fused
    assert f"attention: {'cuDNN kernel' if fused else 'unfused'}" in recording.notes


FLEX = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

weight = torch.zeros(1, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
for _ in range(2):
    q, k, v = (torch.zeros(1, 4, 256, 64, device="cuda") * weight for _ in range(3))
    with torch.autocast("cuda", torch.bfloat16):
        out = torch.compile(flex_attention)(q, k, v.bfloat16(), block_mask=mask)
    out.float().sum().backward()
    optimizer.step()
"""


def test_flex_attention_runs_in_autocasts_type(tmp_path):
    (tmp_path / "script.py").write_text(FLEX)
    recording = run_script(tmp_path / "script.py", steps=2).recording
    assert recording.refused is None, recording.refused
    kernels = [k for e in recording.events if isinstance(e, Launch) for k in e.kernels]
    assert {k.dtype for k in kernels if k.kind.startswith("attention")} == {"bfloat16"}
