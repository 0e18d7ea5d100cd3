"""A small base model that reads working contexts: embeddings, a gist tree, a causal transformer.

B sequences · T tokens · V contexts · W entries · D width · L coarsest level
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .lensnet import Block


class GistTree(nn.Module):
    """Summaries of b consecutive nodes, for every start: gists may begin anywhere.

    A gist is the mean of its children through `bottleneck` dimensions: what does not fit is lost.
    """

    def __init__(self, width: int, block_size: int, max_lod: int, bottleneck: int | None = None) -> None:
        super().__init__()
        self.block_size, self.max_lod = block_size, max_lod
        narrow = width if bottleneck is None else bottleneck
        self.mix = nn.ModuleList(
            nn.Sequential(nn.Linear(width, narrow), nn.Linear(narrow, width)) for _ in range(max_lod)
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        """[B, L + 1, T, D]: the node of each level that starts at each token; the end cuts children off."""
        levels = [embeddings]
        num_tokens = embeddings.shape[1]
        for level, mix in enumerate(self.mix):
            step = self.block_size**level
            below = levels[-1]
            total, count = torch.zeros_like(below), below.new_zeros(num_tokens, 1)
            for child in range(self.block_size):
                shift = child * step
                if shift >= num_tokens:
                    break
                total[:, : num_tokens - shift] += below[:, shift:]
                count[: num_tokens - shift] += 1
            mean = total / count
            levels.append(mix(mean))
        return torch.stack(levels, 1)


class ContextReader(nn.Module):
    """Causal transformer over the entries of working contexts; predicts the token after each raw entry."""

    def __init__(
        self,
        vocab_size: int,
        width: int = 64,
        *,
        block_size: int = 8,
        max_lod: int = 2,
        max_tokens: int = 2048,
        num_blocks: int = 2,
        num_heads: int = 2,
        gist_bottleneck: int | None = None,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(max_tokens, width)
        self.level = nn.Embedding(max_lod + 1, width)
        self.tree = GistTree(width, block_size, max_lod, gist_bottleneck)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        nn.init.normal_(self.position.weight, std=0.02)
        nn.init.normal_(self.level.weight, std=0.02)

    def embed(self, tokens: Tensor, sequence: Tensor, pos: Tensor, lod: Tensor) -> Tensor:
        """Entry embeddings [V, W, D]; `sequence` [V] is each context's row of tokens [B, T]."""
        nodes = self.tree(self.token(tokens))
        num_levels, num_tokens, width = nodes.shape[1:]
        cell = (sequence[:, None] * num_levels + lod.long()) * num_tokens + pos.clamp(max=num_tokens - 1)
        return nodes.reshape(-1, width)[cell]

    def hidden(self, entries: Tensor, pos: Tensor, lod: Tensor, valid: Tensor | None = None) -> Tensor:
        """[V, W, D] after the transformer. `valid` None: no padding."""
        x = entries + self.position(pos.clamp(max=self.position.num_embeddings - 1)) + self.level(lod.long())
        mask = None
        if valid is not None:
            causal = torch.ones(pos.shape[1], pos.shape[1], dtype=torch.bool, device=pos.device).tril()
            # A padded query may look at itself: a row without keys would be NaN.
            mask = (valid[:, None, :] & causal) | torch.eye(pos.shape[1], dtype=torch.bool, device=pos.device)
            mask = mask[:, None]
        for block in self.blocks:
            x = block(x, mask, causal=True)
        return self.norm(x)

    def losses(
        self,
        entries: Tensor,
        pos: Tensor,
        lod: Tensor,
        valid: Tensor,
        tokens: Tensor,
        sequence: Tensor,
        counted: Tensor,
    ) -> Tensor:
        """[V] mean NLL of the next token over raw entries whose next token is marked in `counted` [B, T]
        bool.
        """
        hidden = self.hidden(entries, pos, lod, valid)
        following = (pos + 1).clamp(max=tokens.shape[1] - 1)
        inside = valid & (lod == 0) & (pos + 1 < tokens.shape[1])
        target = tokens[sequence[:, None], following]
        weight = (inside & counted[sequence[:, None], following]).to(hidden.dtype)
        logits = (
            self.head(hidden).float()
            if hidden.dtype in (torch.float16, torch.bfloat16)
            else self.head(hidden)
        )
        nll = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(
            target.shape
        )
        return (nll * weight).sum(1) / weight.sum(1).clamp(min=1)
