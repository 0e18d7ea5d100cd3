"""Other libraries' implementations, called as their docs recommend; imported only when they are measured."""

# R selected rows · S sequences · T positions · D model · V vocabulary

from __future__ import annotations

from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]
Constants = dict[str, Any]


def trl_divergence(t: Tensors, constants: Constants) -> Tensors:
    """Mean of TRL's chunked divergence of both heads on the same rows."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, teacher = (t[name].index_select(0, t["rows"]) for name in ("hidden", "teacher_hidden"))
    values, _ = ChunkedDivergenceFunction.apply(
        hidden, t["weight"], None, teacher, t["teacher_weight"], None, constants["beta"]
    )
    return {"loss": values.mean()}


def liger_jsd(t: Tensors, constants: Constants) -> Tensors:
    """Liger's chunked JSD on the same rows; without torch.compile, which does not help on a CPU here."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    hidden, teacher = (t[name].index_select(0, t["rows"]) for name in ("hidden", "teacher_hidden"))
    loss = LigerFusedLinearJSDLoss(0.0, 1.0, constants["beta"], compiled=False)
    labels = t["targets"].index_select(0, t["rows"])
    return {"loss": loss(hidden, t["weight"], teacher, t["teacher_weight"], labels)}


def liger_dpo(t: Tensors, constants: Constants) -> Tensors:
    """Liger's chunked DPO: it projects every position, including padding and prompts."""
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    loss = LigerFusedLinearDPOLoss(beta=0.1, compiled=False)
    hidden, ref_hidden = t["hidden"][:, :-1], t["ref_hidden"][:, :-1]
    outputs = loss(
        t["weight"],
        hidden.contiguous(),
        t["labels"][:, 1:].contiguous(),
        ref_input=ref_hidden.contiguous(),
        ref_weight=t["ref_weight"],
    )
    return {"loss": outputs[0]}
