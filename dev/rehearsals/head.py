"""The LM head at two sizes, one step per row, and the bare products of the same shapes.

The pace is set by an optimizer that has nothing to do: its step ends a row. Inputs and gradients are alive
until then, so that a row's peak beyond what is left at its end is what the head itself needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import leanstep.heads as lp

SMALL, LARGE = (205_280, 76_032, 2_560), (205_280, 151_936, 4_096)
pace = torch.optim.SGD([torch.zeros(1, device="cuda", requires_grad=True)], lr=0.0)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=True)


def selected(tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A quarter of the rows, their targets, and two vectors."""
    rows = torch.arange(tokens // 4, device="cuda") * 4
    vectors = [torch.ones(len(rows), device="cuda") for _ in range(2)]
    return rows, torch.randint(0, vocab, rows.shape, device="cuda"), vectors


def bare(tokens: int, vocab: int, width: int, projections: int = 2) -> None:
    with torch.no_grad():
        hidden, weight = empty(tokens // 4, width), empty(vocab, width)
        for _ in range(projections):
            logits = hidden @ weight.t()
        gradients = logits @ weight, logits.t() @ hidden
    pace.step()
    del gradients


def head(tokens: int, vocab: int, width: int, *, entropy: Any = "grad", **how: Any) -> None:
    """how: frozen, finished (bias, softcap), autocast; the rest goes to `linear_logprobs`."""
    frozen, finished, autocast = (how.pop(n, False) for n in ("frozen", "finished", "autocast"))
    hidden, weight = (
        empty(tokens, width),
        empty(vocab, width, dtype=torch.float32 if autocast else torch.bfloat16),
    )
    weight.requires_grad_(not frozen)
    rows, targets, vectors = selected(tokens, vocab)
    if how.pop("per_row", False):
        how["temperature"] = vectors[0]
    lm_head = lp.Head(weight, empty(vocab), softcap=30.0) if finished else lp.Head(weight)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        out = lp.linear_logprobs(hidden, lm_head, targets, rows=rows, entropy=entropy, **how)
    values = [v for v in (out.logp, out.entropy) if v is not None]
    torch.autograd.backward(values, vectors[: len(values)])
    pace.step()


def policy(tokens: int, vocab: int, width: int) -> None:
    hidden, weight = empty(tokens, width), empty(vocab, width)
    rows, targets, vectors = selected(tokens, vocab)
    options = {"clip_high": 0.28, "kl_coef": 0.04, "entropy_coef": 0.01}
    options |= {"mask": vectors[0], "ref_logp": vectors[1]}
    lp.linear_policy_loss(hidden, weight, targets, *vectors, rows=rows, **options).loss.backward()  # type: ignore[arg-type]
    pace.step()


def logits(num_rows: int, vocab: int) -> None:
    logits_ = empty(num_rows, vocab)
    targets, vectors = torch.randint(0, vocab, (num_rows,), device="cuda"), selected(4 * num_rows, vocab)[2]
    out = lp.token_logprobs(logits_, targets, entropy="grad")
    torch.autograd.backward([out.logp, out.entropy], vectors)  # type: ignore[list-item]
    pace.step()


def peer(name: str, tokens: int, vocab: int, width: int) -> None:
    """A peer on the same rows; nothing where it is not installed."""
    from benchmarks import logprob_peers as peers

    rows, _, vectors = selected(tokens, vocab)
    tensors = {"hidden": empty(tokens, width), "weight": empty(vocab, width), "rows": rows}
    tensors["targets"] = torch.randint(0, vocab, (tokens,), device="cuda")
    try:
        outputs = getattr(peers, name)(tensors, {})
        torch.autograd.backward(list(outputs.values()), vectors[: len(outputs)])
    except ImportError:
        pass
    pace.step()


def torch_head(tokens: int, vocab: int, width: int) -> None:
    """F.linear_cross_entropy, a summed loss without entropy: one opaque op, so its loop is called itself."""
    from torch.nn.modules import linear_cross_entropy as own

    rows, targets, vectors = selected(tokens, vocab)
    with torch.no_grad():
        hidden, weight = empty(tokens, width), empty(vocab, width)
        shape = {"num_batches": len(rows), "in_features": width, "num_classes": vocab}
        chosen = torch.nn.LinearCrossEntropyOptions()._adjust(
            **shape, dtype=hidden.dtype, device=hidden.device
        )
        how = (chosen.batch_chunk_size, chosen.acc_policy, chosen.acc_dtype, True, True, False)
        chunked = own._linear_cross_entropy_batch_chunked_accumulator
        outputs = chunked(hidden[rows], weight, targets, None, None, "sum", -100, 0.0, *how)
        gradients = [gradient * vectors[0][0] for gradient in outputs[1:3]]
        gradients[0] = torch.zeros_like(hidden).index_add_(0, rows, gradients[0])
    pace.step()
    del outputs, gradients


Case = Callable[[], None]
CASES: list[Case] = [
    lambda: head(4_096, 1_024, 256),
    lambda: bare(*SMALL),
    lambda: bare(*SMALL, projections=1),
    lambda: head(*SMALL),
    lambda: head(*SMALL, per_row=True, finished=True),
    lambda: head(*SMALL, frozen=True, entropy="none"),
    lambda: head(*SMALL, frozen=True),
    lambda: policy(*SMALL),
    lambda: bare(*LARGE),
    lambda: head(*LARGE),
    lambda: head(*LARGE, autocast=True),
    lambda: bare(4_096, *LARGE[1:]),
    lambda: head(4_096, *LARGE[1:]),
    lambda: logits(8_192, LARGE[1]),
    lambda: peer("verl_same_rows", *SMALL),
    lambda: peer("trl_same_rows", *SMALL),
    lambda: peer("liger_logprob", *SMALL),
    lambda: peer("verl_same_rows", *LARGE),
    lambda: torch_head(*SMALL),
]

for case in CASES:
    case()
    # What the row left behind is gone before the next begins.
    pace.step()
