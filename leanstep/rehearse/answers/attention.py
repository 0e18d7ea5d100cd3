"""A fused attention kernel on the tape: the right shapes and a price, no computation.

The price depends on the share of the T x S scores that is computed. With packed documents or a block mask,
that share depends on values of a tensor: the lengths, the counts of blocks. A captured graph holds for all
values, so there the tensor is an input of the call, and its rule computes the share when the graph runs.
"""

from __future__ import annotations

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


@torch.library.custom_op("leanstep_rehearse::fused_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, share: float, layout: str, kernel: str
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
    share: float,
    layout: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("a stand-in has shapes and a price, no values")


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, share: float, layout: str, kernel: str) -> tuple[Tensor, Tensor]:
    return _outputs(q, v, layout)


def _outputs(q: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    rows = q.shape[:-1] if layout == "bhtd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(rows, dtype=torch.float32)


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    share: float,
    layout: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.share, ctx.layout, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> Any:
    saved = ctx.saved_tensors
    return *_backward(*saved, grad.contiguous(), ctx.share, ctx.layout, ctx.kernel), None, None, None


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
    return _forward(q, k, v, share, layout, kernel)


# The same calls with a share that is not known yet; only captured graphs contain them.


@torch.library.custom_op("leanstep_rehearse::attention_by_values", mutates_args=())
def _late(
    q: Tensor, k: Tensor, v: Tensor, values: Tensor, numbers: list[int], layout: str, kernel: str
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("a captured graph replaces this call")


@torch.library.custom_op("leanstep_rehearse::attention_by_values_backward", mutates_args=())
def _late_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    values: Tensor,
    numbers: list[int],
    layout: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("a captured graph replaces this call")


@_late.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, values: Tensor, numbers: list[int], layout: str, kernel: str
) -> tuple[Tensor, Tensor]:
    return _outputs(q, v, layout)


@_late_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    values: Tensor,
    numbers: list[int],
    layout: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_late(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, values, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, values)


def _differentiate_late(ctx: Any, grad: Tensor, _: Any) -> Any:
    *saved, values = ctx.saved_tensors
    return *_late_backward(*saved, grad.contiguous(), values, *ctx.rest), None, None, None, None


_late.register_autograd(_differentiate_late, setup_context=_keep_late)


def _run(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, values: Tensor, numbers: Any, layout: str, kernel: str
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, RULES[kernel](tape, values, numbers), layout, kernel)


def _run_backward(tape: Tape, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, values, numbers, layout, kernel = args
    return _backward(*tensors, RULES[kernel](tape, values, numbers), layout, kernel)


# What a captured graph runs instead of the calls above, with the values known at that time.
WHEN_RUN = {
    torch.ops.leanstep_rehearse.attention_by_values.default: _run,
    torch.ops.leanstep_rehearse.attention_by_values_backward.default: _run_backward,
}


def attention_by_values(
    tape: Tape, kernel: str, q: Tensor, k: Tensor, v: Tensor, values: Tensor, numbers: list[int], layout: str
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a kernel of `RULES`, whose share of scores depends on `values`."""
    if torch.compiler.is_compiling():
        return _late(q, k, v, values, numbers, layout, kernel)
    return _run(tape, q, k, v, values, numbers, layout, kernel)


def install() -> None:
    """Register the prices."""
    register_cost("leanstep_rehearse::fused_attention", _price(False))
    register_cost("leanstep_rehearse::fused_attention_backward", _price(True))
