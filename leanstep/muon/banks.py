"""Parameter banks: matrices of equal shape in one tensor, which a training step unbinds once.

With `bank[i]` inside a loop over layers, autograd writes one zero-filled gradient of the whole bank per layer
and sums them. The backward of `unbind` on the flattened bank is a single `stack`.
"""

from __future__ import annotations

from torch import Tensor


def unbind_bank(bank: Tensor) -> tuple[Tensor, ...]:
    """Return every matrix of a bank [..., rows, cols] as a view.

    Equivalent to:
        matrices = tuple(bank.flatten(0, -3)[i] for i in range(bank.flatten(0, -3).shape[0]))

    Args:
        bank: [..., rows, cols], at least three dimensions.

    Returns:
        views [rows, cols], the leading dimensions in order.

    Peak extra memory: none forward; backward one `stack` of the gradients, where indexing writes and adds a
        zero-filled gradient of the whole bank per matrix.
    Use something else when: a step uses one matrix of many; `bank[i]` is just as good then.
    """
    if bank.dim() < 3:
        raise ValueError(
            f"bank: expected [..., rows, cols] with at least 3 dimensions, got {tuple(bank.shape)}"
        )
    return bank.flatten(0, -3).unbind(0)
