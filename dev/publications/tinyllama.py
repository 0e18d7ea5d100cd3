"""TinyLlama 1.1B on 16 A100-40G: eight micro-batches of 8 x 2048 tokens per GPU and step.

Differences: torch.compile for its fused kernels (norm, SwiGLU, rotary, cross entropy), FSDP2 for FSDP1.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, complex_rotary, random_init
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

PUBLISHED = {
    "source": "https://github.com/jzhang38/TinyLlama",
    "date": "2023-09",
    "role": "development",
    "class": "transformer, compiled",
    "rows": {"tinyllama": {"device": "a100-40", "ranks": 16, "per_step": 131072, "per_s": 24000}},
}
WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB, LENGTH = 2048, 22, 32, 4, 5632, 32000, 2048
MICRO, PARTS = 8, 8


@torch.compile
def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.view(-1))


dist.init_process_group("nccl")
with torch.device("meta"):
    model = Llama(WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
for block in model.blocks:
    block.compile()
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
random_init(model)
turn = complex_rotary(LENGTH, WIDTH // HEADS, 10_000.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1)
for _ in range(10):
    for part in range(PARTS):
        ids = torch.randint(0, VOCAB, (MICRO, LENGTH + 1)).cuda()
        model.set_requires_gradient_sync(part == PARTS - 1)
        logits = model(ids[:, :-1].contiguous(), turn)
        loss = loss_of(logits, ids[:, 1:].contiguous())
        del logits
        (loss / PARTS).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
