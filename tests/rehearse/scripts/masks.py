"""A compiled model builds its block mask from tokens: causal, documents, a window."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

LENGTH, WINDOW, END = 4096, 1024, 7
flex_attention = torch.compile(flex_attention, dynamic=False)
create_block_mask = torch.compile(create_block_mask, dynamic=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, tokens, x):
        documents = (tokens == END).cumsum(0)

        def mask(batch, head, q, k):
            return (q >= k) & (documents[q] == documents[k]) & (q - k < WINDOW)

        blocks = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cuda", _compile=True)
        q, k, v = self.qkv(x).view(1, LENGTH, 3, 1, 64).permute(2, 0, 3, 1, 4)
        return flex_attention(q, k, v, block_mask=blocks)


model = torch.compile(Attention().cuda(), fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for documents in (16, 16, 2):
    tokens = torch.zeros(LENGTH, dtype=torch.long)
    tokens[:: LENGTH // documents] = END
    model(tokens.cuda(), torch.randn(1, LENGTH, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
