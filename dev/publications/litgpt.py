"""litgpt's resource table: LoRA (rank 8 on queries and values) of Llama 2 in bf16, 1304 tokens."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# args: size, micro-batch; published in GB of 1e9 bytes
PUBLISHED = {
    "source": "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md",
    "date": "2023-10",
    "role": "development",
    "class": "transformer, eager",
    "device": "a100-40",
    "rows": {
        "litgpt-lora-7b-1": {"args": "7b 1", "allocated_gib": 19.837},
        "litgpt-lora-7b-2": {"args": "7b 2", "allocated_gib": 27.074},
        "litgpt-lora-13b-1": {"args": "13b 1", "allocated_gib": 35.502},
    },
}
WIDTH, LAYERS, HEADS, HIDDEN = {"7b": (4096, 32, 32, 11008), "13b": (5120, 40, 40, 13824)}[sys.argv[1]]
BATCH, LENGTH, VOCAB, RANK, CHUNK = int(sys.argv[2]), 1304, 32000, 8, 128
HEAD = WIDTH // HEADS
torch.set_default_dtype(torch.bfloat16)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(torch.mean(y * y, dim=-1, keepdim=True) + 1e-5)
        return (self.weight * y).to(dtype=x.dtype)


class LoraQKV(nn.Module):
    """One projection for q, k and v, grouped by head; low-rank updates of q and v are copied into place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.lora_a, self.lora_b = (
            nn.Parameter(torch.zeros(2 * RANK, WIDTH)),
            nn.Parameter(torch.zeros(2 * WIDTH, RANK)),
        )
        columns = torch.arange(3 * WIDTH).view(HEADS, 3, HEAD)
        self.register_buffer(
            "columns", torch.cat((columns[:, 0].flatten(), columns[:, 2].flatten())), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        full = self.linear(x)
        low = F.linear(F.dropout(x, 0.05), self.lora_a).transpose(-2, -1)
        update = F.conv1d(low, self.lora_b.unsqueeze(-1), groups=2).transpose(-2, -1)
        placed = update.new_zeros((*x.shape[:-1], 3 * WIDTH)).view(-1, 3 * WIDTH)
        placed = placed.index_copy(1, self.columns, update.reshape(-1, 2 * WIDTH))  # type: ignore[arg-type]
        return full + placed.view(*x.shape[:-1], 3 * WIDTH) * (16 / RANK)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return ((x * cos) + (torch.cat((-b, a), dim=-1) * sin)).type_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2, self.qkv = Norm(), Norm(), LoraQKV()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, t, HEADS, 3, HEAD).permute(0, 2, 3, 1, 4)
        q, k, v = (part.reshape(b, -1, t, HEAD) for part in qkv.split((1, 1, 1), dim=2))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(y.transpose(1, 2).reshape(b, t, WIDTH)) + x
        h = self.norm_2(x)
        return self.down(F.silu(self.gate(h)) * self.up(h)) + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), Norm()

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return [self.head(part) for part in self.norm(x).split(CHUNK, dim=1)]


with torch.device("cuda"):
    model = Model()
    frequencies = 1.0 / 10_000 ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.outer(torch.arange(4096).float(), frequencies).repeat(1, 2)
    cos, sin = (a.bfloat16()[:LENGTH] for a in (angles.cos(), angles.sin()))
for name, p in model.named_parameters():
    p.requires_grad_("lora" in name)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01)
for _ in range(10):
    ids, targets = (torch.randint(0, VOCAB, (BATCH, LENGTH)).cuda() for _ in range(2))
    logits = model(ids, cos, sin)
    logits[-1] = logits[-1][..., :-1, :]
    wanted = targets[..., 1:].split(CHUNK, dim=1)
    losses = [
        F.cross_entropy(a.reshape(-1, VOCAB), b.reshape(-1), ignore_index=-1, reduction="none")
        for a, b in zip(logits, wanted, strict=True)
    ]
    loss = torch.cat(losses).mean()
    (loss / 1).backward()
    optimizer.step()
    optimizer.zero_grad()
