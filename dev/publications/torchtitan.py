"""torchtitan's Llama 3.1 8B on 8 H100s: FSDP2, 2 x 8192 tokens per GPU, selective checkpointing.

As in its commit 9dec370, which the figures name, AdamW is not fused (`optimizer.fused` is off) and the loss
is not compiled (that line of train.py is commented out).
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, complex_rotary, every_second_product, random_init
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# args: eager or compile
PUBLISHED = {
    "source": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "date": "2024-12",
    "role": "development",
    "device": "h100-96",
    "machine": "grand-teton",
    "ranks": 8,
    "per_step": 16384,
    "rows": {
        "torchtitan-8b-eager": {
            "args": "eager",
            "class": "transformer, eager",
            "per_s": 5762,
            "reserved_gib": 82.4,
        },
        "torchtitan-8b-compile": {
            "args": "compile",
            "class": "transformer, compiled",
            "per_s": 6667,
            "reserved_gib": 77.0,
        },
    },
}
WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB, LENGTH, BATCH = 4096, 32, 32, 8, 14336, 128256, 8192, 2


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, turn: Tensor):
        return checkpoint(
            self.inner,
            x,
            turn,
            use_reentrant=False,
            context_fn=every_second_product,
            preserve_rng_state=False,
        )


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


compiled = sys.argv[1] == "compile"
dist.init_process_group("nccl")
with torch.device("meta"):
    model = Llama(WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for index, block in enumerate(model.blocks):
    wrapped = Checkpointed(block)
    model.blocks[index] = torch.compile(wrapped, fullgraph=True) if compiled else wrapped  # type: ignore[assignment]
    fully_shard(model.blocks[index], mp_policy=policy, reshard_after_forward=index < LAYERS - 1)
fully_shard(model, mp_policy=policy)
random_init(model)
turn = complex_rotary(LENGTH, WIDTH // HEADS)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
for _ in range(10):
    ids, targets = (torch.randint(0, VOCAB, (BATCH, LENGTH)).cuda() for _ in range(2))
    optimizer.zero_grad()
    logits = model(ids, turn)
    loss = loss_of(logits, targets)
    del logits
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
