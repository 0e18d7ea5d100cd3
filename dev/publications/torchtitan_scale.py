"""torchtitan's Llama 2 and 3 on many nodes: FSDP2, with tensor parallel inside nodes or without.

Tensor parallel is Megatron's, by hand: activations between blocks are cut along the sequence, gathered before
products that are cut by columns, summed and cut again after those that are cut by rows. torchtitan says the
same with DTensor: the collectives and the kernels are the same.
"""

import sys

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, complex_rotary, every_second_product, random_init
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# The A100s are taken for AWS p4de: torchtitan's launcher of that time is "optimized for AWS with EFA" and
# names the A100. These rows count as development: the machine was looked up after a first prediction.
# args: model, checkpointing (none, op, full, or every n-th layer), then options name=value: batch, length,
# tensor (degree), norm (torch's fused one), compile=1, async=1, float8=1, late=1 (torchtitan of 2025: AdamW
# is fused, the loss is compiled)
PUBLISHED = {
    "source": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "date": "2024-12",
    "role": "blind",
    "device": "h100-96",
    "machine": "grand-teton",
    "class": "transformer, eager",
    "rows": {
        "torchtitan-8b-128-eager": {
            "args": "8b op batch=2",
            "ranks": 128,
            "per_step": 16384,
            "per_s": 5605,
            "reserved_gib": 67.0,
        },
        "torchtitan-8b-128-compile": {
            "args": "8b op batch=2 compile=1",
            "class": "transformer, compiled",
            "ranks": 128,
            "per_step": 16384,
            "per_s": 6514,
            "reserved_gib": 62.0,
        },
        "torchtitan-8b-8-float8": {
            "args": "8b op batch=2 compile=1 float8=1",
            "class": "transformer, compiled",
            "ranks": 8,
            "per_step": 16384,
            "per_s": 8532,
            "reserved_gib": 76.8,
        },
        "torchtitan-8b-128-float8": {
            "args": "8b op batch=2 compile=1 float8=1",
            "class": "transformer, compiled",
            "ranks": 128,
            "per_step": 16384,
            "per_s": 8380,
            "reserved_gib": 61.8,
        },
        "torchtitan-8b-32-h200-float8": {
            "source": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
            "date": "2025-06",
            "device": "h200",
            "machine": "hgx-h200",
            "args": "8b op batch=2 compile=1 float8=1 late=1",
            "class": "transformer, compiled",
            "note": "the published run gathers weights in float8, this one in bfloat16",
            "ranks": 32,
            "per_step": 16384,
            "per_s": 10938,
        },
        "torchtitan-8b-64-tp8-compile": {
            "source": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
            "date": "2025-06",
            "args": "8b op batch=12 tensor=8 compile=1 late=1",
            "class": "transformer, compiled",
            "ranks": 64,
            "per_step": 12288,
            "per_s": 4378,
        },
        "torchtitan-70b-256-tp8-compile": {
            "source": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
            "date": "2025-06",
            "args": "70b full batch=16 tensor=8 compile=1 late=1",
            "class": "transformer, compiled",
            "ranks": 256,
            "per_step": 16384,
            "per_s": 597.3,
        },
        "torchtitan-8b-64-async": {
            "source": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
            "date": "2025-06",
            "role": "development",
            "args": "8b op batch=12 tensor=8 compile=1 late=1 async=1",
            "class": "transformer, compiled",
            "ranks": 64,
            "per_step": 12288,
            "per_s": 4809.4,
        },
        "torchtitan-70b-256-async": {
            "source": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
            "date": "2025-06",
            "args": "70b full batch=16 tensor=8 compile=1 late=1 async=1",
            "class": "transformer, compiled",
            "ranks": 256,
            "per_step": 16384,
            "per_s": 652.4,
        },
        "torchtitan-405b-128-tp8": {
            "source": "https://github.com/pytorch/torchtitan/blob/v0.1.0/docs/performance.md",
            "date": "2024-08",
            "args": "405b full batch=2 tensor=8 compile=1",
            "class": "transformer, compiled",
            "ranks": 128,
            "per_step": 2048,
            "per_s": 109,
        },
        "torchtitan-8b-64-a100-layer": {
            "source": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
            "date": "2024-04",
            "role": "development",
            "device": "a100",
            "machine": "p4de",
            "args": "8b 2 norm=torch",
            "ranks": 64,
            "per_step": 8192,
            "per_s": 2904,
        },
        "torchtitan-8b-64-a100-op": {
            "source": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
            "date": "2024-04",
            "role": "development",
            "device": "a100",
            "machine": "p4de",
            "args": "8b op norm=torch",
            "ranks": 64,
            "per_step": 8192,
            "per_s": 2973,
        },
        "torchtitan-70b-64-a100-full": {
            "source": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
            "date": "2024-04",
            "role": "development",
            "device": "a100",
            "machine": "p4de",
            "args": "70b full",
            "ranks": 64,
            "per_step": 8192,
            "per_s": 331,
        },
        "torchtitan-llama2-13b-64-a100-none": {
            "source": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
            "date": "2024-04",
            "role": "development",
            "device": "a100",
            "machine": "p4de",
            "args": "llama2-13b none batch=2 length=4096 norm=torch",
            "ranks": 64,
            "per_step": 8192,
            "per_s": 2162,
        },
        "torchtitan-llama2-13b-64-a100-layer": {
            "source": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
            "date": "2024-04",
            "role": "development",
            "device": "a100",
            "machine": "p4de",
            "args": "llama2-13b 2 batch=2 length=4096 norm=torch",
            "ranks": 64,
            "per_step": 8192,
            "per_s": 1914,
        },
        "torchtitan-llama2-13b-64-a100-op": {
            "source": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
            "date": "2024-04",
            "role": "development",
            "device": "a100",
            "machine": "p4de",
            "args": "llama2-13b op batch=2 length=4096 norm=torch",
            "ranks": 64,
            "per_step": 8192,
            "per_s": 1904,
        },
        "torchtitan-llama2-70b-64-a100-op": {
            "source": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
            "date": "2024-04",
            "role": "development",
            "device": "a100",
            "machine": "p4de",
            "args": "llama2-70b op batch=1 length=4096",
            "ranks": 64,
            "per_step": 4096,
            "per_s": 355,
        },
        "torchtitan-llama2-70b-64-a100-full": {
            "source": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
            "date": "2024-04",
            "role": "development",
            "device": "a100",
            "machine": "p4de",
            "args": "llama2-70b full batch=2 length=4096",
            "ranks": 64,
            "per_step": 8192,
            "per_s": 353,
        },
    },
}
MODELS = {  # width, layers, heads, heads of keys, hidden, vocabulary
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "70b": (8192, 80, 64, 8, 28672, 128256),
    "405b": (16384, 126, 128, 8, 53248, 128256),
    "llama2-13b": (5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": (8192, 80, 64, 8, 28672, 32000),
}
OPTIONS = dict(option.split("=") for option in sys.argv[3:])
BATCH, LENGTH, TENSOR = (int(OPTIONS.get(n, d)) for n, d in (("batch", 1), ("length", 8192), ("tensor", 1)))
WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB = MODELS[sys.argv[1]]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, by_op: bool):
        super().__init__()
        self.inner, self.options = inner, {"context_fn": every_second_product} if by_op else {}

    def forward(self, x: Tensor, turn: Tensor):
        return checkpoint(self.inner, x, turn, use_reentrant=False, preserve_rng_state=False, **self.options)


def to_float8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """One scale for the whole tensor, from its largest value."""
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


def product8(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], fast: bool = False) -> Tensor:
    """Rows of `a` with rows of `b`."""
    return torch._scaled_mm(
        a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class Product8(torch.autograd.Function):
    """x @ weight.T in float8, its gradients too."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product8(to_float8(x), to_float8(weight), fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        g, gs = to_float8(grad, torch.float8_e5m2)
        w, ws = to_float8(weight)
        y, ys = to_float8(x)
        d_x = product8((g, gs), (w.t().contiguous(), ws))
        return d_x, product8((g.t().contiguous(), gs), (y.t().contiguous(), ys))


class Linear8(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return Product8.apply(input.flatten(0, -2), self.weight).unflatten(0, input.shape[:-1])


class Parallel(nn.Module):
    """A part that is cut over the ranks of a node. What comes in or goes out is cut along the sequence."""

    def __init__(self, inner: nn.Module, gathers: bool = True, sums: bool = True):
        super().__init__()
        self.inner, self.gathers, self.sums = inner, gathers, sums

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = all_gather_tensor_autograd(x, 1, tensor_mesh) if self.gathers else x
        y = self.inner(x, *more)
        return reduce_scatter_tensor_autograd(y, "sum", 1, tensor_mesh) if self.sums else y


def cut(model: Llama) -> None:
    """One rank's part: columns of the first products, rows of the last, words of the vocabulary."""

    def shorten(part: nn.Module, dim: int) -> None:
        sizes = list(part.weight.shape)
        sizes[dim] //= TENSOR
        part.weight = nn.Parameter(torch.empty(sizes))

    for block in model.blocks:
        attention, mlp = block.attention, block.feed_forward
        for linear in (attention.wq, attention.wk, attention.wv, mlp.w1, mlp.w3):
            shorten(linear, 0)
        for linear in (attention.wo, mlp.w2):
            shorten(linear, 1)
        block.attention, block.feed_forward = Parallel(attention), Parallel(mlp)
    shorten(model.embedding, 0)
    shorten(model.head, 0)
    model.embedding, model.head = Parallel(model.embedding, gathers=False), Parallel(model.head, sums=False)


def build() -> nn.Module:
    with torch.device("meta"):
        model = Llama(WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB)
        if "norm" in OPTIONS:
            for block in model.blocks:
                block.attention_norm, block.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            model.norm = nn.RMSNorm(WIDTH)
        if "float8" in OPTIONS:
            for part in model.blocks.modules():
                if isinstance(part, nn.Linear):
                    part.__class__ = Linear8
        if TENSOR > 1:
            cut(model)
    return model


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def parallel_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The same with a part of the vocabulary on each rank: the largest logit and the sums are exchanged."""
    logits = logits.flatten(0, 1).float()
    largest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=tensor_mesh.get_group())
    logits = logits - largest
    total = logits.exp().sum(-1)
    dist.all_reduce(total.detach(), group=tensor_mesh.get_group())
    picked = logits.gather(-1, targets.flatten().unsqueeze(-1)).squeeze(-1)
    return (total.log() - picked).mean()


dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("data", "tensor"))
tensor_mesh = mesh["tensor"]
if "async" in OPTIONS:
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(tensor_mesh.get_group().group_name)
model, checkpointing = build(), sys.argv[2]
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for index, block in enumerate(model.blocks):
    wanted = checkpointing in ("op", "full") or (checkpointing.isdigit() and index % int(checkpointing) == 0)
    wrapped = Checkpointed(block, by_op=checkpointing == "op") if wanted else block
    model.blocks[index] = torch.compile(wrapped, fullgraph=True) if "compile" in OPTIONS else wrapped
    fully_shard(
        model.blocks[index], mesh=mesh["data"], mp_policy=policy, reshard_after_forward=index < LAYERS - 1
    )
fully_shard(model, mesh=mesh["data"], mp_policy=policy)
random_init(model)
turn = complex_rotary(LENGTH, WIDTH // HEADS)
late = "late" in OPTIONS
how = {"fused": True} if late else {"foreach": True}
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **how)
loss_of = torch.compile(loss_of) if late else loss_of
for _ in range(10):
    # With tensor parallel, words of this rank's part of the vocabulary.
    ids, targets = (torch.randint(0, VOCAB // TENSOR, (BATCH, LENGTH)).cuda() for _ in range(2))
    optimizer.zero_grad()
    logits = model(ids, turn)
    loss = loss_of(logits, targets) if TENSOR == 1 else parallel_loss(logits, targets)
    del logits
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
