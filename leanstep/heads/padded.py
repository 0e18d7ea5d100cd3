"""Token log-probs of a padded batch: the rows that a mask selects, without the others."""

# B sequences · T tokens · K tokens that the mask covers · W positions of hidden per sequence · D model

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from leanstep.heads.head import assert_all
from leanstep.heads.layout import to_device
from leanstep.heads.logprob import Entropy, check_entropy, linear_logprobs, outside_graph


@overload
def masked_token_logprobs(
    hidden: Tensor, head: Any, tokens: Tensor, mask: Tensor | None = None, *,
    entropy: Literal["none"] = "none", temperature: float = 1.0, max_rows: int | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def masked_token_logprobs(
    hidden: Tensor, head: Any, tokens: Tensor, mask: Tensor | None = None, *,
    entropy: Literal["metric", "grad"], temperature: float = 1.0, max_rows: int | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@outside_graph
def masked_token_logprobs(
    hidden: Tensor,
    head: Any,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    entropy: Entropy = "none",
    temperature: float = 1.0,
    max_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-prob of each token of a padded batch given the tokens before it; 0 where the mask is 0.

    Equivalent to:
        logits = torch.nn.functional.linear(padded_hidden[:, :-1], weight).float() / temperature
        logp = torch.log_softmax(logits, -1).gather(-1, padded[:, 1:, None])[..., 0] * padded_mask[:, 1:]

    Args:
        hidden: [B, T, D], or [B, T - 1, D] if the last token was not fed to the model.
        head: as in `linear_logprobs`.
        tokens: [B, T] ids. Masked tokens may have any value, including -100.
        mask: bool, or 0 and 1. [B, T]: one entry per token; the entry of the first token, which is never
            scored, is ignored. [B, T - 1]: without the first token. [B, K]: for the last K tokens. None:
            score all tokens.
        entropy: "none"; "metric": a value without gradient; "grad".
        temperature: > 0.
        max_rows: on a GPU, an upper bound on the number of tokens that the mask selects. Avoids the host
            sync: `max_rows` rows are projected, and a device assertion fails if the mask selects more.

    Returns:
        [B, T - 1], or [B, K] for a mask of the last K tokens; fp32 (fp64 for fp64 input). With `entropy`, a
        pair of such tensors.

    Peak extra memory, products: those of `linear_logprobs` on the selected rows.
    Host reads: none if the mask is on the host, if `max_rows` is set or if there is no mask; otherwise one on
        a GPU, for the number of rows.
    """
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or len(tokens) != len(hidden):
        got = f"{tuple(hidden.shape)} and {len(tokens)} sequences"
        raise ValueError(f"hidden, tokens: expected [B, T, D] and [B, T], got {got}")
    selection = PaddedRows(tokens, mask, hidden.shape[1], hidden.device, max_rows)
    return selection.score(hidden, head, entropy, temperature)


class PaddedRows:
    """The rows that a mask selects.

    Create it before the model runs: the copy of the number of rows to the host is queued here, and `score`
    waits for it after the model's kernels have been queued, so the copy overlaps with them.
    """

    def __init__(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        width: int,
        device: torch.device,
        max_rows: int | None = None,
    ) -> None:
        if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] - width not in (0, 1):
            expected = f"[B, {width}] or [B, {width + 1}] ids to match hidden"
            raise ValueError(f"tokens: expected {expected}, got {tokens.dtype} {tuple(tokens.shape)}")
        size, length = tokens.shape
        scored = length - 1
        if mask is not None:
            if mask.dim() != 2 or mask.shape[0] != size or not 0 <= mask.shape[1] <= length:
                expected = f"[{size}, up to {length}] to match tokens"
                raise ValueError(f"mask: expected {expected}, got {tuple(mask.shape)}")
            scored = min(mask.shape[1], length - 1)
        # Row t scores token t + 1, so the K rows before the last token score the last K tokens.
        before, after = length - 1 - scored, width - (length - 1)
        self.width, self.window, self.max_rows = width, slice(before, before + scored), max_rows
        self.targets = _framed(to_device(tokens[:, length - scored :], device), before, after)
        self.rows: Callable[[], Tensor] | None = None
        if mask is None and (before or after):
            mask = torch.ones((size, scored), dtype=torch.bool, device="cpu")
        if mask is not None:
            counts = _framed(mask[:, mask.shape[1] - scored :] != 0, before, after)
            self.rows = _start_row_search(counts, device, max_rows)

    def score(self, hidden: Tensor, head: Any, entropy: Entropy, temperature: float) -> Any:
        """Return the log-probs of the scored window and, if `entropy` is not "none", the entropies."""
        check_entropy(entropy)
        flat, targets = hidden.flatten(0, 1), self.targets
        options: dict[str, Any] = {"entropy": entropy, "temperature": temperature}
        if self.rows is None:
            out = linear_logprobs(flat, head, targets, **options)
            values = [out.logp, out.entropy]
        else:
            num_rows, places = len(flat), self.rows()
            if self.max_rows is None:
                out = linear_logprobs(flat, head, targets.index_select(0, places), rows=places, **options)
            else:
                # Unused slots are rows of zeros: the row that they would read may hold NaN.
                unused = places < 0
                rows = places.clamp(min=0)
                selected = flat.index_select(0, rows).masked_fill(unused[:, None], 0)
                targets = targets.index_select(0, rows).masked_fill(unused, 0)
                out = linear_logprobs(selected, head, targets, **options)
                places = torch.where(unused, num_rows, places)
            values = [
                None if x is None else x.new_zeros(num_rows + 1).index_copy(0, places, x)[:num_rows]
                for x in (out.logp, out.entropy)
            ]
        logp, spread = (None if x is None else x.view(-1, self.width)[:, self.window] for x in values)
        return logp if entropy == "none" else (logp, spread)


def _start_row_search(counts: Tensor, device: torch.device, max_rows: int | None) -> Callable[[], Tensor]:
    """Start to search for rows where `counts` [N] is True; the returned function waits for the result."""
    if max_rows is not None:
        assert_all(counts.sum() <= max_rows, f"mask: expected at most max_rows = {max_rows} tokens", counts)
        static = to_device(torch.nonzero_static(counts, size=max_rows).flatten(), device)
        return lambda: static
    if counts.device.type != "cuda":
        rows = to_device(counts.nonzero().flatten(), device)
        return lambda: rows
    number = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
    number.copy_(counts.sum(), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return torch.nonzero_static(counts, size=int(number)).flatten()

    return wait


def _framed(values: Tensor, before: int, after: int) -> Tensor:
    """Pad [B, K] with zeros around the window and flatten it to [B * W]."""
    return torch.nn.functional.pad(values, (before, after)).reshape(-1)
