"""The two optimizers of the gpt recipe behind one small interface.

`normuon`: NorMuon for the banks every step, Adam with the record's table for the rest on its own steps.
`adamw`: torch.optim.AdamW for everything on every step, the way most people train; the one to beat.

Both follow the schedule, keep head and embedding equal while they are tied, and copy the head's moments to
the embedding when they part. Over several ranks NorMuon averages gradients and shares the work by itself
(`mesh=`); for AdamW the gradients are averaged here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leanstep.muon import NorMuon
from leanstep.recipes.checkpoint import load_optimizer
from leanstep.recipes.distributed import World
from leanstep.recipes.schedules import Position, Schedule

# Adam side of the record: name -> (betas, learning-rate multiplier, weight-decay multiplier).
ADAM_TABLE: dict[str, tuple[tuple[float, float], float, float]] = {
    "scalars": ((0.9, 0.99), 5.0, 0.0),
    "smear_gate": ((0.9, 0.99), 0.01, 0.0),
    "skip_gate": ((0.9, 0.99), 0.05, 0.0),
    "attn_gate_bank": ((0.9, 0.99), 1.0, 1.0),
    "ve_gate_bank": ((0.9, 0.99), 1.0, 1.0),
    "post_lambdas": ((0.9, 0.95), 1.0, 0.0),
    "x0_lambdas": ((0.9, 0.95), 1.0, 0.0),
    "bigram_lambdas": ((0.9, 0.95), 1.0, 0.0),
    "resid_lambdas": ((0.9, 0.95), 5.0, 0.0),
    "lm_head": ((0.5, 0.95), 1.0, 150.0),
    "embed": ((0.5, 0.95), 1.0, 150.0),
    "value_embeds": ((0.75, 0.95), 75.0, 5.0),
    "bigram_embed": ((0.75, 0.95), 75.0, 5.0),
}
BANKS = ("attn_bank", "mlp_bank")
RARE_TABLES = ("bigram_embed", "value_embeds")
TABLES = ("embed", "lm_head", *RARE_TABLES)


class ScheduledOptimizer(Protocol):
    """What the recipe asks of an optimizer."""

    def note_batch(self, inputs: Tensor, cu_seqlens: Tensor) -> None:
        """Take note of a batch, on the host, before its backward."""

    def rates(self, here: Position) -> list[float]:
        """Return the numbers of an update that the schedule changes."""
        ...

    def step(self, here: Position, rates: Sequence[float | Tensor] | None = None) -> None:
        """Update with the mean of all ranks' gradients, keep tied weights equal, clear what was used.

        rates: the numbers of `rates(here)` as tensors on the device, which a CUDA graph reads.
        """

    def untie(self) -> None:
        """The embedding becomes a parameter of its own and inherits the head's moments."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_optimizer(
    name: str, model: nn.Module, schedule: Schedule, world: World, options: dict[str, Any]
) -> ScheduledOptimizer:
    """`normuon` or `adamw`; unknown options are named."""
    makers = {"normuon": NorMuonAndAdam, "adamw": AdamWEverywhere}
    if name not in makers:
        raise ValueError(f"optimizer: expected {' or '.join(makers)}, got {name!r}")
    known = makers[name].OPTIONS
    unknown = set(options) - set(known)
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]}: {name} has no such option; it has {', '.join(known)}")
    return makers[name](model, schedule, world, **options)


def average_gradients(parameters: Iterable[Tensor], world: World) -> None:
    """All-reduce every gradient to its mean over ranks, in one flat buffer per dtype."""
    if world.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        flat /= world.size
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _with_plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with numbers for the tensors of a captured step."""
    for group in state["param_groups"]:
        group.update({k: float(group[k]) for k in ("lr", "momentum") if isinstance(group.get(k), Tensor)})
    return state


class AdamWEverywhere:
    """AdamW on every parameter and every step, with a linear warm-up.

    Args:
        lr: peak learning rate.
        weight_decay: on banks and tables; the small parameters have none.
        warmup: fraction of the steps in which the rate rises from 0.
        decay: `record` follows the schedule's multiplier, `cosine` falls to a tenth.
        beta2: of the second moment.
        table_lr_mul: learning-rate multiplier of the bigram and value tables, whose rows are seen rarely.
    """

    OPTIONS = ("lr", "weight_decay", "warmup", "decay", "beta2", "table_lr_mul")

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        world: World,
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup: float = 0.05,
        decay: str = "record",
        beta2: float = 0.95,
        table_lr_mul: float = 1.0,
    ) -> None:
        if lr <= 0:
            raise ValueError(f"lr: expected a positive number, got {lr}")
        if decay not in ("record", "cosine"):
            raise ValueError(f"decay: expected record or cosine, got {decay!r}")
        self.model, self.schedule, self.world = model, schedule, world
        self.lr, self.decay, self.warmup_steps = lr, decay, max(1, round(warmup * schedule.num_steps))
        named = dict(model.named_parameters())
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for name, parameter in named.items():
            decay_of = weight_decay if name in BANKS + TABLES else 0.0
            lr_mul = table_lr_mul if name in RARE_TABLES else 1.0
            groups.setdefault((decay_of, lr_mul), []).append(parameter)
        # The fused step is the fastest AdamW that torch has, on the CPU as well.
        self.adamw = torch.optim.AdamW(
            [{"params": p, "weight_decay": wd, "lr_mul": mul} for (wd, mul), p in groups.items()],
            lr=lr,
            betas=(0.9, beta2),
            fused=True,
            capturable=world.device.type == "cuda",
        )

    def lr_at(self, here: Position) -> float:
        warm = min(1.0, (here.step + 1) / self.warmup_steps)
        if self.decay == "cosine":
            return self.lr * warm * (0.55 + 0.45 * math.cos(math.pi * here.step / self.schedule.num_steps))
        return self.lr * warm * here.lr_mul

    def note_batch(self, inputs: Tensor, cu_seqlens: Tensor) -> None:
        """Gradients are averaged as a whole."""

    def rates(self, here: Position) -> list[float]:
        return [self.lr_at(here)]

    def step(self, here: Position, rates: Sequence[float | Tensor] | None = None) -> None:
        (lr,) = self.rates(here) if rates is None else rates
        self.model.tie_gradients()
        average_gradients(self.model.parameters(), self.world)
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["lr_mul"]
        self.adamw.step()
        self.model.copy_tied()
        self.adamw.zero_grad(set_to_none=True)

    def untie(self) -> None:
        head, embed = self.model.lm_head, self.model.embed
        state = self.adamw.state[head]
        turn = self.model.config.transposed_head
        self.adamw.state[embed] = {
            key: value.clone()
            if value.shape != head.shape
            else (value.T if turn else value).clone(memory_format=torch.contiguous_format)
            for key, value in state.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return _with_plain_rates(self.adamw.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_optimizer(self.adamw, state)


class NorMuonAndAdam:
    """NorMuon for the banks on every step, Adam with the record's table for the rest on its own steps.

    Args:
        lr: of the banks. adam_lr: of the rest. Both follow the schedule.
        weight_decay: of the banks; the rest has the table's.
        adam_decay: of the rest, before the table's multipliers.
        table_lr_mul: learning-rate multiplier of the bigram and value tables. The record's 75 belongs to its
            vocabulary of 50,000, where a row is seen rarely.
        residual: low bits of bfloat16 weights: `nearest`, `truncate` (as the record) or `none`.
    """

    OPTIONS = ("lr", "adam_lr", "weight_decay", "adam_decay", "table_lr_mul", "residual")

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        world: World,
        *,
        lr: float = 0.023,
        adam_lr: float = 0.008,
        weight_decay: float = 1.2,
        adam_decay: float = 0.005,
        table_lr_mul: float = 75.0,
        residual: str = "nearest",
    ) -> None:
        for name, value in (("lr", lr), ("adam_lr", adam_lr)):
            if value <= 0:
                raise ValueError(f"{name}: expected a positive number, got {value}")
        self.model, self.schedule, self.world = model, schedule, world
        self.base_lr = {"normuon": lr, "adam": adam_lr}
        named, dim = dict(model.named_parameters()), model.config.model_dim
        unknown = set(named) - set(BANKS) - set(ADAM_TABLE)
        assert not unknown, f"no rule for {unknown}"
        # On the CPU always single precision: a timed choice could differ between two starts of one run.
        compute = torch.float32 if world.device.type == "cpu" else "auto"
        banks: list[dict[str, Any]] = []
        if "attn_bank" in named:
            banks.append({"params": [("attn_bank", named["attn_bank"])], "split": [dim] * 4})
        pairs = named["mlp_bank"].shape[0]
        # The second matrix of each layer learns twice as fast, on top of the factor for its shape.
        banks.append({"params": [("mlp_bank", named["mlp_bank"])], "lr_mul": [1.0, 2.0] * pairs})
        for bank in banks:
            bank.update(
                algorithm="normuon", weight_decay=weight_decay, compute_dtype=compute, residual=residual
            )
        small = []
        for name, (betas, lr_mul, wd_mul) in ADAM_TABLE.items():
            if name in named:
                group = {"params": [(name, named[name])], "algorithm": "adam", "betas": betas}
                lr_mul = table_lr_mul if name in RARE_TABLES else lr_mul
                group.update(lr_mul=lr_mul, wd_mul=wd_mul, weight_decay=adam_decay, residual="none")
                group.update(sparse_rows=name in RARE_TABLES)
                small.append(group)
        # `ignore`: looking for NaN would read a device value on every step.
        mesh = dist.group.WORLD if world.size > 1 else None
        self.muon = NorMuon([*banks, *small], lr=lr, adam={"lr": adam_lr}, nonfinite="ignore", mesh=mesh)

    def note_batch(self, inputs: Tensor, cu_seqlens: Tensor) -> None:
        """Name the rows of the bigram and value tables that get a gradient; the others are not sent."""
        if self.world.size > 1:
            for name, rows in self.model.rows_read(inputs, cu_seqlens).items():
                self.muon.note_rows(self.model.get_parameter(name), rows)

    def rates(self, here: Position) -> list[float]:
        return [*(lr * here.lr_mul for lr in self.base_lr.values()), here.momentum]

    def step(self, here: Position, rates: Sequence[float | Tensor] | None = None) -> None:
        lr, adam_lr, momentum = self.rates(here) if rates is None else rates
        self.model.tie_gradients()
        for group in self.muon.param_groups:
            is_matrix = group["algorithm"] == "normuon"
            group.update({"lr": lr, "momentum": momentum} if is_matrix else {"lr": adam_lr})
        self.muon.step(do_adam=here.adam_step)
        if here.adam_step:
            self.model.copy_tied()
        self.muon.zero_stepped_grads()

    def untie(self) -> None:
        self.muon.copy_state(
            self.model.lm_head, self.model.embed, transpose=self.model.config.transposed_head
        )

    def state_dict(self) -> dict[str, Any]:
        # Gradients that wait are saved with the parameters, once for all ranks.
        self.muon.average_waiting()
        return _with_plain_rates(self.muon.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state)
