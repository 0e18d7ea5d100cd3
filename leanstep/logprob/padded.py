"""Log-probs of a padded batch: a mask [B, T] selects the rows of the head, the result is [B, T - 1].

Most RL scripts use this layout: prompts padded on the left or the right, and a mask that is 1 on the
response. Rows with a masked token are not projected; their log-prob and their gradient are zero.
"""

# B sequences · T tokens each · W = T or T - 1 rows of hidden each · K scored tokens · D model

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from leanstep.logprob.checks import assert_all, check_float
from leanstep.logprob.inputs import Entropy, LogProbs, Transform, Tuning
from leanstep.logprob.layout import to_device
from leanstep.logprob.linear import counted_logprobs, linear_logprobs

_NO_ENTROPY = Literal["none"]


@overload
def masked_token_logprobs(
    hidden: Tensor, weight: Any, tokens: Tensor, mask: Tensor | None = None, *,
    entropy: _NO_ENTROPY = "none", temperature: float = 1.0, transform: Transform | None = None,
    max_rows: int | None = None, tuning: Tuning | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def masked_token_logprobs(
    hidden: Tensor, weight: Any, tokens: Tensor, mask: Tensor | None = None, *,
    entropy: Literal["metric", "grad"], temperature: float = 1.0, transform: Transform | None = None,
    max_rows: int | None = None, tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def masked_token_logprobs(
    hidden: Tensor,
    weight: Any,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    entropy: Entropy = "none",
    temperature: float = 1.0,
    transform: Transform | None = None,
    max_rows: int | None = None,
    tuning: Tuning | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-prob of each token of a padded batch given the tokens before it; 0 where the mask is 0.

    Equivalent to:
        logits = torch.nn.functional.linear(padded_hidden[:, :-1], weight).float() / temperature
        logp = torch.log_softmax(logits, -1).gather(-1, padded[:, 1:, None])[..., 0] * padded_mask[:, 1:]

    Args:
        hidden: [B, T, D], or [B, T - 1, D] if the last token was not fed to the model.
        weight: [V, D], or any head that `linear_logprobs` accepts.
        tokens: [B, T] ids. Masked tokens may have any value, including -100.
        mask: bool, or 0 and 1. [B, T]: one entry per token; the entry of the first token, which is never
            scored, is ignored. [B, T - 1]: without the first token. [B, K]: for the last K tokens. None:
            score all tokens.
        entropy: "none"; "metric": a value without gradient; "grad".
        temperature: > 0.
        transform: `Transform(scale, softcap)`.
        max_rows: on a GPU, an upper bound on the number of tokens that the mask selects. Avoids the host
            sync: `max_rows` rows are projected, and a device assertion fails if the mask selects more.
        tuning: as in `linear_logprobs`.

    Returns:
        [B, T - 1], or [B, K] for a mask of the last K tokens; fp32 (fp64 for fp64 input). With `entropy`, a
        pair of such tensors.

    Peak extra memory, GEMMs: those of `linear_logprobs` on the selected rows.
    Host reads: none if the mask is on the host, if `max_rows` is set or if there is no mask; otherwise one on
        a GPU, for the number of rows.
    """
    check_float("hidden", hidden, 3)
    if len(tokens) != len(hidden):
        raise ValueError(f"tokens: expected {len(hidden)} sequences to match hidden, got {len(tokens)}")
    selection = PaddedRows(tokens, mask, hidden.shape[1], hidden.device, max_rows)
    return selection.score(hidden, weight, entropy, temperature, transform, tuning)


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
        length = _checked_tokens(tokens, width)
        scored = length - 1 if mask is None else _checked_mask(mask, tokens)
        # Row t scores token t + 1, so the K rows before the last token score the last K tokens.
        before, after = length - 1 - scored, width - (length - 1)
        self.width, self.window = width, slice(before, before + scored)
        self.targets = _framed(to_device(tokens[:, length - scored :], device), before, after)
        self.counts: Tensor | None = None
        self.max_rows = max_rows
        if mask is None and not before and not after:
            return
        if mask is None:
            mask = torch.ones((len(tokens), scored), dtype=torch.bool, device="cpu")
        self.counts = _framed(mask[:, mask.shape[1] - scored :] != 0, before, after)
        if not torch.compiler.is_compiling():
            self.rows = _start_row_search(self.counts, device, max_rows)
        self.counts = to_device(self.counts, device)

    def score(
        self,
        hidden: Tensor,
        weight: Any,
        entropy: Entropy,
        temperature: float,
        transform: Transform | None,
        tuning: Tuning | None,
    ) -> Any:
        """Return the log-probs of the scored window and, if `entropy` is not "none", the entropies."""
        flat, targets = hidden.flatten(0, 1), self.targets
        options: dict[str, Any] = {"entropy": entropy, "temperature": temperature}
        options |= {"transform": transform, "tuning": tuning}
        if self.counts is None:
            out = linear_logprobs(flat, weight, targets, **options)
        elif torch.compiler.is_compiling():
            targets = torch.where(self.counts, targets, 0)
            out = counted_logprobs(flat, weight, targets, self.counts, **options)
        else:
            out = self._scored_rows(flat, weight, options)
        logp, spread = (None if x is None else x.view(-1, self.width)[:, self.window] for x in out[:2])
        return logp if entropy == "none" else (logp, spread)

    def _scored_rows(self, flat: Tensor, weight: Any, options: dict[str, Any]) -> LogProbs:
        num_rows, rows = flat.shape[0], self.rows()
        if self.max_rows is not None:
            # Unused slots compute row 0; the result is dropped.
            filled = rows >= 0
            places, rows = torch.where(filled, rows, num_rows), rows.clamp(min=0)
            targets = torch.where(filled, self.targets.index_select(0, rows), 0)
        else:
            places, targets = rows, self.targets.index_select(0, rows)
        out = linear_logprobs(flat, weight, targets, rows=rows, **options)

        def spread(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.new_zeros(num_rows + 1).index_copy(0, places, values)[:num_rows]

        logp = spread(out.logp)
        assert logp is not None
        return LogProbs(logp, spread(out.entropy))


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


def _checked_tokens(tokens: Tensor, width: int) -> int:
    """Return T of tokens [B, T]."""
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] - width not in (0, 1):
        expected = f"[B, {width}] or [B, {width + 1}] ids to match hidden"
        raise ValueError(f"tokens: expected {expected}, got {tokens.dtype} {tuple(tokens.shape)}")
    return tokens.shape[1]


def _checked_mask(mask: Tensor, tokens: Tensor) -> int:
    """Return K, the number of tokens per sequence that the mask covers."""
    length = tokens.shape[1]
    if mask.dim() != 2 or mask.shape[0] != tokens.shape[0] or not 0 < mask.shape[1] <= length:
        expected = f"[{tokens.shape[0]}, up to {length}]"
        raise ValueError(f"mask: expected {expected} to match tokens, got {tuple(mask.shape)}")
    return min(mask.shape[1], length - 1)
