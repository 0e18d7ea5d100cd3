"""nanochat's d20 of October 2025 on 8 A100s: 32 x 2048 tokens per rank, compiled, Muon and AdamW."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

PUBLISHED = {
    "source": "https://github.com/karpathy/nanochat",
    "date": "2025-10",
    "role": "development",
    "class": "transformer, compiled",
    "device": "a100",
    "ranks": 8,
    "rows": {
        "nanochat-d20-a100": {
            "step_ms": 1177.6,
            "url": "https://github.com/nanochat-students/discussions/discussions/9",
            "note": "7 hours for 21,400 steps, evaluations included",
        }
    },
}
WIDTH, LAYERS, HEADS, VOCAB, LENGTH, BATCH = 1280, 20, 10, 65536, 2048, 32
LEARNING_RATE, MOMENTUM = 0.02, 0.95


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        h = norm(x)
        q, k, v = (layer(h).view(b, t, HEADS, d // HEADS) for layer in (self.q, self.k, self.v))
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.down(F.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, ids: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = norm(self.embedding(ids))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = (15 * torch.tanh(self.head(norm(x)) / 15)).float()
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)


@torch.compile
def newton_schulz(gradient: Tensor) -> Tensor:
    """Five quintic iterations towards the nearest orthogonal matrix, in bfloat16."""
    x = gradient.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.mT if tall else x


class ShardedMuon(torch.optim.Optimizer):
    """Reduce-scatter brings each rank the gradients of its matrices, all-gather shares their update."""

    def __init__(self, params):
        super().__init__(list(params), {"lr": LEARNING_RATE})

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        rank, world = dist.get_rank(), dist.get_world_size()
        params = self.param_groups[0]["params"]
        for shape in sorted({p.shape for p in params}):
            same = [p for p in params if p.shape == shape]
            for first in range(0, len(same), world):
                part = same[first : first + world]
                blank = [torch.zeros_like(part[0]) for _ in range(world - len(part))]
                own = part[rank] if rank < len(part) else None
                received = own.grad if own is not None else torch.empty_like(part[0])
                dist.reduce_scatter(received, [*(p.grad for p in part), *blank], op=dist.ReduceOp.AVG)
                if own is not None:
                    average = self.state[own].setdefault("momentum", torch.zeros_like(own))
                    average.lerp_(own.grad, 1 - MOMENTUM)
                    own.add_(newton_schulz(own.grad.lerp_(average, MOMENTUM)), alpha=-LEARNING_RATE)
                dist.all_gather([*part, *blank], part[min(rank, len(part) - 1)])


dist.init_process_group("nccl")
torch.set_float32_matmul_precision("high")
with torch.device("cuda"):
    model = GPT()
    frequencies = 1.0 / 10_000 ** (torch.arange(0, WIDTH // HEADS, 2).float() / (WIDTH // HEADS))
    angles = torch.outer(torch.arange(LENGTH).float(), frequencies)
model.embedding.to(torch.bfloat16)
cos, sin = (a.bfloat16()[None, :, None, :] for a in (angles.cos(), angles.sin()))
compiled = torch.compile(model, dynamic=False)
ends = [model.embedding.weight, model.head.weight]
muon, adam = (
    ShardedMuon(model.blocks.parameters()),
    torch.optim.AdamW(ends, lr=0.004, betas=(0.8, 0.95), fused=True),
)
for _ in range(10):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = compiled(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), cos, sin)
    loss.backward()
    for p in ends:
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
    muon.step()
    adam.step()
    model.zero_grad(set_to_none=True)
