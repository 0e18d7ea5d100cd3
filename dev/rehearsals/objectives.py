"""The objectives at 76,032 ids and width 2,560, one step a row, and the bare products of the same shapes.

Distillation also at the sizes of Llama 3. Rows are cut as in head.py: the step of an optimizer that has
nothing to do ends one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import leanstep.heads as ob

SEQUENCES, TOKENS, VOCAB, WIDTH, WIDE = 8, 4_096, 76_032, 2_560, 4_096
pace = torch.optim.SGD([torch.zeros(1, device="cuda", requires_grad=True)], lr=0.0)


def empty(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda", requires_grad=grad)


def labels(vocab: int = VOCAB) -> torch.Tensor:
    """As a data loader gives them, on the host: the last quarter of every sequence counts."""
    ids = torch.randint(vocab, (SEQUENCES, TOKENS))
    ids[:, : TOKENS * 3 // 4] = -100
    return ids


NUM_ROWS = SEQUENCES * TOKENS // 4


def bare(projections: tuple[int, ...], vocab: int = VOCAB) -> None:
    """Logits of heads of these widths, then the gradients of the last one's inputs."""
    with torch.no_grad():
        for width in projections:
            hidden, weight = empty(NUM_ROWS, width), empty(vocab, width)
            logits = hidden @ weight.t()
        gradients = logits @ weight, logits.t() @ hidden
    pace.step()
    del gradients


def distill(
    kind: Any,
    sizes: tuple[int, int, int] = (WIDE, WIDTH, VOCAB),
    *,
    tokens: int = SEQUENCES * TOKENS,
) -> None:
    wide, width, vocab = sizes
    hidden, weight = empty(tokens, width), empty(vocab, width)
    teacher = ob.TeacherHead(empty(tokens, wide, grad=False), empty(vocab, wide, grad=False))
    rows = torch.arange(tokens // 4, device="cuda") * 4
    ob.linear_distill_loss(hidden, weight, teacher, divergence=kind, rows=rows).loss.backward()
    pace.step()


def preference(kind: str) -> None:
    hidden, weight = empty(SEQUENCES, TOKENS, WIDTH), empty(VOCAB, WIDTH)
    reference = ob.TeacherHead(empty(SEQUENCES, TOKENS, WIDTH, grad=False), empty(VOCAB, WIDTH, grad=False))
    options: dict[str, Any] = {"objective": kind, "reference": reference}
    if kind == "kto":
        options["desirable"] = torch.arange(SEQUENCES, device="cuda") % 2 == 0
    ob.linear_preference_loss(hidden, weight, labels(), **options).loss.backward()
    pace.step()


def cross_entropy() -> None:
    hidden, weight = empty(SEQUENCES, TOKENS, WIDTH), empty(VOCAB, WIDTH)
    ob.linear_cross_entropy(hidden, weight, labels()).backward()
    pace.step()


def masked(device: str = "cpu") -> None:
    """`device`: where the sampler left its ids."""
    hidden, weight = empty(NUM_ROWS, WIDTH), empty(VOCAB, WIDTH)
    ids, offsets = torch.randint(VOCAB, (8 * NUM_ROWS,)), torch.arange(0, 8 * NUM_ROWS + 1, 8)
    allowed, targets = (ids.to(device), offsets), torch.randint(VOCAB, (NUM_ROWS,), device="cuda")
    out = ob.linear_logprobs(hidden, weight, targets, allowed=allowed, entropy="grad")
    torch.autograd.backward([out.logp, out.entropy], [torch.ones_like(out.logp)] * 2)  # type: ignore[list-item]
    pace.step()


CASES: list[Callable[[], None]] = [
    lambda: distill("forward_kl", tokens=4_096),
    lambda: bare((WIDE, WIDTH)),
    lambda: distill(("jsd", 0.5)),
    lambda: distill("forward_kl"),
    # A head alone computes its logits twice on a GPU.
    lambda: bare((WIDTH, WIDTH, WIDTH)),
    lambda: preference("dpo"),
    lambda: preference("kto"),
    lambda: bare((WIDTH, WIDTH)),
    cross_entropy,
    masked,
    # Llama 3's 8B learns from its 70B.
    lambda: bare((8_192, 4_096), 128_256),
    lambda: distill(("jsd", 0.5), (8_192, 4_096, 128_256)),
]

for case in CASES:
    case()
    # What the row left behind is gone before the next begins.
    pace.step()
