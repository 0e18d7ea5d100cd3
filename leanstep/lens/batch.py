"""Working contexts as padded tensors, the input of one call of the objective.

V contexts · W padded length · B samples · C variants per sample · T tokens per sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from leanstep.lens.config import LensConfig


@dataclass(frozen=True)
class Variant:
    """One working context of a sequence: W entries.

    Example:
        raw = Variant([0, 1, 2, 3], [0, 0, 0, 0], loss=2.1, is_baseline=True)
        gist = Variant([0], [1], loss=1.9)                       # one gist over four tokens (block_size=4)

    Args:
        positions: [W] first token covered by each entry, strictly ascending; a 1-D integer tensor or list.
        lods: [W] level of detail of each entry.
        loss: the base model's mean NLL in nats: a float, a 0-d tensor (stays on its device), or None.
        is_baseline: whether this is the context of raw tokens only.
    """

    positions: Tensor | Sequence[int]
    lods: Tensor | Sequence[int]
    loss: float | Tensor | None = None
    is_baseline: bool = False


@dataclass(frozen=True)
class LensBatch:
    """A micro-batch of variants. Create it with `from_variants` or `from_tensors`.

    Example:
        batch = LensBatch.from_variants(samples, config, num_tokens=64)
        batch = batch.with_losses(nll)                           # [V], from the base model, on its device

    Args:
        pos: [V, W] int64; padded entries hold `num_tokens`.
        lod: [V, W] int8; padded entries hold 0.
        valid: [V, W] bool.
        loss: [B, C] float32 or float64; NaN excludes the variant from pairs.
        row: [B, C] int64, the context of each variant; unused slots hold 0 (their loss is NaN).
        tokens: [V] int64, tokens in the context's sequence.
        baseline: [B] int64, which variant of the sample is the baseline.
        num_tokens: length of the longest sequence, a host integer (it sets the size of the lookup table).
        counts: variants per sample, host integers, or None if unknown.
    """

    pos: Tensor
    lod: Tensor
    valid: Tensor
    loss: Tensor
    row: Tensor
    tokens: Tensor
    baseline: Tensor
    num_tokens: int
    counts: tuple[int, ...] | None = None

    @property
    def num_contexts(self) -> int:
        return self.pos.shape[0]

    @classmethod
    def from_tensors(
        cls,
        pos: Tensor,
        lod: Tensor,
        loss: Tensor,
        row: Tensor,
        *,
        num_tokens: int,
        valid: Tensor | None = None,
        has_loss: Tensor | None = None,
        tokens: Tensor | None = None,
        baseline: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
    ) -> LensBatch:
        """Check shapes and dtypes and fill in defaults. Reads no device value; `check` does."""
        if pos.dim() != 2:
            raise ValueError(f"pos: expected shape (V, W), got {tuple(pos.shape)}")
        if pos.is_floating_point() or lod.is_floating_point() or row.is_floating_point():
            raise ValueError("pos, lod, row: expected integer tensors")
        shape_VW = tuple(pos.shape)
        if tuple(lod.shape) != shape_VW:
            raise ValueError(f"lod: expected shape {shape_VW} to match pos, got {tuple(lod.shape)}")
        full = valid is None
        if valid is None:
            valid = torch.ones_like(pos, dtype=torch.bool)
        if tuple(valid.shape) != shape_VW or valid.dtype != torch.bool:
            raise ValueError(
                f"valid: expected bool of shape {shape_VW}, got {valid.dtype} {tuple(valid.shape)}"
            )
        if loss.dim() != 2:
            raise ValueError(f"loss: expected shape (samples, variants), got {tuple(loss.shape)}")
        if tuple(row.shape) != tuple(loss.shape):
            raise ValueError(f"row: expected shape {tuple(loss.shape)} to match loss, got {tuple(row.shape)}")
        if loss.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"loss: expected float32 or float64, got {loss.dtype}: differences need the precision"
            )
        if has_loss is not None:
            if has_loss.shape != loss.shape or has_loss.dtype != torch.bool:
                raise ValueError(
                    f"has_loss: expected bool of shape {tuple(loss.shape)}, "
                    f"got {has_loss.dtype} {tuple(has_loss.shape)}"
                )
            loss = torch.where(has_loss, loss, torch.nan)
        if num_tokens < 1:
            raise ValueError(f"num_tokens: expected >= 1, got {num_tokens}")
        if tokens is None:
            tokens = torch.full((pos.shape[0],), num_tokens, dtype=torch.int64, device=pos.device)
        if tuple(tokens.shape) != (pos.shape[0],):
            raise ValueError(f"tokens: expected shape ({pos.shape[0]},), got {tuple(tokens.shape)}")
        if baseline is None:
            baseline = torch.zeros(loss.shape[0], dtype=torch.int64, device=loss.device)
        if tuple(baseline.shape) != (loss.shape[0],):
            raise ValueError(f"baseline: expected shape ({loss.shape[0]},), got {tuple(baseline.shape)}")
        return cls(
            pos=pos.long() if full else torch.where(valid, pos.long(), num_tokens),
            lod=(lod if full else torch.where(valid, lod, 0)).to(torch.int8),
            valid=valid,
            loss=loss.detach(),
            row=row.long(),
            tokens=tokens,
            baseline=baseline,
            num_tokens=num_tokens,
            counts=counts,
        )

    @classmethod
    def from_variants(
        cls,
        samples: Sequence[Sequence[Variant]],
        config: LensConfig,
        *,
        num_tokens: int | Sequence[int],
        device: torch.device | str | None = None,
        loss_dtype: torch.dtype = torch.float64,
    ) -> LensBatch:
        """Pad the variants of a micro-batch on their device; variants on the host are checked.

        Nothing is read from a device: contexts that are GPU tensors stay there and are not checked
        (`check` does that, with a host sync).

        Args:
            samples: the variants of each sample.
            config: block size and levels for the checks.
            num_tokens: tokens per sequence, one number or one per sample.
            device: device of the objective; None = the device of the contexts.
            loss_dtype: dtype of host losses; losses that are tensors keep at least their own precision.
        """
        per_sample = [num_tokens] * len(samples) if isinstance(num_tokens, int) else list(num_tokens)
        if len(per_sample) != len(samples):
            raise ValueError(
                f"num_tokens: expected {len(samples)} lengths, one per sample, got {len(per_sample)}"
            )
        counts = tuple(len(variants) for variants in samples)
        width = max(counts, default=1)
        longest = max(per_sample, default=1)
        positions, lods = context_rows(samples)
        source_device = positions[0].device if positions else torch.device("cpu")
        lengths = [len(p) for p in positions]
        tokens = [t for t, c in zip(per_sample, counts, strict=True) for _ in range(c)]
        marked = [[j for j, v in enumerate(variants) if v.is_baseline] for variants in samples]
        batch = cls.from_tensors(
            pad_rows(positions, longest, lengths),
            pad_rows(lods, 0, lengths),
            _loss_table([[v.loss for v in variants] for variants in samples], width, loss_dtype),
            row_table(counts),
            num_tokens=longest,
            valid=real_cells(lengths, source_device),
            tokens=torch.tensor(tokens, dtype=torch.int64),
            baseline=torch.tensor([m[0] if m else 0 for m in marked], dtype=torch.int64),
            counts=counts,
        )
        if source_device.type == "cpu":
            batch.check(config)
        return batch.to(source_device if device is None else device)

    def with_losses(self, losses: Tensor, *, gist_delta_weight: float = 0.0) -> LensBatch:
        """Return the same contexts with the base model's losses [V], which stay on their device.

        With `gist_delta_weight` g, variants other than the baseline have the loss
        loss + g * relu(loss - baseline loss).
        """
        if tuple(losses.shape) != (self.num_contexts,):
            raise ValueError(
                f"losses: expected shape ({self.num_contexts},), one per context, got {tuple(losses.shape)}"
            )
        if self.counts is None:
            raise ValueError(
                "losses: expected a batch with known variants per sample; build it with from_variants"
            )
        values = losses.detach()
        values = values if values.dtype == torch.float64 else values.float()
        counts = torch.tensor(self.counts, dtype=torch.int64).to(values.device, non_blocking=True)
        column = torch.arange(self.row.shape[1], device=values.device)
        table = torch.where(column < counts[:, None], values[self.row], torch.nan)
        if gist_delta_weight and table.numel():
            excess = torch.relu(table - table.gather(1, self.baseline[:, None]))
            table = torch.where(column == self.baseline[:, None], table, table + gist_delta_weight * excess)
        return replace(self, loss=table)

    def check(self, config: LensConfig) -> None:
        """Raise on malformed contexts. Reads the tensors: a host sync, for debugging and for host data."""
        pos, lod, valid = self.pos, self.lod, self.valid
        pair_valid = valid[:, 1:] & valid[:, :-1]
        bad = pair_valid & (pos[:, 1:] <= pos[:, :-1])
        if bad.any():
            v, j = bad.nonzero()[0].tolist()
            raise ValueError(
                f"positions: context {v} is not strictly ascending: "
                f"entry {j} starts at {int(pos[v, j])}, entry {j + 1} at {int(pos[v, j + 1])}"
            )
        bad = valid & ((pos < 0) | (pos >= self.tokens[:, None]))
        if bad.any():
            v, j = bad.nonzero()[0].tolist()
            raise ValueError(
                f"positions: context {v} entry {j} starts at {int(pos[v, j])}, "
                f"expected 0..{int(self.tokens[v]) - 1}"
            )
        bad = valid & ((lod < 0) | (lod > config.max_lod))
        if bad.any():
            v, j = bad.nonzero()[0].tolist()
            raise ValueError(
                f"lods: context {v} entry {j} has LOD {int(lod[v, j])}, "
                f"expected 0..max_lod = {config.max_lod}"
            )
        if self.loss.isinf().any():
            raise ValueError("loss: expected finite losses (NaN marks a variant without one), got inf")
        if self.row.numel() and (self.row.min() < 0 or self.row.max() >= max(self.num_contexts, 1)):
            raise ValueError(
                f"row: expected indices of the {self.num_contexts} contexts, got up to {int(self.row.max())}"
            )

    def to(self, device: torch.device | str | None) -> LensBatch:
        """Return the same batch on another device."""
        if device is None:
            return self
        moved = {
            name: getattr(self, name).to(device)
            for name in ("pos", "lod", "valid", "loss", "row", "tokens", "baseline")
        }
        return replace(self, **moved)


def context_rows(samples: Sequence[Sequence[Variant]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return positions and LODs of every context on their device: int64 and int8 tensors of equal length."""
    positions, lods = [], []
    for i, variants in enumerate(samples):
        for j, variant in enumerate(variants):
            p = torch.as_tensor(variant.positions, dtype=torch.int64)
            lod = torch.as_tensor(variant.lods, dtype=torch.int8)
            if p.dim() != 1 or p.shape != lod.shape:
                name = f"variant {j} of sample {i}"
                raise ValueError(
                    f"lods: {name} has {tuple(lod.shape)} lods for positions of shape {tuple(p.shape)}"
                )
            positions.append(p)
            lods.append(lod)
    return positions, lods


def pad_rows(rows: Sequence[Tensor], fill: int, lengths: Sequence[int]) -> Tensor:
    """Stack rows [W] or [1, W] to [V, W], right-padded with `fill`. Host syncs: none."""
    if not rows:
        return torch.zeros(0, 0, dtype=torch.int64)
    if min(lengths) == max(lengths):
        return torch.cat(list(rows)).view(len(rows), -1)
    return pad_sequence([row.view(-1) for row in rows], batch_first=True, padding_value=fill)


def real_cells(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Return [V, W] bool, False for the padding of right-padded rows; None if there is no padding."""
    if not lengths or min(lengths) == max(lengths):
        return None
    ends = torch.tensor(lengths).to(device, non_blocking=True)
    return torch.arange(max(lengths), device=device) < ends[:, None]


def row_table(counts: Sequence[int]) -> Tensor:
    """Return [B, C] int64: contexts numbered sample by sample; unused slots hold 0.

    >>> row_table([2, 1])
    tensor([[0, 1],
            [2, 0]])
    """
    width, first, table = max(counts, default=1), 0, []
    if all(count == width for count in counts):
        return torch.arange(len(counts) * width).view(len(counts), width)
    for count in counts:
        table.append([*range(first, first + count), *[0] * (width - count)])
        first += count
    return torch.tensor(table, dtype=torch.int64).view(len(counts), width)


def _loss_table(losses: list[list[float | Tensor | None]], width: int, dtype: torch.dtype) -> Tensor:
    """Return losses [B, C] with NaN for missing ones; tensors are stacked on their device, never read."""
    on_device = [x for row in losses for x in row if isinstance(x, Tensor)]
    for i, row in enumerate(losses):
        for j, x in enumerate(row):
            if isinstance(x, Tensor) and x.dim() != 0:
                raise ValueError(
                    f"loss: variant {j} of sample {i}: expected a 0-d tensor, got shape {tuple(x.shape)}"
                )
            if not isinstance(x, Tensor) and x is not None and not abs(x) < float("inf"):
                raise ValueError(
                    f"loss: variant {j} of sample {i} is {x}; pass None for a variant without a loss"
                )
    if on_device:
        dtype = torch.float64 if any(x.dtype == torch.float64 for x in on_device) else torch.float32
    device = on_device[0].device if on_device else torch.device("cpu")
    missing = torch.full((), torch.nan, dtype=dtype, device=device)
    cells = []
    for row in losses:
        for j in range(width):
            x = row[j] if j < len(row) else None
            if isinstance(x, Tensor):
                cells.append(x.detach().to(device, dtype))
            else:
                cells.append(missing if x is None else torch.full((), x, dtype=dtype, device=device))
    table = torch.stack(cells) if cells else torch.zeros(0, dtype=dtype)
    return table.view(len(losses), width)


def owned_tokens(batch: LensBatch, config: LensConfig) -> Tensor:
    """Return [V, W] int64: tokens that each entry covers first; a row sums to the distinct tokens."""
    span = torch.pow(config.block_size, torch.arange(config.max_lod + 1, device=batch.lod.device))
    stop = torch.minimum(batch.pos + span[batch.lod.long()], batch.tokens[:, None]).where(batch.valid, 0)
    covered_before = pad(stop.cummax(1).values, (1, -1)) if stop.numel() else stop
    return (stop - torch.maximum(batch.pos, covered_before)).clamp(min=0).where(batch.valid, 0)
