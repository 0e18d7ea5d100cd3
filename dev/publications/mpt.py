"""MPT of llm-foundry's benchmark table: FSDP over 8 ranks, flash attention, bf16, accumulated micro-batches.

Differences: FSDP2 in place of FSDP1, torch's cross entropy in place of flash-attn's fused one.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import random_init
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# args: size, sequence length, micro-batch, micro-batches per step, "checkpoint" or nothing
PUBLISHED = {
    "source": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "date": "2023-2024",
    "role": "development",
    "class": "transformer, eager",
    "ranks": 8,
    "rows": {
        "mpt-1b-2048-h100": {"args": "1b 2048 14 1", "device": "h100", "per_step": 28672, "per_s": 45455},
        "mpt-7b-2048-h100": {"args": "7b 2048 6 1", "device": "h100", "per_step": 12288, "per_s": 10643},
        "mpt-13b-2048-h100": {"args": "13b 2048 2 1", "device": "h100", "per_step": 4096, "per_s": 4792},
        "mpt-760m-2048-h100": {"args": "760m 2048 24 2", "device": "h100", "per_step": 98304, "per_s": 63147},
        "mpt-7b-8192-h100": {
            "args": "7b 8192 8 2 checkpoint",
            "device": "h100",
            "per_step": 131072,
            "per_s": 6935,
        },
        "mpt-1b-2048-a100": {"args": "1b 2048 14 4", "device": "a100", "per_step": 114688, "per_s": 20513},
        "mpt-7b-2048-a100": {"args": "7b 2048 6 2", "device": "a100", "per_step": 24576, "per_s": 4641},
        "mpt-3b-2048-a100": {"args": "3b 2048 10 2", "device": "a100", "per_step": 40960, "per_s": 10811},
        "mpt-350m-2048-a100": {
            "args": "350m 2048 32 2",
            "device": "a100",
            "per_step": 131072,
            "per_s": 58782,
        },
        "mpt-125m-8192-a100": {"args": "125m 8192 8 2", "device": "a100", "per_step": 131072, "per_s": 90392},
        "mpt-3b-512-a100": {"args": "3b 512 40 6", "device": "a100", "per_step": 122880, "per_s": 12127},
        "mpt-125m-16384-a100-40": {
            "role": "blind",
            "args": "125m 16384 2 3",
            "device": "a100-40",
            "per_step": 98304,
            "per_s": 55484,
        },
        "mpt-125m-512-a100-40": {
            "role": "blind",
            "args": "125m 512 104 3",
            "device": "a100-40",
            "per_step": 159744,
            "per_s": 156736,
        },
        "mpt-125m-2048-a100": {
            "role": "blind",
            "args": "125m 2048 40 2",
            "device": "a100",
            "per_step": 163840,
            "per_s": 142830,
        },
        "mpt-350m-2048-a100-40": {
            "role": "blind",
            "args": "350m 2048 16 4",
            "device": "a100-40",
            "per_step": 131072,
            "per_s": 55995,
        },
        "mpt-350m-4096-a100-40": {
            "role": "blind",
            "args": "350m 4096 8 4",
            "device": "a100-40",
            "per_step": 131072,
            "per_s": 46834,
        },
        "mpt-760m-512-a100-40": {
            "role": "blind",
            "args": "760m 512 48 4",
            "device": "a100-40",
            "per_step": 98304,
            "per_s": 34938,
        },
        "mpt-125m-32768-a100": {
            "role": "blind",
            "args": "125m 32768 2 2",
            "device": "a100",
            "per_step": 131072,
            "per_s": 36407,
        },
        "mpt-350m-32768-a100": {
            "role": "blind",
            "args": "350m 32768 2 2",
            "device": "a100",
            "per_step": 131072,
            "per_s": 13653,
        },
        "mpt-760m-2048-a100": {
            "role": "blind",
            "args": "760m 2048 24 2",
            "device": "a100",
            "per_step": 98304,
            "per_s": 32434,
        },
        "mpt-760m-16384-a100-40": {
            "role": "blind",
            "args": "760m 16384 1 4",
            "device": "a100-40",
            "per_step": 65536,
            "per_s": 13914,
        },
        "mpt-3b-512-a100-40": {
            "role": "blind",
            "args": "3b 512 20 8",
            "device": "a100-40",
            "per_step": 81920,
            "per_s": 11324,
        },
        "mpt-1b-2048-a100-40": {
            "role": "blind",
            "args": "1b 2048 8 8",
            "device": "a100-40",
            "per_step": 131072,
            "per_s": 19271,
        },
        "mpt-1b-4096-a100-40": {
            "role": "blind",
            "args": "1b 4096 4 8",
            "device": "a100-40",
            "per_step": 131072,
            "per_s": 16856,
        },
        "mpt-760m-16384-h100": {
            "role": "blind",
            "args": "760m 16384 3 2",
            "device": "h100",
            "per_step": 98304,
            "per_s": 27815,
        },
        "mpt-1b-4096-h100": {
            "role": "blind",
            "args": "1b 4096 7 4",
            "device": "h100",
            "per_step": 114688,
            "per_s": 38535,
        },
        "mpt-3b-16384-h100": {
            "role": "blind",
            "args": "3b 16384 1 6",
            "device": "h100",
            "per_step": 98304,
            "per_s": 11153,
        },
    },
}
SIZES = {  # width, heads, layers
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
}
WIDTH, HEADS, LAYERS = SIZES[sys.argv[1]]
LENGTH, MICRO, PARTS = (int(a) for a in sys.argv[2:5])
CHECKPOINT, VOCAB = sys.argv[5:] == ["checkpoint"], 50368


def low_precision_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        weight, bias = norm.weight.bfloat16(), norm.bias.bfloat16()
        return F.layer_norm(x.bfloat16(), norm.normalized_shape, weight, bias, norm.eps)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if CHECKPOINT else self.run(x)  # type: ignore[return-value]

    def run(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(low_precision_norm(self.norm_1, x)).chunk(3, dim=2)
        q, k, v = (a.view(b, t, HEADS, d // HEADS).transpose(1, 2) for a in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(low_precision_norm(self.norm_2, x))))


class MPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device="cuda").unsqueeze(0))
        for block in self.blocks:
            x = block(x)
        return F.linear(low_precision_norm(self.norm, x), self.wte.weight)


dist.init_process_group("nccl")
with torch.device("meta"):
    model = MPT()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
random_init(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.0)
for _ in range(10):
    batch = torch.randint(0, VOCAB, (MICRO * PARTS, LENGTH)).cuda()
    optimizer.zero_grad()
    for ids in batch.split(MICRO):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids)
            targets = torch.roll(ids, shifts=-1)
            targets[:, -1] = -100
            loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1)) / PARTS
        del logits
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
