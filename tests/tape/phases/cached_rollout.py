"""A rollout with a KV cache, old and reference log-probs, and two updates per rollout."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
WIDTH, WORDS = 16, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            k = torch.cat([cache["k"], k], 1) if cache else k
            v = torch.cat([cache["v"], v], 1) if len(cache) > 1 else v
            cache["k"], cache["v"] = k, v
        scores = q @ k.transpose(1, 2)
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=x.device).tril(k.shape[1] - q.shape[1])
        return x + self.out(scores.masked_fill(~mask, -1e9).softmax(-1) @ v)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens, caches=None):
        x = self.words(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, caches[number] if caches is not None else None)
        return self.head(x)


def logprobs(model, tokens):
    return model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


policy, reference = Policy().to(device), Policy().to(device).requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
for _ in range(4):
    with torch.no_grad():
        tokens = torch.randint(0, WORDS, (4, 6), device=device)
        caches = [{} for _ in policy.blocks]
        logits = policy(tokens, caches)
        for _ in range(20):
            chosen = torch.multinomial(logits[:, -1].softmax(-1), 1)
            tokens = torch.cat([tokens, chosen], 1)
            logits = policy(chosen, caches)
        tokens = torch.cat([tokens, torch.multinomial(logits[:, -1].softmax(-1), 1)], 1)
        old, target = logprobs(policy, tokens), logprobs(reference, tokens)
    advantage = torch.linspace(-1, 1, 4, device=device)[:, None]
    for _ in range(2):
        new = logprobs(policy, tokens)
        loss = -((new - old).exp() * advantage).mean() + 0.1 * F.mse_loss(new, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
