"""Recurrent layers, packed sequences and the CTC loss, as a device runs them.

`nn.LSTM`, `nn.GRU` and `nn.RNN` are one cuDNN call for the whole sequence: an op with its shapes and a
price replaces torch's fallback, which would launch several kernels per time step. The CTC loss is a stand-in
of the same kind. GRU cells are torch kernels without a fake implementation; their shapes are defined here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.flops import operand_type
from leanstep.rehearse.events import Kernel
from leanstep.rehearse.kernel_costs import register_cost
from leanstep.rehearse.tape import Tape

# Matrices per weight: input, forget, cell and output gate; reset, update and new gate; one.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_LIBRARY = torch.library.Library("aten", "IMPL")


def install(tape: Tape) -> None:
    """Replace torch's recurrent functions for device tensors."""
    register_cost("leanstep_rehearse::recurrent", _forward_cost)
    register_cost("leanstep_rehearse::recurrent_backward", _backward_cost)
    functions: Any = torch._VF
    for mode in GATES:
        setattr(functions, mode, _layer(mode, getattr(functions, mode)))
    functions._pack_padded_sequence = _packing(functions._pack_padded_sequence)
    torch.ctc_loss = _ctc(torch.ctc_loss)  # pyright: ignore[reportAttributeAccessIssue]
    _register_cells()


# cuDNN's recurrent layers


@torch.library.custom_op("leanstep_rehearse::recurrent", mutates_args=())
def _recurrent(
    x: Tensor,
    weights: list[Tensor],
    h0: Tensor,
    c0: Tensor | None,
    gates: int,
    layers: int,
    directions: int,
    steps: int,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise NotImplementedError("a stand-in has shapes and a price, no values")


@_recurrent.register_fake
def _(
    x: Tensor,
    weights: list[Tensor],
    h0: Tensor,
    c0: Tensor | None,
    gates: int,
    layers: int,
    directions: int,
    steps: int,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, last states, and what the backward reads: gates and states of every step."""
    output = x.new_empty(*x.shape[:-1], directions * h0.shape[-1])
    last = torch.empty_like(h0 if c0 is None else c0)
    hidden = last.shape[-1]
    per_element = gates + (1 if c0 is None else 2)
    rows = x.numel() // x.shape[-1]
    reserve = x.new_empty(layers * directions * per_element * rows * hidden if keeps else 0)
    return output, torch.empty_like(h0), last, reserve


@torch.library.custom_op("leanstep_rehearse::recurrent_backward", mutates_args=())
def _recurrent_backward(
    grad: Tensor,
    x: Tensor,
    output: Tensor,
    weights: list[Tensor],
    h0: Tensor,
    reserve: Tensor,
    gates: int,
    layers: int,
    directions: int,
    steps: int,
) -> list[Tensor]:
    raise NotImplementedError("a stand-in has shapes and a price, no values")


@_recurrent_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    output: Tensor,
    weights: list[Tensor],
    h0: Tensor,
    reserve: Tensor,
    gates: int,
    layers: int,
    directions: int,
    steps: int,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (x, h0, *weights)]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, h0, c0, *ctx.sizes, _ = inputs
    ctx.c0 = c0
    ctx.count = len(weights)
    ctx.save_for_backward(x, output[0], h0, output[3], *weights)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
    x, output, h0, reserve, *weights = ctx.saved_tensors
    grad = torch.zeros_like(output) if grad is None else grad.contiguous()
    of_x, of_h0, *of_weights = _recurrent_backward(grad, x, output, weights, h0, reserve, *ctx.sizes)
    of_c0 = None if ctx.c0 is None else torch.empty_like(ctx.c0)
    return of_x, of_weights, of_h0, of_c0, None, None, None, None, None


_recurrent.register_autograd(_differentiate, setup_context=_keep)


def _layer(mode: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `torch._VF.lstm` and similar functions, for padded and packed calls."""

    def padded(
        x: Tensor,
        states: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        h0, c0 = states if mode == "lstm" else (states, None)
        steps = x.shape[1 if batch_first else 0]
        return run(x, h0, c0, weights, layers, bidirectional, steps, train)

    def packed(
        x: Tensor,
        batch_sizes: Tensor,
        states: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        h0, c0 = states if mode == "lstm" else (states, None)
        return run(x, h0, c0, weights, layers, bidirectional, batch_sizes.numel(), train)

    def run(
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        weights: Sequence[Tensor],
        layers: int,
        bidirectional: bool,
        steps: int,
        train: bool,
    ) -> Any:
        weights = list(weights)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            x, h0, weights = x.to(dtype), h0.to(dtype), [w.to(dtype) for w in weights]
            c0 = None if c0 is None else c0.to(dtype)
        directions = 2 if bidirectional else 1
        output, h, c, _reserve = _recurrent(
            x.contiguous(), weights, h0, c0, GATES[mode], layers, directions, steps, train
        )
        return (output, h) if c0 is None else (output, h, c)

    def layer(x: Tensor, second: Any, *others: Any) -> Any:
        on_device = x.device.type == "cuda" and torch.backends.cudnn.enabled
        if not on_device:
            return plain(x, second, *others)
        is_packed = isinstance(second, Tensor) and second.device.type == "cpu"
        return packed(x, second, *others) if is_packed else padded(x, second, *others)

    return layer


class _Work:
    """Sizes and matrix products of a call. float32 runs as TF32 if cuDNN may use it."""

    def __init__(self, arguments: Mapping[str, Any]):
        x = arguments["x"]
        self.x, self.gates, self.hidden = x, arguments["gates"], arguments["h0"].size[-1]
        self.rows, self.steps = x.numel // x.size[-1], max(1, arguments["steps"])
        self.batch = max(1, self.rows // self.steps)
        directions = arguments["directions"]
        inner = [x.size[-1], *[directions * self.hidden] * (arguments["layers"] - 1)]
        # The size of each layer's input, once per direction.
        self.inputs = [size for size in inner for _ in range(directions)]
        self.dtype = operand_type(x.dtype, torch.backends.cudnn.allow_tf32)

    def product(self, rows: int, columns: int, inner: int) -> Kernel:
        moved = self.x.width * (rows * inner + inner * columns + rows * columns)
        return Kernel("gemm", moved, 2.0 * rows * columns * inner, self.dtype, (1, rows, columns, inner))

    def steps_of(self, product: Kernel, passes: int) -> list[Kernel]:
        """Return one product and one pass over gates and states per time step."""
        moved = passes * self.batch * self.hidden * self.x.width
        return [product, Kernel("pointwise", moved, 0.0, self.x.dtype)] * self.steps


def _forward_cost(arguments: Mapping[str, Any]) -> list[Kernel]:
    """Price, per layer and direction, one product with the whole input, then the time steps."""
    work = _Work(arguments)
    width = work.gates * work.hidden
    kernels: list[Kernel] = []
    for inner in work.inputs:
        kernels.append(work.product(work.rows, width, inner))
        kernels += work.steps_of(work.product(work.batch, width, work.hidden), 2 * work.gates + 3)
    return kernels


def _backward_cost(arguments: Mapping[str, Any]) -> list[Kernel]:
    """Price, per layer and direction, the time steps, then the gradients of the input and both weights."""
    work = _Work(arguments)
    width = work.gates * work.hidden
    kernels: list[Kernel] = []
    for inner in work.inputs:
        kernels += work.steps_of(work.product(work.batch, work.hidden, width), 3 * work.gates + 3)
        kernels.append(work.product(work.rows, inner, width))
        kernels.append(work.product(width, inner, work.rows))
        kernels.append(work.product(width, work.hidden, work.rows))
    return kernels


# Packed sequences


def _packing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """Copy steps with the same number of live sequences together. `lengths` is on the host."""
        if x.device.type != "cuda":
            return plain(x, lengths, batch_first)
        longest = int(lengths.max())
        batch_sizes = (lengths[None, :] > torch.arange(longest, device=lengths.device)[:, None]).sum(1)
        steps = x.transpose(0, 1) if batch_first else x
        parts, first = [], 0
        for live, run in itertools.groupby(batch_sizes.tolist()):
            count = len(list(run))
            parts.append(steps[first : first + count, :live].flatten(0, 1))
            first += count
        return torch.cat(parts), batch_sizes

    return pack


# The CTC loss


@torch.library.custom_op("leanstep_rehearse::ctc_loss", mutates_args=())
def _ctc_loss(log_probs: Tensor, targets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("a stand-in has shapes and a price, no values")


@_ctc_loss.register_fake
def _(log_probs: Tensor, targets: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return one loss per sequence, and what the backward reads: one value per step and state."""
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


@torch.library.custom_op("leanstep_rehearse::ctc_loss_backward", mutates_args=())
def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, targets: Tensor, alpha: Tensor) -> Tensor:
    raise NotImplementedError("a stand-in has shapes and a price, no values")


@_ctc_loss_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, targets: Tensor, alpha: Tensor) -> Tensor:
    return torch.empty_like(log_probs)


def _keep_states(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _differentiate_ctc(ctx: Any, grad: Tensor, _: Any) -> Any:
    return _ctc_loss_backward(grad.contiguous(), *ctx.saved_tensors), None, None


_ctc_loss.register_autograd(_differentiate_ctc, setup_context=_keep_states)


def _ctc(plain: Callable[..., Any]) -> Callable[..., Any]:
    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Tensor:
        """Launch the kernel for lengths that the host has read. reduction: 0 none, 1 mean, 2 sum."""
        if log_probs.device.type != "cuda":
            return plain(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        lengths = (input_lengths, target_lengths)
        input_lengths, target_lengths = (n.tolist() if isinstance(n, Tensor) else n for n in lengths)
        longest = targets.shape[1] if targets.dim() == 2 else max(target_lengths, default=0)
        batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
        loss, _alpha = _ctc_loss(batched, targets, longest)
        if zero_infinity:
            loss = torch.where(loss == torch.inf, 0.0, loss)
        if reduction == 1:
            divisors = torch.tensor(target_lengths, dtype=loss.dtype, device=loss.device).clamp_min(1)
            return (loss / divisors).mean()
        return loss.sum() if reduction == 2 else loss.view(batched.shape[1] if log_probs.dim() == 3 else ())

    return ctc_loss


# GRU cells: torch kernels without a fake implementation


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_: Any) -> Any:
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    rows, hidden = grad.shape
    of_gates = [grad.new_empty(rows, 3 * hidden) for _ in range(2)]
    of_biases = [grad.new_empty(3 * hidden if has_bias else 0) for _ in range(2)]
    return *of_gates, torch.empty_like(grad), *of_biases


def _register_cells() -> None:
    shapes = {"_thnn_fused_gru_cell": _gru_cell, "_thnn_fused_gru_cell_backward": _gru_cell_backward}
    for name, implementation in shapes.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _LIBRARY.impl(name, implementation, "Meta")
