"""Working contexts: random variants, edits by score, and two small models that read them.

B sequences · T tokens · V contexts · W entries · D width · L coarsest level · b block size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from leanstep.lens import Variant

Entry = tuple[int, int]  # position, lod
# Probability that a random context collapses gists before tokens.
DEEP = 0.1


@dataclass(frozen=True)
class AllocatorConfig:
    """Limits of one round of edits by `allocate_focus`.

    Args:
        expand_at, collapse_at: thresholds on the scores [W] at which an entry is edited.
        protected_entries: entries at the end that are not edited.
        max_edits: edits per round.
    """

    expand_at: float = 0.1
    collapse_at: float = -0.1
    protected_entries: int = 128
    max_edits: int = 4


def reachable_length(num_tokens: int, planned: int, block_size: int) -> int:
    """Return the largest length at or below `planned` that whole collapses can reach.

    >>> reachable_length(2048, 1843, 32)
    1831
    """
    if planned >= num_tokens:
        return planned
    step = block_size - 1
    return max(num_tokens - step * math.ceil((num_tokens - planned) / step), 1)


def baseline_variant(num_tokens: int, target_len: int) -> Variant:
    """Return the context of the last `target_len` raw tokens.

    >>> baseline_variant(6, 4).positions
    tensor([2, 3, 4, 5])
    """
    length = min(num_tokens, target_len)
    positions = torch.arange(num_tokens - length, num_tokens)
    return Variant(positions, torch.zeros(length, dtype=torch.int8), None, True)


def sample_variants(
    T: int,
    b: int,
    L: int,
    n_random: int,
    target_len: int,
    generator: torch.Generator | None = None,
    *,
    recent_tokens: int = 128,
) -> list[Variant]:
    """Return the baseline and up to `n_random` random contexts of one sequence, without losses.

    A random context starts as all T raw tokens and collapses random runs of b entries of the same LOD until
    it has `target_len` entries. Runs start at any entry and never include the last `recent_tokens`. Level 0
    is collapsed first; with probability `DEEP` a run of level 1 is. Duplicate contexts are
    dropped.

    Args:
        T: tokens in the sequence.
        b: block size.
        L: coarsest level.
        n_random: random contexts to try.
        target_len: number of entries; if T cannot reach it (see `reachable_length`), the next smaller one.
        generator: a CPU generator.

    Returns:
        1 to 1 + n_random variants, the baseline first; `positions` and `lods` [target_len].

    >>> [v.lods.tolist() for v in sample_variants(6, 4, 1, 1, 3, recent_tokens=2)]
    [[0, 0, 0], [1, 0, 0]]
    """
    if T < 1 or target_len < 1:
        raise ValueError(f"T, target_len: expected at least 1, got {T} and {target_len}")
    variants = [baseline_variant(T, target_len)]
    if target_len >= T:
        return variants
    seen = {_content(variants[0])}
    for _ in range(n_random):
        variant = _random_variant(T, b, L, target_len, generator, recent_tokens)
        if (content := _content(variant)) not in seen:
            seen.add(content)
            variants.append(variant)
    return variants


def _content(variant: Variant) -> bytes:
    positions, lods = torch.as_tensor(variant.positions), torch.as_tensor(variant.lods)
    return positions.numpy().tobytes() + b"|" + lods.to(torch.int8).numpy().tobytes()


def _random_variant(
    T: int,
    b: int,
    L: int,
    target_len: int,
    generator: torch.Generator | None,
    recent_tokens: int,
) -> Variant:
    # A context is a list of runs [start, count, level] of adjacent entries; a collapse splits a run into
    # three.
    runs: list[list[int]] = [[0, T, 0]]
    length, limit = T, T - recent_tokens
    while length > target_len:
        levels = list(range(L))
        if L > 1 and float(torch.rand((), generator=generator)) < DEEP:
            levels = [1, 0, *levels[2:]]
        choice = None
        for level in levels:
            # The number of entries of each run that can start a collapse that ends at or before `limit`.
            starts = [
                max(min(count, (limit - start) // b**level) - b + 1, 0) if lod == level else 0
                for start, count, lod in runs
            ]
            if total := sum(starts):
                choice = int(torch.randint(total, (), generator=generator))
                break
        if choice is None:
            break
        index = 0
        while choice >= starts[index]:
            choice -= starts[index]
            index += 1
        _collapse(runs, index, choice, b)
        length -= b - 1
    positions = torch.cat([torch.arange(start, start + count * b**lod, b**lod) for start, count, lod in runs])
    lods = torch.repeat_interleave(
        torch.tensor([lod for _, _, lod in runs], dtype=torch.int8),
        torch.tensor([count for _, count, _ in runs]),
        output_size=length,
    )
    return Variant(positions, lods, None, False)


def _collapse(runs: list[list[int]], index: int, first: int, b: int) -> None:
    """Replace entries first .. first + b - 1 of a run by a gist; merge it with neighbours of its level."""
    start, count, lod = runs[index]
    span = b**lod
    pieces = [
        [start, first, lod],
        [start + first * span, 1, lod + 1],
        [start + (first + b) * span, count - first - b, lod],
    ]
    runs[index : index + 1] = [piece for piece in pieces if piece[1]]
    k = 1
    while k < len(runs):
        if runs[k][2] == runs[k - 1][2]:
            runs[k - 1][1] += runs.pop(k)[1]
        else:
            k += 1


def allocate_focus(
    positions: Tensor,
    lods: Tensor,
    scores: Tensor,
    *,
    block_size: int,
    max_lod: int,
    budget: int,
    num_tokens: int,
    config: AllocatorConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Edit one context by its scores, the strongest first, up to `budget` entries.

    An entry expands into its b children if its score is at least `expand_at`, it is above LOD 0 and the
    result fits. It collapses with the next b - 1 entries if its score is at most `collapse_at`, it is below
    `max_lod`, and these b entries have the same LOD and are adjacent. The last `protected_entries` are not
    edited; an edit of an already edited entry is skipped.

    Args:
        positions, lods, scores: [W] on the host.
        budget: entries allowed after the edits.

    Returns:
        positions and lods of the edited context, [W'] with W' <= max(W, budget).

    >>> context = torch.tensor([0, 4, 5]), torch.tensor([1, 0, 0])
    >>> scores, limits = torch.tensor([0.9, 0.0, 0.0]), AllocatorConfig(protected_entries=0)
    >>> allocate_focus(*context, scores, block_size=4, max_lod=1, budget=8, num_tokens=6, config=limits)[0]
    tensor([0, 1, 2, 3, 4, 5])
    """
    config = config or AllocatorConfig()
    if not positions.shape == lods.shape == scores.shape or positions.dim() != 1:
        raise ValueError(
            f"positions, lods, scores: expected one shape (W,), got {tuple(positions.shape)}, "
            f"{tuple(lods.shape)}, {tuple(scores.shape)}"
        )
    tree = _Tree(block_size, max_lod, num_tokens)
    entries = list(zip(positions.tolist(), lods.tolist(), strict=True))
    edits = _choose_edits(entries, scores.tolist(), tree, budget, config)
    edited = _apply_edits(entries, edits, tree)
    return (
        torch.tensor([position for position, _ in edited], dtype=positions.dtype),
        torch.tensor([lod for _, lod in edited], dtype=lods.dtype),
    )


@dataclass(frozen=True)
class _Tree:
    block_size: int
    max_lod: int
    num_tokens: int

    def children(self, position: int, lod: int) -> list[Entry]:
        """Return the entries one level finer, up to the end of the sequence."""
        starts = range(position, position + self.block_size**lod, self.block_size ** (lod - 1))
        return [(start, lod - 1) for start in starts if start < self.num_tokens]

    def are_adjacent(self, run: Sequence[Entry]) -> bool:
        """Return whether the entries have the same level and each begins where the previous one ends."""
        first, lod = run[0]
        return all(entry == (first + i * self.block_size**lod, lod) for i, entry in enumerate(run))


def _choose_edits(
    entries: list[Entry], scores: list[float], tree: _Tree, budget: int, config: AllocatorConfig
) -> dict[int, str]:
    """Map entries to "expand" or "collapse" (with the next b - 1 entries), the strongest scores first."""
    b, length = tree.block_size, len(entries)
    editable = length - config.protected_entries
    edits: dict[int, str] = {}
    edited: set[int] = set()
    for j in sorted(range(len(entries)), key=lambda i: -abs(scores[i])):
        if len(edits) == config.max_edits:
            break
        if j >= editable or j in edited:
            continue
        position, lod = entries[j]
        if scores[j] >= config.expand_at and lod > 0:
            growth = len(tree.children(position, lod)) - 1
            if length + growth <= budget:
                edits[j] = "expand"
                edited.add(j)
                length += growth
        elif scores[j] <= config.collapse_at and lod < tree.max_lod and j + b <= editable:
            run = range(j, j + b)
            if edited.isdisjoint(run) and tree.are_adjacent(entries[j : j + b]):
                edits[j] = "collapse"
                edited.update(run)
                length -= b - 1
    return edits


def _apply_edits(entries: list[Entry], edits: dict[int, str], tree: _Tree) -> list[Entry]:
    edited: list[Entry] = []
    j = 0
    while j < len(entries):
        position, lod = entries[j]
        edit = edits.get(j)
        if edit == "expand":
            edited += tree.children(position, lod)
        else:
            edited.append((position, lod + 1 if edit == "collapse" else lod))
        j += tree.block_size if edit == "collapse" else 1
    return edited


class Block(nn.Module):
    """Pre-norm attention and feed-forward layer."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def start_as_identity(self) -> None:
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        for parameter in (self.out.weight, last.weight, last.bias):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class LensNet(nn.Module):
    """Score each entry: above 0 = expand it into its children, below 0 = collapse it with its siblings.

    Example:
        net = LensNet(16, 32, max_lod=2, block_size=4)
        scores = net(embeddings, batch.pos, batch.lod, batch.valid, batch.num_tokens)      # [V, W] in [-1, 1]

    Args:
        input_width: width D of the entry embeddings [V, W, D]; `width` is that of the controller.
        max_lod, block_size: geometry of the tree.
        num_blocks, num_heads: depth and heads.
    """

    def __init__(
        self,
        input_width: int,
        width: int = 64,
        *,
        max_lod: int = 2,
        block_size: int = 32,
        num_blocks: int = 2,
        num_heads: int = 2,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"num_heads: expected a divisor of width {width}, got {num_heads}")
        self.block_size, self.max_lod = block_size, max_lod
        self.embed = nn.Linear(input_width, width)
        self.level = nn.Embedding(max_lod + 1, width)
        self.features = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        # At initialisation scores do not depend on levels, distances or neighbours.
        for parameter in (self.level.weight, self.features.weight, self.embed.bias, self.head.bias):
            nn.init.zeros_(parameter)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.start_as_identity()

    def forward(
        self, embeddings: Tensor, pos: Tensor, lod: Tensor, valid: Tensor, num_tokens: Tensor | int
    ) -> Tensor:
        """Return scores [V, W] from embeddings [V, W, D], positions, levels and padding mask; 0 for padding.

        Args:
            num_tokens: tokens in the sequence, one number or [V]; distances are measured from its end.
        """
        if embeddings.dim() != 3 or embeddings.shape[:2] != pos.shape:
            raise ValueError(f"embeddings: expected shape {(*pos.shape, 'D')}, got {tuple(embeddings.shape)}")
        dtype = embeddings.dtype
        level = lod.long()
        total = num_tokens[:, None] if isinstance(num_tokens, Tensor) else num_tokens
        distance = (total - pos).clamp(min=0).to(dtype)
        span = torch.full_like(distance, self.block_size) ** level
        features = torch.stack(
            [torch.log1p(span) / math.log(self.block_size), torch.log1p(distance) / 8, distance / 2048], -1
        )
        x = self.embed(embeddings) + self.level(level) + self.features(features)
        mask = valid[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        scores = torch.tanh(self.head(self.norm(x)).squeeze(-1))
        return torch.where(valid, scores, 0)


class GistTree(nn.Module):
    """Summaries of b consecutive nodes for every start: gists may begin anywhere.

    A gist is the mean of its children, projected through `bottleneck` dimensions.

    Example:
        nodes = GistTree(16, block_size=4, max_lod=2)(torch.randn(3, 20, 16))              # [3, 3, 20, 16]
    """

    def __init__(self, width: int, block_size: int, max_lod: int, bottleneck: int | None = None) -> None:
        super().__init__()
        self.block_size, self.max_lod = block_size, max_lod
        narrow = width if bottleneck is None else bottleneck
        self.mix = nn.ModuleList(
            nn.Sequential(nn.Linear(width, narrow), nn.Linear(narrow, width)) for _ in range(max_lod)
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return [B, L + 1, T, D]: the node of each level that starts at each token, cut at the end."""
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
    """Causal transformer over the entries of working contexts that predicts the token after each raw entry.

    Example:
        reader = ContextReader(vocab_size=50, width=16, block_size=4)
        entries = reader.embed(token_ids, sequence, batch.pos, batch.lod)                  # [V, W, D]
        nll = reader.losses(entries, batch.pos, batch.lod, batch.valid, token_ids, sequence, counted)  # [V]
    """

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
        if width % num_heads:
            raise ValueError(f"width: expected a multiple of {num_heads} heads, got {width}")
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
        """Return entry embeddings [V, W, D]; `sequence` [V] is each context's row of tokens [B, T]."""
        nodes = self.tree(self.token(tokens))
        num_levels, num_tokens, width = nodes.shape[1:]
        cell = (sequence[:, None] * num_levels + lod.long()) * num_tokens + pos.clamp(max=num_tokens - 1)
        return nodes.reshape(-1, width)[cell]

    def hidden(self, entries: Tensor, pos: Tensor, lod: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the transformer's output [V, W, D]. `valid` None: no padding."""
        x = entries + self.position(pos.clamp(max=self.position.num_embeddings - 1)) + self.level(lod.long())
        mask = None
        if valid is not None:
            causal = torch.ones(pos.shape[1], pos.shape[1], dtype=torch.bool, device=pos.device).tril()
            # A padded query attends to itself: a row without keys would be NaN.
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
        """Return the mean NLL [V] of next tokens over raw entries whose next token is in `counted` [B, T]."""
        hidden = self.hidden(entries, pos, lod, valid)
        following = (pos + 1).clamp(max=tokens.shape[1] - 1)
        inside = valid & (lod == 0) & (pos + 1 < tokens.shape[1])
        target = tokens[sequence[:, None], following]
        weight = (inside & counted[sequence[:, None], following]).to(hidden.dtype)
        logits = self.head(hidden)
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        nll = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        nll = nll.view(target.shape)
        return (nll * weight).sum(1) / weight.sum(1).clamp(min=1)
