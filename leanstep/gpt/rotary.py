"""Truncated rotary embedding with YaRN: half of each head rotates, adjacent features in pairs.

Tables are complex: feature pair (even, odd) is one complex number, and turning it by the angle is one
product. The half that does not rotate is multiplied by one, so the whole head is a single contiguous pass.
"""

# T tokens · H heads · D head size · P = D/2 feature pairs

from __future__ import annotations

import math

import torch
from torch import Tensor

COMPLEX = {torch.float64: torch.complex128}


class Rotary:
    """Frequencies, softmax scale, and tables that grow on demand.

    Plain attributes, not buffers: `model.to(dtype)` must not round the frequencies.
    """

    def __init__(self, head_dim: int, base: float, attention_scale: float) -> None:
        count = head_dim // 4
        exponents = torch.linspace(0, 1, count, dtype=torch.float32)
        self.frequencies = (1.0 / base) ** exponents
        self.head_dim = head_dim
        self.attention_scale = attention_scale
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._full: dict[tuple[int, bool, torch.dtype, torch.device], Tensor] = {}

    def rescale(self, old_window: int, new_window: int) -> None:
        """One YaRN step for a long window that went from `old_window` to `new_window` tokens."""
        if old_window < 1 or new_window < 1:
            raise ValueError(f"window: expected positive token counts, got {old_window} -> {new_window}")
        rotations = old_window * self.frequencies / (2 * math.pi)
        # Frequencies with fewer than one turn per window are interpolated, with more than 32 left alone.
        keep = torch.clamp((rotations - 1) / 31, 0, 1)
        ratio = old_window / new_window
        self.frequencies = self.frequencies * (ratio + keep * (1 - ratio))
        self.attention_scale *= 0.2 * math.log(new_window / old_window) + 1
        self._tables.clear()
        self._full.clear()

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[length, P] complex, exp(-i * position * frequency), ones in the half that does not rotate."""
        key = (dtype, device)
        cached = self._tables.get(key)
        if cached is None or cached.shape[0] < length:
            rows = max(length, 2 * cached.shape[0] if cached is not None else 0)
            angles = torch.arange(rows, dtype=torch.float64)[:, None] * self.frequencies.double()
            turning = torch.polar(torch.ones_like(angles), -angles)
            still = torch.ones_like(turning)
            cached = torch.cat([turning, still], dim=-1).to(COMPLEX.get(dtype, torch.complex64)).to(device)
            self._tables[key] = cached
        return cached[:length]

    def head_table(self, length: int, paired: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Table that broadcasts against [T, H, P]: [T, 1, P], or [T, 2, P] by head parity for paired heads.

        A paired head of token t turns by position 2t + (head mod 2): the parity of the head, not of its slot.
        """
        if not paired:
            return self.table(length, dtype, device)[:, None]
        return self.table(2 * length, dtype, device).view(length, 2, self.head_dim // 2)

    def full_table(
        self, length: int, heads: int, paired: bool, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """`head_table` for every head, [T, H, P]: a product without broadcasting is four times faster."""
        key = (heads, paired, dtype, device)
        cached = self._full.get(key)
        if cached is None or cached.shape[0] < length:
            table = self.head_table(length, paired, dtype, device)
            cached = table.repeat(1, heads // table.shape[1], 1)
            self._full[key] = cached
        return cached[:length]

    def state_dict(self) -> dict:
        return {"frequencies": self.frequencies.tolist(), "attention_scale": self.attention_scale}

    def load_state_dict(self, state: dict) -> None:
        frequencies = torch.tensor(state["frequencies"], dtype=torch.float32)
        if frequencies.shape != self.frequencies.shape:
            raise ValueError(
                f"frequencies: expected {self.frequencies.numel()} values, got {frequencies.numel()}"
            )
        self.frequencies = frequencies
        self.attention_scale = float(state["attention_scale"])
        self._tables.clear()
        self._full.clear()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn heads [T, H, D] by a table of `Rotary.head_table`.

    Equivalent to (per adjacent pair): even * cos + odd * sin, odd * cos - even * sin.
    """
    length, heads, dim = x.shape
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    parity = table.shape[1]
    pairs = torch.view_as_complex(wide.reshape(length, heads // parity, parity, dim // 2, 2))
    return torch.view_as_real(pairs * table[:, None]).reshape(length, heads, dim).to(x.dtype)
