"""A fused attention kernel on the tape: the right shapes and a price, no computation.

The price depends on the share of the T x S scores that is computed. With packed documents or a block mask,
that share depends on values of a tensor: the lengths, the counts of blocks. A captured graph holds for all
values, so there the tensor is an input of the call, and its rule computes the share when the graph runs
(`WHEN_RUN`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.rehearse.kernel_costs import attention_kernel, register_cost
from leanstep.rehearse.tape import Tape

# Kernels written for the matrix instructions of Hopper, by the start of their name.
HOPPER = "flash_attn_3"
# Name of a kernel -> the share of its scores, from the tensor's values and the call's numbers.
Rule = Callable[[Tape, Tensor, Sequence[int]], float]
RULES: dict[str, Rule] = {}
# The share of a call whose values are not known yet.
UNKNOWN = -1.0


@torch.library.custom_op("leanstep_rehearse::fused_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor | None,
    numbers: list[int],
    share: float,
    layout: str,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("a stand-in has shapes and a price, no values")


@torch.library.custom_op("leanstep_rehearse::fused_attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    values: Tensor | None,
    numbers: list[int],
    share: float,
    layout: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("a stand-in has shapes and a price, no values")


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, layout, _kernel = rest
    rows = q.shape[:-1] if layout == "bhtd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(rows, dtype=torch.float32)


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, values, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, values)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> Any:
    *saved, values = ctx.saved_tensors
    return *_backward(*saved, grad.contiguous(), values, *ctx.rest), *[None] * 5


_forward.register_autograd(_differentiate, setup_context=_keep)


def _price(backward: bool) -> Callable[[Any], Any]:
    def cost(arguments: Any) -> Any:
        kernel = attention_kernel(
            arguments["q"],
            arguments["k"],
            backward=backward,
            share=arguments["share"],
            layout=arguments["layout"],
            variant="hopper" if arguments["kernel"].startswith(HOPPER) else "",
        )
        return kernel._replace(name=arguments["kernel"])

    return cost


def fused_attention(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, share: float, layout: str
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a fused attention kernel: shapes and a price.

    Args:
        kernel: its name in the recording.
        q, k, v: [B, H, T, D] (layout "bhtd"), [B, T, H, D] ("bthd") or [tokens, H, D] ("thd").
        share: part of the T x S scores that is computed.
    """
    return _forward(q, k, v, None, [], share, layout, kernel)


def attention_by_values(
    tape: Tape, kernel: str, q: Tensor, k: Tensor, v: Tensor, values: Tensor, numbers: list[int], layout: str
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a kernel of `RULES`, whose share of scores depends on `values`."""
    if torch.compiler.is_compiling():
        return _forward(q, k, v, values, numbers, UNKNOWN, layout, kernel)
    return _run(_forward, tape, q, k, v, values, numbers, UNKNOWN, layout, kernel)


def _run(op: Callable[..., Any], tape: Tape, *args: Any) -> Any:
    """Call an op above with the share that follows from the values known now."""
    *tensors, values, numbers, share, layout, kernel = args
    if values is not None:
        share = RULES[kernel](tape, values, numbers)
    return op(*tensors, None, [], share, layout, kernel)


# What a captured graph runs instead of the ops.
WHEN_RUN = {
    torch.ops.leanstep_rehearse.fused_attention.default: functools.partial(_run, _forward),
    torch.ops.leanstep_rehearse.fused_attention_backward.default: functools.partial(_run, _backward),
}


def install() -> None:
    """Register the prices."""
    register_cost("leanstep_rehearse::fused_attention", _price(False))
    register_cost("leanstep_rehearse::fused_attention_backward", _price(True))
