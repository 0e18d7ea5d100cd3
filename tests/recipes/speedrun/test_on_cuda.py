"""The model on a rehearsed GPU: no wait inside a step, one graph, its kernels, no T x T tensor."""

from __future__ import annotations

import pytest
from rehearse.rehearsed import stub_or_skip

from leanstep.rehearse.events import HostWait, Launch, Request
from leanstep.rehearse.stage import rehearse

TOKENS = 4096
SCRIPT = f"""
from dataclasses import replace
import torch
from recipes.speedrun import train

shape = replace(train.TINY_SHAPE, dtype=torch.bfloat16)
model = train.GPT(train.Settings(float8_head=False), shape).to("cuda")
model.windows = (1, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    bounds = torch.arange(0, {TOKENS} + 1, (512, 1024, 2048)[step], dtype=torch.int32)
    bounds = torch.cat([bounds, bounds.new_full((128 - len(bounds),), {TOKENS})])
    tokens = torch.randint(512, ({TOKENS} + 1,), device="cuda")
    documents = model.documents(bounds, 2048)
    loss = model.loss(tokens[:-1], tokens[1:], tokens[1:], documents, (1.0, 0.5))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def rehearsed(tmp_path, text):
    """What was recorded of three steps, and the kernels of the last one, in which the host never waits."""
    stub_or_skip()
    script = tmp_path / "step.py"
    script.write_text(text)
    recording = rehearse(Request(str(script), device="h100"), quiet=True)
    assert recording.refused is None and len(recording.steps) == 3
    last = recording.steps[-1]
    events = recording.events[last.first : last.last]
    assert [event for event in events if isinstance(event, HostWait)] == []
    kernels = [kernel for event in events if isinstance(event, Launch) for kernel in event.kernels]
    return recording, kernels


def counted(kernels, *names):
    return [sum(k.name == name for k in kernels) for name in names]


@pytest.mark.timeout(240)
def test_a_step_waits_for_nothing_and_reaches_the_gpu_paths(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    recording, kernels = rehearsed(tmp_path, SCRIPT)
    # One graph each way, although every batch has other documents.
    assert len(recording.regions) == 2
    # FlashAttention 3 in three layers, both ways; relu² inside the products of four MLPs.
    assert [
        sum(k.kind == kind for k in kernels) for kind in ("attention_hopper", "attention_bwd_hopper")
    ] == [3, 3]
    assert counted(kernels, "flash_attn_3_varlen_func", "relu_product_kernel", "softcap_rows_kernel") == [
        6,
        8,
        1,
    ]
    # Gates read a dozen features and are narrow; every product of whole rows is aligned for tensor cores.
    products = [k for k in kernels if k.kind == "gemm" and k.flops >= 2 * TOKENS * 64 * 64]
    assert len(products) > 20 and {k.alignment for k in products} == {16}
    assert {k.dtype for k in kernels if k.kind == "gemm"} == {"bfloat16"}
    # Logits exist as a whole, in 16 bits; scores do not.
    assert max(s.nbytes for s in recording.storages.values() if s.category != "library") < TOKENS**2


@pytest.mark.timeout(240)
def test_a_head_may_have_8_bits(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    _, kernels = rehearsed(tmp_path, SCRIPT.replace("float8_head=False", "float8_head=True"))
    sizes = sorted(k.sizes[1:] for k in kernels if k.dtype == "float8")
    assert sizes == [(64, 512, TOKENS), (TOKENS, 64, 512), (TOKENS, 512, 64)]
