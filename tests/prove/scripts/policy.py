"""A tiny policy update in plain torch. `--variant NAME` changes it: honestly, or with a planted mistake."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--variant", default="")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--seed", type=int, default=5)
args = parser.parse_args()
V, D, B, T, TEMPERATURE = 61, 24, 4, 9, 0.8


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        # Registered out of order on purpose: the forward pass uses the embedding first.
        self.head = nn.Linear(D, V, bias=False)
        self.value = nn.Linear(D, 1)
        self.embed = nn.Embedding(V, D)
        self.query, self.key = nn.Linear(D, D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k = self.query(x), self.key(x)
        if args.variant == "fused-attention":
            x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None], is_causal=True)[:, 0]
        else:
            scores = (q @ k.transpose(1, 2)) / D**0.5
            hidden_ones = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
            x = x + scores.masked_fill(hidden_ones, float("-inf")).softmax(-1) @ x
        x = F.dropout(x, args.dropout, self.training)
        y = checkpoint(self.mlp, x, use_reentrant=False) if args.variant == "checkpoint" else self.mlp(x)
        return self.gain * (x + y)


def loss_fn(model, tokens, advantages, mask):
    hidden = model(tokens)[:, :-1]
    temperature = 1.0 if args.variant == "forgotten-temperature" else TEMPERATURE
    targets = tokens[:, :-1] if args.variant == "shifted-target" else tokens[:, 1:]
    if args.variant == "rows-first":
        rows = mask[:, 1:].bool()
        logits = (model.head(hidden[rows]) / temperature).float()
        logp_all = logits.log_softmax(-1)
        logp = logp_all.gather(-1, targets[rows][:, None])[:, 0]
        entropy = -(logp_all.exp() * logp_all).sum(-1)
        policy = -(logp * advantages[:, 1:][rows]).sum() / rows.sum()
        bonus = entropy.sum() / rows.sum()
    else:
        logits = (model.head(hidden) / temperature).float()
        if args.variant == "cross-entropy":
            nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            logp = -nll.view_as(targets)
            p = logits.softmax(-1)
            entropy = logits.logsumexp(-1) - (p * logits).sum(-1)
        else:
            logp_all = logits.log_softmax(-1)
            logp = logp_all.gather(-1, targets[..., None])[..., 0]
            entropy = -(logp_all.exp() * logp_all).sum(-1)
        weights = mask[:, 1:].float()
        mean = lambda x: (x * weights).sum() / weights.sum()  # noqa: E731
        if args.variant == "mean-of-means":
            mean = lambda x: ((x * weights).sum(1) / weights.sum(1)).mean()  # noqa: E731
        if args.variant == "dropped-entropy-gradient":
            entropy = entropy.detach()
        policy, bonus = -mean(logp * advantages[:, 1:]), mean(entropy)
    values = model.value(hidden)[..., 0]
    if args.variant == "detached-term":
        values = model.value(hidden.detach())[..., 0]
    return policy - 0.1 * bonus + 0.5 * (values.float() - advantages[:, :-1]).square().mean()


torch.manual_seed(args.seed)
model = Policy().to(getattr(torch, args.dtype))
rest = [p for name, p in model.named_parameters() if name != "head.weight"]
groups = [{"params": rest}, {"params": [model.head.weight]}]
if args.variant == "lr-twice":
    groups[1]["lr"] = 2e-3
options = {"fused": {"fused": True}, "foreach": {"foreach": True}}.get(args.variant, {})
optimizer = torch.optim.AdamW(groups, lr=1e-3, **options)
forward = torch.compile(loss_fn, backend="aot_eager") if args.variant == "compiled" else loss_fn
for step in range(args.steps):
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(V, (B, T), generator=generator)
    advantages = torch.randn(B, T, generator=generator)
    mask = torch.arange(T) >= torch.tensor([[2], [5], [3], [6]])
    halves = 2 if args.variant == "accumulated" else 1
    for part in range(halves):
        rows = slice(part * B // halves, (part + 1) * B // halves)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
            loss = forward(model, tokens[rows], advantages[rows], mask[rows])
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}")
