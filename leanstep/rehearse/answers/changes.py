"""Changes to a program, applied to torch before the program starts (names: `what_if.CHANGES`).

A different head, checkpointed blocks, a smaller batch, other or sharded optimizers, FSDP2 around the blocks.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from leanstep.rehearse.cuda_allocator import live_at
from leanstep.rehearse.events import Alloc
from leanstep.rehearse.tape import Tape

OPTIMIZERS = ("AdamW", "Adam", "SGD")
# Number of ranks if a multi-rank change does not name one.
RANKS = 8


def install(tape: Tape, changes: Iterable[str]) -> None:
    """Apply changes to torch. Call this only in the rehearsal process."""
    for change in changes:
        name, _, value = change.partition(":")
        if name == "fsdp":
            _install_fsdp(tape, int(value or RANKS))
        elif name in _INSTALLERS:
            _INSTALLERS[name](value)
        else:
            known = ", ".join((*_INSTALLERS, "fsdp"))
            raise ValueError(f"change: expected one of {known}, got {change!r}")


def _install_checkpoint(_: str) -> None:
    """Recompute the blocks of a ModuleList or Sequential (two or more of one class) in the backward pass."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    def wrap(module: nn.Module) -> None:
        if "forward" in module.__dict__ or not any(True for _ in module.parameters()):
            return
        forward = module.forward

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        module.forward = recomputed

    for container in (nn.ModuleList, nn.Sequential):
        iterate = container.__iter__

        def walked(self: Any, iterate: Any = iterate) -> Any:
            for block in repeated_blocks(self):
                wrap(block)
            return iterate(self)

        container.__iter__ = walked  # pyright: ignore[reportAttributeAccessIssue]


def repeated_blocks(container: Any) -> list[Any]:
    """Return the blocks of a ModuleList or Sequential: two or more of one class, not single layers."""
    from torch import nn

    blocks = list(container._modules.values())
    kinds = Counter(type(block) for block in blocks)
    single = (nn.Linear, nn.Embedding, nn.LayerNorm)
    return [block for block in blocks if kinds[type(block)] > 1 and not isinstance(block, single)]


def _install_micro_batch(value: str) -> None:
    from torch.utils import data

    build, divisor = data.DataLoader.__init__, int(value or 2)

    def smaller(self: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        build(self, dataset, max(1, batch_size // divisor) if batch_size else batch_size, *args, **kwargs)

    data.DataLoader.__init__ = smaller  # pyright: ignore[reportAttributeAccessIssue]


def _install_normuon(_: str) -> None:
    """Replace Adam, AdamW and SGD by NorMuon: Muon for hidden matrices, its Adam for the rest."""
    import torch

    from leanstep.muon import NorMuon

    def build(params: Any, lr: Any = 1e-3, *args: Any, **kwargs: Any) -> Any:
        groups = list(params)
        every = [p for g in groups for p in (g["params"] if isinstance(g, dict) else [g])]
        # Embeddings and heads have far more rows than columns: they use Adam.
        hidden = [p for p in every if p.ndim == 2 and max(p.shape) < 8 * min(p.shape)]
        chosen = {id(p) for p in hidden}
        rest = [p for p in every if id(p) not in chosen]
        candidates = [{"params": hidden, "algorithm": "normuon"}, {"params": rest, "algorithm": "adam"}]
        return NorMuon([group for group in candidates if group["params"]], lr=0.02)

    for name in OPTIMIZERS:
        setattr(torch.optim, name, build)


def _install_bf16_state(_: str) -> None:
    """Run Adam and AdamW with bf16 moments, widened for one parameter at a time."""
    import torch

    class Adam(torch.optim.Optimizer):
        def __init__(
            self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, **more: Any
        ):
            decay = more.get("weight_decay", 0.0)
            super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                with torch.enable_grad():
                    closure = closure()
            for group in self.param_groups:
                first, second = group["betas"]
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        for name in ("exp_avg", "exp_avg_sq"):
                            state[name] = torch.zeros_like(p, dtype=torch.bfloat16)
                    grad, mean, square = p.grad.float(), state["exp_avg"].float(), state["exp_avg_sq"].float()
                    mean.lerp_(grad, 1 - first)
                    square.mul_(second).addcmul_(grad, grad, value=1 - second)
                    state["exp_avg"].copy_(mean)
                    state["exp_avg_sq"].copy_(square)
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.addcdiv_(mean, square.sqrt_().add_(group["eps"]), value=-group["lr"])
            return closure

    for name in ("AdamW", "Adam"):
        setattr(torch.optim, name, Adam)


def _join(ranks: int) -> None:
    """Create a group of this many ranks if the program has none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", world_size=ranks)


def _install_zero1(value: str) -> None:
    """Wrap torch's optimizers in its ZeroRedundancyOptimizer."""
    import torch

    def wrapped(plain: Any) -> Any:
        def build(params: Any, *args: Any, **kwargs: Any) -> Any:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            _join(int(value or RANKS))
            options = dict(zip(("lr",), args, strict=False)) | kwargs
            return ZeroRedundancyOptimizer(list(params), optimizer_class=plain, **options)

        return build

    for name in OPTIMIZERS:
        setattr(torch.optim, name, wrapped(getattr(torch.optim, name)))


def _install_fsdp(tape: Tape, ranks: int) -> None:
    """Apply FSDP2 to every repeated block and to the model when the program builds its first optimizer.

    Earlier events are removed from the tape, except live allocations: a sharded program starts in this state.
    """
    import torch

    construct = torch.optim.Optimizer.__init__
    sharded: dict[int, Any] = {}

    def build(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        groups = [dict(g) if isinstance(g, dict) else g for g in params]
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for group in groups:
            members = group["params"]
            group["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
        if not sharded:
            _join(ranks)
            sharded.update(_shard_modules({id(p) for group in groups for p in group["params"]}))
        for group in groups:
            group["params"] = [sharded.get(id(p), p) for p in group["params"]]
        gc.collect()
        _forget_setup(tape)
        construct(self, groups, *args, **kwargs)

    torch.optim.Optimizer.__init__ = build  # pyright: ignore[reportAttributeAccessIssue]


def _shard_modules(wanted: set[int]) -> dict[int, Any]:
    """Shard the modules that hold these parameters. Return parameter id -> its replacement."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    modules: list[Any] = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    holding = [m for m in modules if any(id(p) in wanted for p in m.parameters())]
    inside = {id(child) for m in holding for child in m.children()}
    places = [(id(p), m, name) for m in holding for name, p in m._parameters.items() if p is not None]
    for root in [m for m in holding if id(m) not in inside]:
        for container in root.modules():
            if isinstance(container, nn.ModuleList | nn.Sequential):
                for block in repeated_blocks(container):
                    fully_shard(block)
        fully_shard(root)
    return {key: getattr(module, name) for key, module, name in places}


def _forget_setup(tape: Tape) -> None:
    record = tape.recording
    alive = [record.storages[number] for number in live_at(record.events, len(record.events))]
    record.events[:] = [Alloc(s.number, s.nbytes, s.line, s.phase, s.step) for s in alive]
    tape.peak_bytes = tape.live_bytes


def _install_lean_head(_: str) -> None:
    """Defer the logits of a wide linear layer until something other than their cross-entropy needs them."""
    from torch import nn
    from torch.nn import functional

    linear = functional.linear
    lazy = _lazy_logits(linear)

    def wide_linear(input: Any, weight: Any, bias: Any = None) -> Any:
        wide = weight.dim() == 2 and weight.shape[0] >= max(8192, 4 * weight.shape[1])
        if wide and input.device.type == "cuda" and input.requires_grad:
            return lazy(input, weight, bias)
        return linear(input, weight, bias)

    functional.linear = wide_linear  # pyright: ignore[reportAttributeAccessIssue]
    nn.Linear.forward = lambda self, input: wide_linear(input, self.weight, self.bias)


def _lazy_logits(linear: Any) -> Any:
    import torch
    from torch.nn import functional

    unchanged = torch._C.DisableTorchFunctionSubclass
    asking = {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point}
    reshaping = {
        torch.Tensor.view,
        torch.Tensor.reshape,
        torch.Tensor.flatten,
        torch.Tensor.contiguous,
        torch.Tensor.float,
        torch.Tensor.to,
        torch.Tensor.__getitem__,
    }

    class Logits(torch.Tensor):
        """The result of `linear(hidden, weight, bias)`, computed on first use."""

        hidden: Any
        head: Any

        @staticmethod
        def __new__(cls: Any, hidden: Any, weight: Any, bias: Any, dtype: Any = None) -> Any:
            size = (*hidden.shape[:-1], weight.shape[0])
            self = torch.Tensor._make_wrapper_subclass(
                cls, size, dtype=dtype or hidden.dtype, device=hidden.device, requires_grad=True
            )
            self.hidden, self.head = hidden, (weight, bias)
            return self

        def compute(self) -> Any:
            return linear(self.hidden, *self.head).to(self.dtype)

        def reshaped(self, func: Any, args: Any) -> Any:
            """Return the same logits in another shape or dtype, or None if the last dimension changes."""
            with unchanged():
                like = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args)
            if like.shape[-1] != self.shape[-1]:
                return None
            hidden = self.hidden
            if func is torch.Tensor.__getitem__:
                hidden = hidden[args[0]]
            else:
                hidden = hidden.reshape(*like.shape[:-1], hidden.shape[-1])
            return Logits(hidden, *self.head, dtype=like.dtype)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*_computed(args), **(kwargs or {}))

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in asking or getattr(func, "__name__", "") == "__get__":
                with unchanged():
                    return func(*args, **kwargs)
            first = args[0] if args else None
            if func is functional.cross_entropy and isinstance(first, Logits):
                return _lean_cross_entropy(first, *args[1:], **kwargs)
            if func in reshaping and isinstance(first, Logits) and "device" not in kwargs:
                logits = first.reshaped(func, args[1:])
                if logits is not None:
                    return logits
            return func(*_computed(args), **dict(zip(kwargs, _computed(kwargs.values()), strict=True)))

    def _computed(values: Iterable[Any]) -> list[Any]:
        return [value.compute() if isinstance(value, Logits) else value for value in values]

    return Logits


def _lean_cross_entropy(
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return the cross-entropy of lazy logits, by `linear_logprobs` if possible."""
    import torch
    from torch.nn import functional

    from leanstep.logprob import LMHead, linear_logprobs

    if weight is not None or label_smoothing or target.is_floating_point() or logits.dim() != 2:
        return functional.cross_entropy(
            logits.compute(),
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    hidden, (table, bias) = logits.hidden, logits.head
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        hidden, table = hidden.to(dtype), table.to(dtype)
    used = target != ignore_index
    logp = linear_logprobs(hidden, LMHead(table, bias), target.clamp_min(0)).logp
    loss = -(logp * used)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / used.sum()


def _install_default_device(_: str) -> None:
    """Run a program written for the CPU as if it had been written for the device."""
    import torch

    torch.set_default_device("cuda")


_INSTALLERS: dict[str, Callable[[str], None]] = {
    "lean_head": _install_lean_head,
    "checkpoint": _install_checkpoint,
    "micro_batch": _install_micro_batch,
    "normuon": _install_normuon,
    "bf16_state": _install_bf16_state,
    "zero1": _install_zero1,
    "default_device": _install_default_device,
}
