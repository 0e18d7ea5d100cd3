"""Small training loops whose peak of live bytes is known on the CPU: real tensors there, fake ones on `cuda`.

truth.py cpu|cuda [trainers]: prints {variant: peak bytes, storages rounded up to 512} as one line of JSON.
"""

import gc
import json
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

DEVICE = sys.argv[1]


class Block(nn.Module):
    def __init__(self, d, heads, fused):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.heads, self.fused = heads, fused

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(d, -1)
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            y = F.softmax((q @ k.transpose(-2, -1) * 0.125).masked_fill(mask, float("-inf")), -1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def train(optimizer, *, fused=True, tied=False, recompute=None, scaler=False, clip=False, accumulate=1):
    torch.manual_seed(0)
    d, vocab = 128, 3000
    embedding, head = nn.Embedding(vocab, d).to(DEVICE), nn.Linear(d, vocab, bias=False).to(DEVICE)
    body = nn.ModuleList(Block(d, 4, fused) for _ in range(2)).to(DEVICE)
    if tied:
        head.weight = embedding.weight
    params = list({id(p): p for m in (embedding, body, head) for p in m.parameters()}.values())
    update = optimizer(params)
    scale = torch.amp.GradScaler(DEVICE) if scaler else None
    for _ in range(2):
        for _ in range(accumulate):
            x = torch.randint(0, vocab, (4, 128)).to(DEVICE)
            h = embedding(x)
            for block in body:
                if recompute is None:
                    h = block(h)
                else:
                    h = checkpoint(block, h, use_reentrant=recompute)
            loss = F.cross_entropy(head(h).view(-1, vocab), x.view(-1))
            (loss if scale is None else scale.scale(loss)).backward()
            del loss, h
        if clip:
            nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        if scale is None:
            update.step()
        else:
            scale.step(update)
            scale.update()
        update.zero_grad(set_to_none=True)


def adamw(**options):
    return lambda params: torch.optim.AdamW(params, lr=1e-3, **options)


class Muon(torch.optim.Optimizer):
    """NorMuon's reference update of every matrix, SGD for the rest: the same calls on both devices."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.dim() != 2:
                p.add_(p.grad, alpha=-1e-3)
                continue
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
                state["variance"] = torch.zeros(p.shape[0], 1, device=p.device)
            state["momentum"].lerp_(p.grad, 0.05)
            x = p.grad.lerp(state["momentum"], 0.95)
            x = x / (x.norm() + 1e-7)
            wide = x.shape[0] > x.shape[1]
            x = x.mT if wide else x
            for _ in range(2):
                a = x @ x.mT
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            x = x.mT if wide else x
            state["variance"].lerp_(x.square().mean(-1, keepdim=True), 0.05)
            p.sub_(x / (state["variance"].sqrt() + 1e-8), alpha=1e-3)


VARIANTS = {
    "fused attention": lambda: train(adamw(fused=True)),
    "unfused attention": lambda: train(adamw(fused=True), fused=False),
    "tied weights": lambda: train(adamw(fused=True), tied=True, clip=True),
    "checkpointing": lambda: train(adamw(fused=True), recompute=False),
    "reentrant checkpointing": lambda: train(adamw(fused=True), recompute=True),
    "grad scaler": lambda: train(adamw(fused=True), scaler=True),
    "foreach": lambda: train(adamw(foreach=True), clip=True),
    "per tensor": lambda: train(adamw(foreach=False)),
    "accumulation": lambda: train(
        lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9, foreach=True), accumulate=2
    ),
    "normuon": lambda: train(Muon),
    "logits read twice, gather": lambda: read_twice(by_rows=False),
    "logits read twice, rows": lambda: read_twice(by_rows=True),
}


def read_twice(*, by_rows):
    """Logits that two terms of a loss read: autograd adds their gradients in place."""
    torch.manual_seed(0)
    hidden = torch.randn(512, 64).to(DEVICE).requires_grad_()
    weight = torch.randn(3000, 64).to(DEVICE).requires_grad_()
    scale, picked = torch.randn(3000).to(DEVICE), (torch.arange(256) * 2).to(DEVICE)
    for _ in range(2):
        logits = hidden @ weight.t()
        scaled = (logits * scale).sum()
        if by_rows:
            chosen = logits.index_select(0, picked)
        else:
            chosen = logits.gather(1, picked[None].expand(512, -1))
        del logits
        chosen = chosen.sum()
        (scaled + chosen).backward()
        hidden.grad = weight.grad = None


def real_peak(run):
    """Peak of the CPU allocator's live bytes, each allocation rounded up to 512."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
        gc.collect()
    now = top = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            size = event.nbytes()
            now += -(-abs(size) // 512) * 512 * (1 if size > 0 else -1)
            top = max(top, now)
    return top


def fake_peak(run):
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    if DEVICE == "cuda":  # the workspaces of the first products, which the host does not have
        one = torch.ones(2, 2, device="cuda", requires_grad=True)
        (one @ one).sum().backward()
        del one
    if "trainers" in sys.argv:
        import truth_trainers

        VARIANTS |= truth_trainers.VARIANTS
    peak = real_peak if DEVICE == "cpu" else fake_peak
    print(json.dumps({name: peak(run) for name, run in VARIANTS.items()}))
