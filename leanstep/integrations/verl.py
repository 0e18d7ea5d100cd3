"""verl: log-probs and entropy of its actors, with verl's own names and signatures.

    from verl.utils.experimental import torch_functional as fused
    apply_leanstep(fused)                         # use_fused_kernels=True, backend "torch": hidden states

    import verl.utils.torch_functional as plain
    from verl.workers.engine.fsdp import transformer_impl
    apply_leanstep(plain, transformer_impl)       # without fused kernels: materialised logits

Call it once in every worker, before its engine is built. verl's model forwards look up `FusedLinearForPPO` at
run time, so that one replaced name serves every model family.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leanstep.heads import linear_logprobs, token_logprobs
from leanstep.integrations.versions import require_version

__all__ = ["apply_leanstep"]
TESTED = ("0.9",)


class FusedLinearForPPO(nn.Module):
    """Replaces verl's class: log-probs and entropy from hidden states and the head, one tile at a time.

    Args:
        chunk_size, impl_backend: accepted for compatibility with verl and ignored.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float = 1.0,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs in fp32 and the entropy in the dtype of `hidden_states`, both with gradient.

        Args:
            hidden_states: [T, D] or [B, T, D].
            vocab_weights: [V, D].
            input_ids: [T] or [B, T], what each row predicts (rolled already, as verl does it).
            rows: [R] int64, leanstep's own: rows of the flattened batch that matter (responses); only they
                are projected, the others have log-prob 0 and entropy 0.
        """
        if hidden_states.dim() not in (2, 3) or input_ids.shape != hidden_states.shape[:-1]:
            expected = "[T, D] and [T], or [B, T, D] and [B, T]"
            got = f"{tuple(hidden_states.shape)} and {tuple(input_ids.shape)}"
            raise ValueError(f"hidden_states, input_ids: expected {expected}, got {got}")
        targets = input_ids.reshape(-1).long()
        scored = linear_logprobs(
            hidden_states.reshape(-1, hidden_states.shape[-1]),
            vocab_weights,
            targets if rows is None else targets.index_select(0, rows),
            rows=rows,
            entropy="grad",
            temperature=temperature,
        )
        logp, entropy = scored.logp, scored.entropy
        assert entropy is not None
        if rows is not None:
            logp, entropy = (v.new_zeros(len(targets)).index_copy(0, rows, v) for v in (logp, entropy))
        return logp.float().view(input_ids.shape), entropy.to(hidden_states.dtype).view(input_ids.shape)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return the log-prob of each label under materialised logits, [..., V] -> [...].

    With `inplace_backward` the gradient is written over the logits where it fits into them: contiguous fp32
    logits that an operation made, as flash-attn's kernel does it for verl on a GPU.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    owner = flat if flat._base is None else flat._base
    fits = flat.dtype in (torch.float32, torch.float64) and flat.is_contiguous()
    reuses = inplace_backward and fits and flat.requires_grad and not (flat.is_leaf or owner.is_leaf)
    scored = token_logprobs(flat, labels.reshape(-1).long(), reuse_buffer=reuses)
    return scored.logp.view(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits), [..., V] -> [...], in chunks and with its gradient."""
    flat = logits.reshape(-1, logits.shape[-1])
    anything = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
    entropy = token_logprobs(flat, anything, entropy="grad").entropy
    assert entropy is not None
    return entropy.view(logits.shape[:-1])


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Alias under verl's other name; leanstep chooses the chunks."""
    return entropy_from_logits(logits)


REPLACED = {
    function.__name__: function
    for function in (
        FusedLinearForPPO,
        logprobs_from_logits,
        entropy_from_logits,
        entropy_from_logits_with_chunking,
    )
}


def apply_leanstep(*modules: Any, allow_untested: bool = False) -> tuple[Any, ...]:
    """Replace functions in modules of verl by those of this file, by name, and return the modules.

    Args:
        modules: modules whose functions are called, for example `verl.utils.experimental.torch_functional`.
        allow_untested: try a verl version this was not tested with.

    Raises:
        UnknownVersion, ValueError: a module that has none of the names is refused, before anything changes.
    """
    require_version("verl", TESTED, allow_untested=allow_untested)
    if not modules:
        raise ValueError("modules: expected modules of verl, got none")
    for module in modules:
        if not any(hasattr(module, name) for name in REPLACED):
            name = getattr(module, "__name__", type(module).__name__)
            raise ValueError(f"modules: expected one with any of {', '.join(REPLACED)}, got {name}")
    for module in modules:
        for name, ours in REPLACED.items():
            if hasattr(module, name):
                setattr(module, name, ours)
    return modules
