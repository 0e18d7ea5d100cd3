"""Other libraries' ways to the same losses, called as they are meant to be; imported only when measured."""

# R selected rows · S sequences · T positions · D model · V vocabulary

from __future__ import annotations

from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]
Constants = dict[str, Any]


def trl_divergence(t: Tensors, constants: Constants) -> Tensors:
    """TRL's chunked divergence of both heads on the same rows; its mean."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, far = (t[name].index_select(0, t["rows"]) for name in ("hidden", "teacher_hidden"))
    values, _ = ChunkedDivergenceFunction.apply(
        hidden, t["weight"], None, far, t["teacher_weight"], None, constants["beta"]
    )
    return {"loss": values.mean()}


def liger_jsd(t: Tensors, constants: Constants) -> Tensors:
    """Liger's chunked JSD on the same rows; without torch.compile, which a CPU does not profit from here."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    hidden, far = (t[name].index_select(0, t["rows"]) for name in ("hidden", "teacher_hidden"))
    loss = LigerFusedLinearJSDLoss(0.0, 1.0, constants["beta"], compiled=False)
    labels = t["targets"].index_select(0, t["rows"])
    return {"loss": loss(hidden, t["weight"], far, t["teacher_weight"], labels)}


def liger_dpo(t: Tensors, constants: Constants) -> Tensors:
    """Liger's chunked DPO: every position is projected, padding and prompts too."""
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(beta=0.1, compiled=False)
    hidden, far = t["hidden"][:, :-1], t["ref_hidden"][:, :-1]
    found = loss(
        t["weight"],
        hidden.contiguous(),
        t["labels"][:, 1:].contiguous(),
        ref_input=far.contiguous(),
        ref_weight=t["ref_weight"],
    )
    return {"loss": found[0]}
