"""What a rehearsal once got wrong at a stranger's first script: each is a script and its figures."""

from __future__ import annotations

import pytest
import torch
from rehearse.rehearsed import run_text

from leanstep.rehearse.cuda_allocator import memory_of
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import Alloc, Event, Extrapolated, Free, Launch, Recording, Request, Storage
from leanstep.rehearse.what_if import aside_seconds, timed_step, update_step

H100 = device_named("h100")

LOOP = """\
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for i in range(8):
    model(torch.randn(256, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
EVALUATED = LOOP + (
    "    with torch.no_grad():\n"
    "        for _ in range(20):\n"
    "            model(torch.randn(256, 512, device='cuda')).mean().item()\n"
)


def test_an_evaluation_is_beside_the_step_and_not_in_it(tmp_path):
    plain, evaluated = (run_text(tmp_path, text).recording for text in (LOOP, EVALUATED))
    step = timed_step(evaluated, H100)
    assert step is not None
    times = [update_step(recording, H100) for recording in (plain, evaluated)]
    assert times[1].step_s == pytest.approx(times[0].step_s, rel=0.05)
    assert aside_seconds(evaluated, H100, step) > times[1].step_s
    assert aside_seconds(plain, H100, timed_step(plain, H100)) == 0.0


ACCUMULATED = """\
import torch
model = torch.nn.Linear(256, 256).cuda().bfloat16()
pairs = []
for p in model.parameters():
    p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    pairs.append((p, torch.nn.Parameter(p.detach().float())))
optimizer = torch.optim.AdamW([q for _, q in pairs])
for step in range(5):
    for micro in range(4):
        model(torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        for p in model.parameters():
            p.main_grad.add_(p.grad)
            p.grad = None
    for p, q in pairs:
        q.grad = p.main_grad
    optimizer.step()
"""


def test_accumulation_into_main_grad_is_one_step(tmp_path):
    recording = run_text(tmp_path, ACCUMULATED, steps=3).recording
    step = recording.steps[-1]
    products = [
        e
        for e in recording.events[step.first : step.last]
        if isinstance(e, Launch) and any(k.kind == "gemm" for k in e.kernels)
    ]
    assert len(products) == 4 * 2  # forward and the weight's gradient
    assert any(s.category == "optimizer state" for s in recording.storages.values())


PRECISION = """\
import torch
{setting}
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch 2.9 and later")
@pytest.mark.parametrize(
    ("setting", "dtype"),
    [
        ('torch.backends.fp32_precision = "tf32"', "tf32"),
        ('torch.backends.cuda.matmul.fp32_precision = "tf32"', "tf32"),
        ('torch.backends.fp32_precision = "ieee"', "float32"),
    ],
)
def test_the_precision_of_float32_products(tmp_path, setting, dtype):
    recording = run_text(tmp_path, PRECISION.format(setting=setting)).recording
    assert recording.refused is None
    kernels = [k for e in recording.events if isinstance(e, Launch) for k in e.kernels]
    assert {k.dtype for k in kernels if k.kind == "gemm"} == {dtype}


CACHE = """\
import torch
class LM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = torch.nn.Embedding(512, 64), torch.nn.Linear(64, 512)
    def forward(self, x, cache=None):
        h = self.e(x)
        if cache is not None:
            k = h if cache[0] is None else torch.cat([cache[0][0], h], 1)
            cache[0] = (k, k)
            h = torch.softmax(h @ k.transpose(1, 2), -1) @ k
        return self.h(h)
model = LM().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    with torch.no_grad():
        cache, x = [None], torch.randint(512, (4, 8), device="cuda")
        logits = model(x, cache)[:, -1]
        for _ in range(24):
            logits = model(torch.multinomial(logits.softmax(-1), 1), cache)[:, -1]
    assert cache[0][0].shape == (4, 32, 64) and cache[0][0] is cache[0][1]
    model(x).mean().backward()
    optimizer.step()
"""


def test_a_cache_of_tuples_grows(tmp_path):
    recording = run_text(tmp_path, CACHE).recording
    assert recording.refused is None and len(recording.steps) == 3
    assert any(isinstance(e, Extrapolated) for e in recording.events)


REENTRANT = """\
import torch
from torch.utils.checkpoint import checkpoint
frozen = torch.nn.Linear(64, 64).cuda().bfloat16().requires_grad_(False)
low = torch.nn.Parameter(torch.zeros(64, 64, device="cuda"))
optimizer = torch.optim.SGD([low], lr=0.1)

def block(x):
    h = x.float()
    h = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    return x + (frozen(h) + (h.float() @ low).bfloat16())

for i in range(3):
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        x = checkpoint(block, x, use_reentrant=True)
    x.sum().backward()
    optimizer.step()
"""


def test_a_reentrant_checkpoint_recomputes_the_programs_own_additions(tmp_path):
    recording = run_text(tmp_path, REENTRANT).recording
    assert recording.refused is None and len(recording.steps) == 3
    # Its forward has no gradients, and still belongs to the update.
    assert aside_seconds(recording, H100, recording.steps[-1]) == 0.0


TRITON = """\
import torch, triton, triton.language as tl

@triton.jit
def place(pid, rows, SIZE: tl.constexpr):
    across = tl.cdiv(rows, SIZE)
    return pid // across, pid % across

@triton.jit
def lower_product(x_ptr, out_ptr, rows, inner, SIZE: tl.constexpr, STEP: tl.constexpr):
    i, j = place(tl.program_id(0), rows, SIZE)
    if i < j:
        return
    at, to, along = i * SIZE + tl.arange(0, SIZE), j * SIZE + tl.arange(0, SIZE), tl.arange(0, STEP)
    left = x_ptr + at[:, None] * inner + along[None, :]
    right = x_ptr + along[:, None] + to[None, :] * inner
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for k in tl.range(0, tl.cdiv(inner, STEP)):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += STEP
        right += STEP
    tl.store(out_ptr + at[:, None] * rows + to[None, :], total)

x = torch.randn(1024, 2048, device="cuda", dtype=torch.bfloat16)
out = torch.empty(1024, 1024, device="cuda")
w = torch.nn.Parameter(torch.zeros(8, device="cuda"))
optimizer = torch.optim.SGD([w], lr=0.1)
for i in range(3):
    lower_product[(64,)](x, out, 1024, 2048, SIZE=128, STEP=64)
    (w * 2).sum().backward()
    optimizer.step()
"""


def test_products_of_a_triton_kernel_are_read_from_its_source(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    recording = run_text(tmp_path, TRITON).recording
    kernels = [k for e in recording.events if isinstance(e, Launch) for k in e.kernels]
    (flops,) = {k.flops for k in kernels if k.name == "lower_product"}
    assert flops == pytest.approx(36 * 2 * 128 * 128 * 2048, rel=0.1)  # 36 of 64 tiles


FLASH = """\
import torch
from flash_attn import flash_attn_func
layer = torch.nn.Linear({size}, {size}).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for i in range(3):
    q = layer(torch.randn(2, 128, 4, {size}, device="cuda")).to(torch.{dtype})
    flash_attn_func(q, q, q, causal=True).float().sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("size", "dtype", "device", "said"),
    [
        (64, "float32", "a100", "FlashAttention only support fp16 and bf16 data type, got float32"),
        (512, "bfloat16", "a100", "FlashAttention forward only supports head dimension at most 256, got 512"),
        (64, "float16", "t4", "FlashAttention only supports Ampere GPUs or newer."),
    ],
)
def test_a_stand_in_refuses_what_the_library_refuses(tmp_path, size, dtype, device, said):
    text = FLASH.format(size=size, dtype=dtype)
    assert run_text(tmp_path, text, device=device).recording.refused.reason.endswith(said)


LOADED = """\
import torch
from torch.utils.data import DataLoader
data = [torch.zeros(64 if i != 39 else 4096, 256) for i in range(60)]
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(data, batch_size=1):
    model(x.cuda()).square().mean().backward()
    optimizer.step()
"""


def test_a_longer_batch_ahead_is_announced(tmp_path):
    got = run_text(tmp_path, LOADED).recording.batches
    assert got == (
        "batches: 3 seen, all of 16,384 elements; batch 40 has 1,048,576, 64.0 times the largest seen: "
        "expect more memory than predicted here"
    )


def test_batches_of_texts_have_no_size(tmp_path):
    texts = LOADED.replace("DataLoader(data, batch_size=1):", 'DataLoader(["a", "b", "c", "d"]):')
    texts = texts.replace("model(x.cuda())", 'model(torch.zeros(4, 256, device="cuda"))')
    assert run_text(tmp_path, texts).recording.batches == ""


FORCED = """\
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for dtype in (torch.bfloat16, torch.float32):
    q = layer(torch.randn(2, 4, 128, 64, device="cuda")).to(dtype)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(q, q, q).float().sum().backward()
    optimizer.step()
"""


def test_a_kernel_that_torch_was_told_to_use_must_take_the_call(tmp_path):
    recording = run_text(tmp_path, FORCED).recording
    assert len(recording.steps) == 1 and "No available kernel" in recording.refused.reason


PADDED = """\
import torch
from leanstep import masked_token_logprobs
torch.set_default_device("cuda")
head = torch.nn.Linear(32, 256, bias=False)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(4):
    tokens = torch.randint(0, 256, (4, 16))
    mask = torch.tensor([[False] * 8 + [True] * 8] * 4)
    hidden = torch.randn(4, 16, 32)
    for chosen in (mask, None):
        masked_token_logprobs(hidden, head, tokens, chosen).sum().backward()
    optimizer.step()
"""


def test_the_default_device_is_not_where_the_host_counts_a_padded_batch(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    recording = run_text(tmp_path, PADDED).recording
    assert recording.refused is None and len(recording.steps) == 3


BY_HAND = LOOP.replace("    optimizer.step()\n", "").replace(
    "    optimizer.zero_grad()\n",
    "    with torch.no_grad():\n"
    "        for p in model.parameters():\n"
    "            p -= 0.1 * p.grad\n"
    "            p.grad = None\n",
)


def test_an_update_by_hand_counts_only_without_an_optimizer(tmp_path):
    by_hand = BY_HAND.replace("optimizer = torch.optim.AdamW(model.parameters())\n", "")
    assert len(run_text(tmp_path, by_hand).recording.steps) == 3
    assert len(run_text(tmp_path, BY_HAND).recording.steps) == 0


CONFIG_ONLY = """\
import pathlib, tempfile, torch
from transformers import AutoModelForCausalLM, LlamaConfig
folder = pathlib.Path(tempfile.mkdtemp()) / "llama"
LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=512,
            architectures=["LlamaForCausalLM"]).save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
assert model.name_or_path == model.config.name_or_path == str(folder)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    x = torch.randint(512, (2, 16), device="cuda")
    model(x, labels=x).loss.backward()
    optimizer.step()
"""


def test_a_folder_with_a_config_and_no_weights_is_a_model(tmp_path):
    pytest.importorskip("transformers")
    recording = run_text(tmp_path, CONFIG_ONLY).recording
    assert recording.refused is None and len(recording.steps) == 3
    assert any(note.startswith("from_pretrained: no weights in llama") for note in recording.notes)


SETTINGS = """\
import torch
torch.cuda.memory._set_allocator_settings("expandable_segments:True")
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in range(1000, 41000, 4000):
    model(torch.randn(rows, 256, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_allocator_settings_by_call_and_growing_batches(tmp_path):
    """With expandable segments, reserved memory follows the largest batch, not the sum of all."""
    reserved = []
    for text in (SETTINGS, SETTINGS.replace("expandable_segments:True", "")):
        recording = run_text(tmp_path, text, steps=10).recording
        memory = memory_of(recording, H100.memory_bytes, H100.context_bytes, points=1)
        reserved.append(memory.reserved / memory.allocated)
    assert reserved[0] < 1.2 and reserved[1] > 1.4


def test_the_setting_that_makes_it_fit_is_named():
    mib = 2**20
    events, storages = [], {}
    for number, size in enumerate((300, 400, 500)):
        storages[number] = Storage(number, size * mib, (size,), "uint8", None, "forward", 0)
        events += [Alloc(number, size * mib, None, "forward", 0), Free(number, 0)]
        storages[10 + number] = Storage(10 + number, mib, (1,), "uint8", None, "forward", 0)
        events.append(Alloc(10 + number, mib, None, "forward", 0))
    # A block of each freed segment stays in use, so that none can be returned.
    blockers = [(20 + n, 2 * mib) for n in range(3)]
    kept: list[Event] = []
    for event in events:
        kept.append(event)
        if isinstance(event, Free):
            number, size = blockers[event.storage]
            storages[number] = Storage(number, size, (1,), "uint8", None, "forward", 0)
            kept.append(Alloc(number, size, None, "forward", 0))
    recording = Recording(Request("x"), "2.13.0", kept, storages)
    memory = memory_of(recording, 700 * mib, 0, points=1)
    assert not memory.fits and memory.advice == "PYTORCH_ALLOC_CONF=expandable_segments:True makes it fit"
