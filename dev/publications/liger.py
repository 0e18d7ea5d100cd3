"""Eager kernels of Liger's benchmark table, same shapes and types, cache flushed before each call.

A label is "kernel size part"; "full" is forward and backward. args: the row's name.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from llama import RMSNorm, SwiGLU
from torch import Tensor, nn

PUBLISHED = {
    "source": "https://github.com/linkedin/Liger-Kernel/blob/main/benchmark/data/all_benchmark_data.csv",
    "date": "2024-2026",
    "role": "development",
    "sets": "RATES.stream of NVIDIA; the sustained rate of the 4090 and the 3090",
    "class": "kernels",
    "steps": 1000,
    "rows": {
        "liger-a100": {
            "args": "liger-a100",
            "device": "a100",
            "kernels_ms": {
                "cross_entropy 4096 forward": 0.8751,
                "cross_entropy 4096 full": 2.226,
                "cross_entropy 32768 full": 15.486,
                "cross_entropy 131072 forward": 20.7264,
                "cross_entropy 131072 full": 60.4383,
                "linear_cross_entropy 4096 forward": 20.9117,
                "linear_cross_entropy 16384 full": 220.7836,
                "geglu 1024 forward": 9.2574,
                "geglu 4096 full": 110.9772,
                "layer_norm 1024 forward": 0.0341,
                "layer_norm 4096 forward": 0.1218,
                "layer_norm 4096 full": 0.4314,
                "layer_norm 16384 full": 1.6213,
                "rms_norm 1024 forward": 0.0782,
                "rms_norm 4096 full": 1.0114,
                "rms_norm 32768 forward": 1.9191,
                "rms_norm 32768 full": 6.9104,
                "rope 512 forward": 0.0797,
                "rope 2048 full": 0.5289,
                "rope 8192 forward": 0.5168,
                "rope 8192 full": 1.133,
                "swiglu 1024 forward": 4.5823,
                "swiglu 8192 forward": 36.2911,
            },
        },
        "liger-h100": {
            "args": "liger-h100",
            "device": "h100",
            "kernels_ms": {
                "layer_norm 2048 forward": 0.0373,
                "layer_norm 8192 full": 0.4833,
                "linear_jsd 1024 forward": 9.5569,
                "linear_jsd 4096 full": 98.3151,
                "tvd 4096 forward": 0.7288,
                "tvd 32768 full": 17.2565,
                "relu_squared 256 forward": 0.0101,
                "relu_squared 2048 full": 0.0817,
                "add_rms_norm 1024 forward": 0.0455,
                "add_rms_norm 2048 full": 0.2819,
                "add_rms_norm 16384 full": 1.8744,
                "torch_rms_norm 1024 forward": 0.0128,
                "torch_rms_norm 16384 full": 0.7717,
                "silu_gate 4096 forward": 0.1976,
                "silu_gate 16384 full": 2.2963,
                "silu_gate 32768 full": 4.5732,
            },
        },
        "liger-b200": {
            "args": "liger-b200",
            "device": "b200",
            "kernels_ms": {
                "group_norm 32 forward": 0.0307,
                "group_norm 256 full": 0.3502,
                "group_norm 1024 full": 1.1777,
                "jsd_rows 1024 forward": 2.2901,
                "jsd_rows 4096 full": 24.146,
            },
        },
        "liger-h100-pcie": {
            "args": "liger-h100-pcie",
            "device": "h100-pcie",
            "kernels_ms": {
                "kl_div 4096 forward": 1.3299,
                "kl_div 65536 full": 46.0632,
                "jsd 4096 forward": 2.4745,
                "jsd 65536 full": 83.996,
            },
        },
        "liger-3090": {
            "args": "liger-3090",
            "device": "3090",
            "kernels_ms": {
                "softmax 128 forward": 0.0061,
                "softmax 1024 full": 0.042,
                "softmax 4096 forward": 0.0676,
                "softmax 4096 full": 0.1976,
            },
        },
        "liger-memory-a100": {
            "args": "liger-memory-a100",
            "device": "a100",
            "kernels_mib": {
                "cross_entropy 32768 full": 10240.126,
                "layer_norm 16384 full": 1280.5312,
                "rms_norm 32768 full": 2560.3828,
                "linear_cross_entropy 16384 full": 15302.376,
                "geglu 4096 full": 6372.25,
                "swiglu 2048 full": 1992.25,
                "swiglu 8192 full": 6372.25,
            },
        },
        "liger-memory-h100": {
            "args": "liger-memory-h100",
            "device": "h100",
            "kernels_mib": {
                "tvd 32768 full": 16384.0,
                "add_rms_norm 16384 full": 1664.3125,
                "torch_rms_norm 16384 full": 640.1104,
                "silu_gate 32768 full": 3584.001,
                "linear_jsd 4096 full": 30220.0176,
            },
        },
    },
}
BF16 = torch.bfloat16


class Work(NamedTuple):
    """forward: the call; leaves: their gradients are cleared; gradients: of the outputs, None for a loss."""

    forward: Callable[[], Any]
    leaves: tuple[Tensor, ...] = ()
    gradients: Any = None
    others: Any = None


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def cross_entropy(vocab: int) -> Work:
    logits, targets = leaf(16384, vocab), torch.randint(vocab, (16384,), device="cuda")
    return Work(lambda: F.cross_entropy(logits, targets))


def linear_cross_entropy(rows: int) -> Work:
    heads = [nn.Linear(4096, 128256, bias=False, dtype=BF16, device="cuda") for _ in range(2)]
    hidden, targets = leaf(rows, 4096, dtype=BF16), torch.randint(128256, (rows,), device="cuda")
    return Work(lambda: F.cross_entropy(heads[0](hidden), targets), others=heads)


class GeGLU(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


def gated(batch: int, length: int, kind: type[SwiGLU]) -> Work:
    mlp, x = kind(4096, 11008).to("cuda", BF16), leaf(batch, length, 4096, dtype=BF16)
    return Work(lambda: mlp(x), (x,), "random")


def geglu(length: int) -> Work:
    return gated(8, length, GeGLU)


def swiglu(length: int) -> Work:
    return gated(4, length, SwiGLU)


def normalised(x: Tensor, *norms: nn.Module) -> Work:
    first = norms[0]
    return Work(lambda: first(x), (x,), torch.randn_like(x), norms)


def layer_norm(width: int) -> Work:
    return normalised(leaf(4096, width), *(nn.LayerNorm(width, device="cuda") for _ in range(2)))


def rms_norm(width: int) -> Work:
    return normalised(leaf(2048, width, dtype=BF16), *(WeightedLast(width).cuda() for _ in range(2)))


class WeightedLast(RMSNorm):
    """Transformers' form: the result has the weight's type."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        y = x.float() if residual is None else x.float() + residual.float()
        normal = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        normal = self.weight * normal.to(x.dtype)
        return normal if residual is None else (normal, y.to(x.dtype))


def add_rms_norm(width: int) -> Work:
    norm, x, residual = WeightedLast(width).cuda(), leaf(2048, width), leaf(2048, width)
    gradients = tuple(torch.randn_like(x) for _ in range(2))
    return Work(lambda: norm(x, residual), (x, residual), gradients)


def torch_rms_norm(width: int) -> Work:
    norm, x = nn.RMSNorm(width, eps=1e-6, device="cuda", dtype=BF16), leaf(4096, 1, width, dtype=BF16)
    return Work(lambda: norm(x), (x,), "sum")


def silu_gate(width: int) -> Work:
    x = leaf(2048, 4, 2 * width, dtype=BF16)

    def forward() -> Tensor:
        gate, up = torch.chunk(x, 2, -1)
        return F.silu(gate) * up

    return Work(forward, (x,), "sum")


def rope(width: int) -> Work:
    head = width // 32
    q, k = (leaf(1, 2048, n, head, dtype=BF16).transpose(1, 2) for n in (32, 8))
    frequencies = 1.0 / 10_000 ** (torch.arange(0, head, 2, device="cuda").float() / head)
    angles = torch.outer(torch.arange(2048, device="cuda").float(), frequencies).repeat(1, 2)[None, None]
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., : head // 2], x[..., head // 2 :]
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    gradients = (torch.randn_like(q), torch.randn_like(k))
    return Work(lambda: (turned(q), turned(k)), (q, k), gradients)


def relu_squared(width: int) -> Work:
    x = leaf(4096, width, dtype=BF16)
    return Work(lambda: torch.square(F.relu(x)), (x,), "random")


def group_norm(channels: int) -> Work:
    return normalised(leaf(128, channels, 512), nn.GroupNorm(channels // 4, channels, device="cuda"))


def softmax(width: int) -> Work:
    x = leaf(2048, width, dtype=BF16)
    return Work(lambda: F.softmax(x, dim=-1), (x,), torch.randn_like(x))


def jensen_shannon(log_q: Tensor, log_p: Tensor) -> Tensor:
    log_p, log_q = log_p.to(torch.float), log_q.to(torch.float)
    log_m = torch.log(torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5))
    divergence = nn.KLDivLoss(reduction="none", log_target=True)
    loss = 0.5 * divergence(log_m, log_p).sum(-1) + 0.5 * divergence(log_m, log_q).sum(-1)
    return (loss / log_q.shape[0]).sum()


def jsd(vocab: int) -> Work:
    return jsd_of(8192, vocab)


def jsd_rows(rows: int) -> Work:
    return jsd_of(rows, 128256)


def jsd_of(rows: int, vocab: int) -> Work:
    student = leaf(rows, vocab).log_softmax(-1)
    teacher = torch.randn(rows, vocab, device="cuda").log_softmax(-1)
    return Work(lambda: jensen_shannon(student, teacher))


def linear_jsd(rows: int) -> Work:
    weights = [nn.Parameter(torch.rand(128256, 4096, device="cuda", dtype=BF16)) for _ in range(2)]
    student, teacher = leaf(rows, 4096, dtype=BF16), torch.rand(rows, 4096, device="cuda", dtype=BF16)

    def forward() -> Tensor:
        logits, wanted = F.linear(student, weights[0]), F.linear(teacher, weights[1])
        a, b = torch.log_softmax(logits / 1.0, dim=-1), torch.log_softmax(wanted / 1.0, dim=-1)
        return jensen_shannon(a, b).to(BF16)

    return Work(forward)


def kl_div(vocab: int) -> Work:
    student, teacher = (
        leaf(16384, vocab).log_softmax(-1),
        torch.randn(16384, vocab, device="cuda").softmax(-1),
    )
    loss = nn.KLDivLoss(reduction="batchmean")
    return Work(lambda: loss(student, teacher))


def tvd(vocab: int) -> Work:
    student, teacher = leaf(16384, vocab).softmax(-1), torch.randn(16384, vocab, device="cuda").softmax(-1)
    return Work(lambda: torch.sum(torch.abs(student - teacher) / 2.0) / student.size(0))


def clear(work: Work) -> None:
    for x in work.leaves:
        if x.is_leaf:
            x.grad = None


def backward(work: Work, out: Any) -> None:
    if isinstance(work.gradients, tuple) and work.leaves[0].is_leaf:
        torch.autograd.backward(out, work.gradients)
    elif isinstance(work.gradients, tuple):
        # Inputs of rope are views of leaves: their gradients are returned, not stored.
        torch.autograd.grad(out, work.leaves, work.gradients, retain_graph=True)
    elif isinstance(work.gradients, Tensor):
        out.backward(work.gradients)
    elif work.gradients == "sum":
        out.sum().backward()
    else:
        out.backward(torch.randn_like(out) if work.gradients else None, retain_graph=not work.leaves)


def call(work: Work, part: str) -> None:
    if work.gradients == "sum":
        clear(work)
    out = work.forward()
    if part == "full":
        backward(work, out)


pace = torch.optim.SGD([torch.zeros(1, device="cuda", requires_grad=True)], lr=0.0)
row = PUBLISHED["rows"][sys.argv[1]]
timed = "kernels_ms" in row
flushed = torch.empty(256 * 2**20 if timed else 1, dtype=torch.int8, device="cuda")
for label in row["kernels_ms" if timed else "kernels_mib"]:
    kernel, size, part = label.split()
    work = globals()[kernel](int(size))
    for _ in range(1 if timed else 2):
        call(work, part)
    if timed:
        clear(work)
        flushed.zero_()
    pace.step()
    call(work, part)
    pace.step()
    del work
