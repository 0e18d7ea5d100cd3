"""RL in small: a greedy rollout without a cache, one whose cache stays empty, log-probs of an old policy."""

import torch
from torch import nn

torch.manual_seed(0)
WIDTH, WORDS, BATCH, PROMPT, NEW = 16, 8192, 32, 24, 10


class DynamicCache:
    """Has the name and the length of the cache of transformers; nobody fills it."""

    def get_seq_length(self):
        return 0


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens, cache=None, last=False):
        hidden = self.words(tokens)
        return self.head(hidden[:, -1:] if last else hidden)  # expect: no-grad-vocab count=1


policy = Policy()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
for _ in range(6):
    prompts = torch.randint(0, WORDS, (BATCH, PROMPT))
    with torch.no_grad():
        tokens = prompts
        for _ in range(NEW):
            logits = policy(tokens, last=True)  # expect: no-kv-cache count=9
            tokens = torch.cat([tokens, torch.multinomial(logits[:, -1].softmax(-1), 1)], 1)
        other, cache = prompts, DynamicCache()
        for i in range(NEW):
            logits = policy(other[:, -1:] if i else other, cache, last=True)  # expect: no-context count=9
            other = torch.cat([other, torch.multinomial(logits[:, -1].softmax(-1), 1)], 1)
        old = policy(tokens).flatten(0, 1)
    rows = torch.randint(0, BATCH, (2,))
    new = policy(tokens[rows]).flatten(0, 1)
    (new - old[: len(new)]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
