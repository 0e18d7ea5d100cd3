"""Train the 74th NanoGPT speedrun record (modded-nanogpt, pull request 233), on GPUs or small on a CPU.

    python -m recipes.speedrun.train --out runs/tiny                      # half a minute on two cores
    python -m recipes.speedrun.train --out runs/tiny --resume            # after any interruption, bit for bit
    torchrun --nproc-per-node 8 -m recipes.speedrun.train --preset record-74 --device cuda --data DIR
    python -m recipes.speedrun.train --inject before --out runs/before   # one of its ablations

The file reads from top to bottom: configuration, schedule, flat forward, head, optimizer, training, loop.
Data is in data.py, the Triton kernels in kernels.py, the same model as ordinary modules in reference.py.
"""

# T tokens · E model · H heads · D head size · F hidden of the MLP · V vocabulary · K tokens predicted ahead
# N blocks · B tokens of a block · S keys that a block sees

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leanstep.muon import NorMuon, from_master, polar, to_master, transpose_add, transpose_copy, unbind_bank
from leanstep.muon import reference as muon_reference
from leanstep.triton_driver import can_launch
from recipes.run import start
from recipes.speedrun.corpus import standard_library_corpus
from recipes.speedrun.data import Batch, DocumentLoader, bigram_hash, to_device, validation_batches

# -----------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class Settings:
    """What the command line changes. A comment names what pull request 233 found where it tried a switch."""

    size: str = "tiny"  # of model, schedule and evaluation: a key of SIZES
    steps: int = 300  # the schedule is stretched to this length
    seed: int = 0  # of the initial weights, and of where in the data the run starts
    data: str = ""  # folder with *train*.bin and *val*.bin; "": the source of Python's standard library
    vocab_size: int = 512  # token ids in use
    bos: int = 50256  # the token that starts a document in `data`
    micro_batches: int = 1  # pieces of a step's batch; a multiple of the number of ranks
    # Optimizer
    lr: float = 0.023  # of the banks (NorMuon)
    weight_decay: float = 1.2
    adam_lr: float = 0.03  # of all other parameters (Adam); the record's is 0.008
    adam_decay: float = 0.005
    table_lr_mul: float = 75.0  # of bigram_embed and value_embeds, whose rows are seen rarely
    residual: str = "nearest"  # low bits of bfloat16 banks; upstream: truncate
    # Ablations of the model
    flat_forward: bool = True  # False: modules (reference.py). Half of the gain; cause unknown
    post_attn_lambda_single: bool = False  # scale attention in one-lane layers. Removed by the record
    fold_post_attn: bool = False  # that scale times the output matrix. Faster, clearly worse
    fold_post_mlp: bool = False  # the MLP's scale times its second matrix. Slightly faster, slightly worse
    inject: str = "after"  # x0 and bigrams after or before attention. Before: faster, slightly worse
    inject_attnless_layer: bool = False  # inject in layers without attention too. Slower and worse
    resid_per_lane: bool = False  # each lane has its own residual scales. Not tried
    final_post_mlp: bool = True  # the last layer scales its MLP. Removing it: suggested
    # Ablations of the implementation: the same mathematics
    flat_unbind: bool = True  # take a bank apart once; False: bank[i] in each layer (select-backward)
    transpose_kernels: bool = True  # False: torch's .T for the tied head
    # Kernels of NorMuon's step: step (all in one: slower upstream), momentum (with the polar factor: the
    # record's), write (momentum, and variance with the write: not tried), none.
    fusion: str = "step"
    tall_polar: bool = True  # False: tall matrices are transposed first (not with fusion=step)
    float8_head: bool = True  # 8-bit products of the head, on GPUs that have them
    compile: str = "auto"  # torch.compile the forward: auto (on a GPU), true or false

    def __post_init__(self) -> None:
        for name, allowed in (
            ("size", SIZES), ("inject", ("after", "before")), ("compile", ("auto", "true", "false")),
            ("residual", ("nearest", "truncate", "none")), ("fusion", ("step", *FUSIONS)),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.fusion == "step" and not self.tall_polar:
            raise ValueError(
                "tall_polar: expected fusion=momentum, write or none with tall_polar=false, got step"
            )
        if self.fold_post_attn and not self.post_attn_lambda_single:
            raise ValueError("fold_post_attn: expected post_attn_lambda_single=true with it, got false")


@dataclass(frozen=True)
class Shape:
    """Size and layers of the model; the defaults are the record's."""

    num_layers: int = 11
    model_dim: int = 768
    num_heads: int = 6
    mlp_hidden: int = 3072
    mlp_bank_layers: int = 12  # one layer of padding: 24 matrices for eight ranks
    vocab_multiple: int = 128  # tables and head have a multiple of this many rows
    bigram_vocab_size: int = 5 * 50304
    attention_free_layers: tuple[int, ...] = (6,)
    long_window_layers: tuple[int, ...] = (3, 10)  # the others have the short window
    window_block: int = 128  # tokens per block of a window
    paired_layers: tuple[int, ...] = (0, 2, 5, 9)  # heads h and h + H/2 share one stream of 2T slots
    key_offset_layers: tuple[int, ...] = (3, 10)  # half of each key comes from the previous token
    value_embed_layers: tuple[int, ...] = (1, 2, 8, 9, 10)  # one table each, in this order
    parallel_start: int = 7  # two residual lanes from here; num_layers: one lane
    skip_pairs: tuple[tuple[int, int], ...] = ((3, 6),)  # gated connections, (source, target)
    backout_layer: int = 7  # the stream after this layer is partly subtracted at the end
    gate_width: int = 12  # leading features that the gates read
    softcap: tuple[float, float, float] = (23.0, 5.0, 7.5)  # (a, b, c) of a * sigmoid((logit + b) / c)
    dtype: torch.dtype = torch.bfloat16  # of tables, gates and activations; the lambdas are fp32
    bank_dtype: torch.dtype = torch.bfloat16

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention: the place in this tuple is the place in the attention bank."""
        return tuple(i for i in range(self.num_layers) if i not in self.attention_free_layers)

    def padded_vocab(self, vocab_size: int) -> int:
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple


# -----------------------------------------------------------------------------
# Schedule: a pure function of the step


@dataclass(frozen=True)
class Stage:
    tokens: int  # per step, over all ranks and micro-batches
    max_seq_len: int  # documents are cut here
    windows: tuple[int, int]  # (short, long), in blocks
    lr_mul: float = 1.0
    mtp_start: tuple[float, ...] = (1.0,)  # weights of the next, second next, ... token
    mtp_end: tuple[float, ...] = (1.0,)  # reached at the first step after the stage


@dataclass(frozen=True)
class Position:
    """Everything that depends on the step."""

    stage: Stage
    mtp: tuple[float, ...]
    lr_mul: float
    momentum: float
    adam_step: bool


RECORD_STAGES = (
    Stage(131072, 896, (1, 3), 1.0, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
    Stage(262144, 2048, (3, 7), 1.52, (1.0, 0.5), (1.0, 0.0)),
    Stage(393216, 2048, (5, 11), 1.73),
    Stage(393216, 2048, (6, 13)),
)


@dataclass(frozen=True)
class Schedule:
    """Stages share `scheduled` steps; the last stage is an extension."""

    stages: tuple[Stage, ...] = RECORD_STAGES
    scheduled: int = 1450
    extension: int = 40
    cooldown: float = 0.6  # part of the scheduled steps in which the rate falls to `final_lr_mul`
    final_lr_mul: float = 0.15
    momentum: tuple[float, float] = (0.85, 0.95)
    momentum_warmup: int = 300
    momentum_cooldown: int = 50
    final_window: int = 20  # long window of the last evaluation, without a YaRN step

    @property
    def num_steps(self) -> int:
        return self.scheduled + self.extension

    def of_length(self, steps: int) -> Schedule:
        """Return the same shape in another number of steps."""
        if steps < len(self.stages):
            raise ValueError(f"steps: expected at least {len(self.stages)}, one per stage, got {steps}")
        scale = steps / self.num_steps
        extension = min(max(round(self.extension * scale), 1), steps - len(self.stages) + 1)
        return replace(
            self,
            scheduled=steps - extension,
            extension=extension,
            momentum_warmup=max(round(self.momentum_warmup * scale), 1),
            momentum_cooldown=max(round(self.momentum_cooldown * scale), 1),
        )

    @functools.cached_property
    def boundaries(self) -> list[tuple[int, int]]:
        """(first step, step after the last) of each stage."""
        parts = len(self.stages) - 1
        ends = [0, *(round(self.scheduled * (i + 1) / parts) for i in range(parts)), self.num_steps]
        return list(itertools.pairwise(ends))

    @property
    def untie_step(self) -> int:
        """The first Adam step of the last scheduled stage; head and embedding part after it."""
        first = self.boundaries[-2][0]
        return first + (first + 1) % 2

    def at(self, step: int) -> Position:
        index = next((i for i, (_, end) in enumerate(self.boundaries) if step < end), len(self.stages) - 1)
        stage, (first, end) = self.stages[index], self.boundaries[index]
        done = (step - first) / max(end - first, 1)
        mtp = tuple(a + (b - a) * done for a, b in zip(stage.mtp_start, stage.mtp_end, strict=True))
        lr_mul, begin = stage.lr_mul, int(self.scheduled * (1 - self.cooldown))
        if step >= begin:
            t = min(1.0, (step - begin) / (self.scheduled - begin))
            lr_mul = lr_mul * (1 - t) + self.final_lr_mul * t
        low, high = self.momentum
        momentum, turn = high, self.num_steps - self.momentum_cooldown
        if step < self.momentum_warmup:
            momentum = low + step / self.momentum_warmup * (high - low)
        elif step > turn:
            momentum = high - (step - turn) / self.momentum_cooldown * (high - low)
        # Adam has every second turn; between its turns its gradients add up.
        return Position(stage, mtp, lr_mul, momentum, adam_step=step % 2 == 1)


@dataclass(frozen=True)
class Size:
    shape: Shape
    schedule: Schedule
    validation_tokens: int
    validation_batch: int  # tokens of one forward pass; ranks take turns


def _stages(tokens: tuple[int, ...], max_seq_len: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the record's stages with other batches."""
    triples = zip(RECORD_STAGES, tokens, max_seq_len, strict=True)
    return tuple(replace(stage, tokens=t, max_seq_len=m) for stage, t, m in triples)


TINY_SHAPE = Shape(
    num_layers=4, model_dim=64, num_heads=4, mlp_hidden=256, mlp_bank_layers=4, bigram_vocab_size=5 * 512,
    attention_free_layers=(1,), long_window_layers=(0, 3), window_block=16, paired_layers=(2,),
    key_offset_layers=(0, 3), value_embed_layers=(2, 3), parallel_start=2, skip_pairs=((0, 1),),
    backout_layer=2, dtype=torch.float32, bank_dtype=torch.float32,
)  # fmt: skip
SIZES = {
    # 4 layers, every feature on.
    "tiny": Size(
        TINY_SHAPE,
        Schedule(_stages((1024, 2048, 3072, 3072), (256, 512, 512, 512)), 290, 10,
                 momentum_warmup=60, momentum_cooldown=15),
        validation_tokens=32768, validation_batch=8192,
    ),
    # The same model in twenty small steps: does everything run?
    "smoke": Size(
        TINY_SHAPE,
        Schedule(_stages((128, 256, 256, 256), (64, 128, 128, 128)), 17, 3,
                 momentum_warmup=5, momentum_cooldown=3),
        validation_tokens=2048, validation_batch=1024,
    ),
    "record-74": Size(Shape(), Schedule(), validation_tokens=10485760, validation_batch=262144),
}  # fmt: skip
PRESETS = {
    "tiny": {},
    "smoke": {"size": "smoke", "steps": 20},
    "record-74": {
        "size": "record-74",
        "steps": 1490,
        "vocab_size": 50257,
        "micro_batches": 8,
        "adam_lr": 0.008,
    },
}

# -----------------------------------------------------------------------------
# Operations of the model


EPS = torch.finfo(torch.float32).eps


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS)


@functools.cache
def triton_kernels() -> Any:
    """Return the module of Triton kernels; None where they cannot run."""
    if not can_launch() or torch.version.hip is not None or torch.cuda.get_device_capability() < (8, 0):
        return None
    from recipes.speedrun import kernels

    return kernels


def has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and triton_kernels() is not None


def relu_squared_mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """relu(x @ first.T)^2 @ second; both matrices are stored [F, E]."""
    hidden = F.relu(F.linear(x, first))
    return (hidden * hidden) @ second


class Yarn:
    """Rotary angles and softmax scale, which change with the long window."""

    def __init__(self, head_dim: int) -> None:
        # Half of a head rotates, adjacent features in pairs.
        self.frequencies = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
        self.scale = 0.1
        self.tables: dict[Any, Tensor] = {}

    def rescale(self, old_window: int, new_window: int) -> None:
        """Follow a change of the long window, in tokens."""
        turns = old_window * self.frequencies / (2 * math.pi)
        # Below one turn per window a frequency is interpolated; above 32 it stays.
        keep = torch.clamp((turns - 1) / 31, 0, 1)
        ratio = old_window / new_window
        self.frequencies = self.frequencies * (ratio + keep * (1 - ratio))
        self.scale *= 0.2 * math.log(new_window / old_window) + 1
        self.tables.clear()

    def table(self, length: int, paired: bool, like: Tensor) -> Tensor:
        """Return cos and sin [2, T, 1, D/4]; of paired heads [2, T, 2, D/4], at positions 2t and 2t + 1.

        The position of a paired head follows from the parity of the head, not of its slot.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        key = (length, paired, dtype, like.device)
        if key not in self.tables:
            positions = torch.arange(length * (1 + paired), dtype=torch.float64)
            angles = (positions[:, None] * self.frequencies.double()).view(length, 1 + paired, -1)
            self.tables[key] = to_device(torch.stack([angles.cos(), angles.sin()]).to(dtype), like.device)
        return self.tables[key]


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate heads [T, H, D] by a table of `Yarn.table`; the second half of a head does not rotate."""
    cos, sin = table[:, :, None].unbind(0)
    turning, still = x.unflatten(1, (-1, table.shape[2])).chunk(2, dim=-1)
    even, odd = turning.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], dim=-1).flatten(-2)
    return torch.cat([turned, still], dim=-1).flatten(1, 2)


@dataclass
class Documents:
    """The packed documents of a batch.

    Args:
        cu_seqlens: [documents + 1] cumulative lengths, for FlashAttention on the device.
        longest: no document is longer.
        flash: FlashAttention, or None where it does not run.
        masks: (window, paired) -> additive mask [N, 1, B, S], without `flash`.
    """

    cu_seqlens: Tensor
    longest: int
    flash: Callable[..., Tensor] | None = None
    masks: dict[tuple[int, bool], Tensor] = field(default_factory=dict)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int, paired: bool, scale: float):
    """Attention of [T, H, D] heads: causal, within documents, at most `window` tokens back."""
    if documents.flash is not None:
        slots = 1 + paired
        cu, longest = slots * documents.cu_seqlens, slots * documents.longest
        return documents.flash(q, k, v, cu, longest, scale, window)
    # Elsewhere, queries in blocks: each block sees the band of keys that its window covers.
    mask = documents.masks[window, paired]
    count, _, block, _ = mask.shape
    length, heads, dim = q.shape
    blocks = F.pad(q, (0, 0, 0, 0, 0, count * block - length)).view(count, block, heads, dim)
    bands = (Band.apply(x, mask.shape) for x in (k, v))
    out = F.scaled_dot_product_attention(blocks.transpose(1, 2), *bands, attn_mask=mask, scale=scale)
    return out.transpose(1, 2).reshape(-1, heads, dim)[:length]


@functools.cache
def flash_attention() -> Callable[..., Tensor]:
    """Return FlashAttention 3 or 2 if installed, else torch's own."""
    modules = ["flash_attn_interface"] if torch.cuda.get_device_capability()[0] == 9 else []
    for name in (*modules, "flash_attn"):
        try:
            packed = importlib.import_module(name).flash_attn_varlen_func
        except ImportError:
            continue

        def attention(q, k, v, cu, longest, scale, window, packed=packed):
            out = packed(
                q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True, window_size=(window, 0)
            )
            return out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp too

        return attention
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    return lambda q, k, v, cu, longest, scale, window: varlen_attn(
        q, k, v, cu, cu, longest, longest, scale=scale, window_size=(window, 0)
    )


class Band(torch.autograd.Function):
    """Keys or values [T, H, D] -> overlapping [N, H, S, D] without a copy; backward sums the overlaps."""

    @staticmethod
    def forward(ctx, x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        count, _, block, seen = shape
        length, heads, dim = x.shape
        ctx.size = (length, count, block, seen)
        padded = F.pad(x, (0, 0, 0, 0, seen - block, count * block - length))
        row = heads * dim
        return padded.as_strided((count, heads, seen, dim), (block * row, dim, row, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        length, count, block, seen = ctx.size
        parts = grad.transpose(1, 2).unflatten(1, (-1, block))
        back = seen // block - 1
        total = parts[:, back].contiguous()
        for j in range(max(back - count + 1, 0), back):
            # Part j of a band is the block `back - j` before its own.
            total[: count - back + j] += parts[back - j :, j]
        return total.flatten(0, 1)[:length], None


def band_mask(bounds: list[int], window: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [N, 1, B, S] of documents with these bounds: 0 where a query sees a key."""
    length, longest = bounds[-1], max((b - a for a, b in itertools.pairwise(bounds)), default=0)
    window = min(window, max(longest - 1, 0))
    # Measured on a CPU: small heads are bound by masked scores, large ones by their products.
    best = 32 if head_dim <= 32 else 64 if head_dim <= 64 else 128
    block = max(16, min(best, 1 << (max(window, 1).bit_length() - 1)))
    back, count = -(-window // block), max(-(-length // block), 1)
    cu = torch.tensor(bounds)
    query = torch.arange(count * block)
    first = query.clone()  # the earliest key that a query sees
    first[:length] = torch.maximum(torch.repeat_interleave(cu[:-1], cu.diff()), query[:length] - window)
    key = torch.arange((back + 1) * block) + (torch.arange(count) - back)[:, None, None] * block
    hidden = (key < first.view(count, block, 1)) | (key > query.view(count, block, 1))
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)[:, None]


@dataclass(frozen=True)
class AttentionLayer:
    """What one layer's attention takes besides the stream."""

    qkv: Tensor  # [3E, E], its lambda in it
    output: Tensor  # [E, E], its lambda in it
    gate: Tensor  # [H, width]
    ve: Tensor | None  # [T, E] value embedding
    ve_gate: Tensor | None  # [H, width]
    table: Tensor
    window: int
    paired: bool
    key_offset: bool


def attention(z: Tensor, layer: AttentionLayer, heads: int, documents: Documents, scale: float) -> Tensor:
    """Attention of normalized states z [T, E], [T, E]."""
    length, width = z.shape[0], layer.gate.shape[1]
    q, k, v = F.linear(z, layer.qkv).view(length, 3, heads, -1).unbind(1)
    wide = torch.promote_types(z.dtype, torch.float32)
    q, k = (rotate(norm(x.to(wide)), layer.table).to(z.dtype) for x in (q, k))
    seen = z[:, :width]
    if layer.key_offset:
        # The half that does not rotate comes from the previous token: induction in one layer.
        turning, still = k.chunk(2, dim=-1)
        k = torch.cat([turning, torch.cat([still[:1], still[:-1]])], dim=-1)
    if layer.ve is not None:
        assert layer.ve_gate is not None
        half = width // 2
        reads = seen if layer.paired else torch.cat([seen[:, :half], layer.ve[:, :half]], dim=-1)
        gate = 2 * torch.sigmoid(F.linear(reads, layer.ve_gate))
        v = v + gate[..., None] * layer.ve.view(length, heads, -1)
    if layer.paired:
        # Head h of token t becomes slot 2t + h // (H/2) of stream h mod (H/2).
        q, k, v = (x.reshape(2 * length, heads // 2, -1) for x in (q, k, v))
    y = attend(q, k, v, documents, layer.window, layer.paired, scale).reshape(length, heads, -1)
    y = y * torch.sigmoid(F.linear(seen, layer.gate))[..., None]
    return F.linear(y.flatten(1), layer.output)


# -----------------------------------------------------------------------------
# Banks and the flat forward


class GPT(nn.Module):
    """The model: parameters in banks, one forward without blocks.

    Args:
        settings: switches. shape: sizes and layers.
        generator: draws the initial values.
    """

    def __init__(self, settings: Settings, shape: Shape, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.settings, self.shape = settings, shape
        self.yarn = Yarn(shape.head_dim)
        self.windows = (1, 3)
        self.tied = True  # head and embedding are kept equal
        c, vocab = shape, shape.padded_vocab(settings.vocab_size)
        d, layers, num_attn, num_ve = (
            c.model_dim,
            c.num_layers,
            len(c.attention_layers),
            len(c.value_embed_layers),
        )
        low, high = c.dtype, torch.promote_types(c.dtype, torch.float32)

        def parameter(dtype: torch.dtype, *size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size, dtype=dtype))

        self.embed = parameter(low, vocab, d)
        self.lm_head = parameter(
            low, d, vocab
        )  # input-major: its gradient x^T dlogits comes out in this layout
        self.bigram_embed = parameter(low, c.bigram_vocab_size, d)
        self.value_embeds = parameter(low, num_ve * vocab, d)
        self.attn_bank = parameter(c.bank_dtype, num_attn, 4 * d, d)  # rows of Q, K, V, O
        self.mlp_bank = parameter(c.bank_dtype, c.mlp_bank_layers, 2, c.mlp_hidden, d)
        self.attn_gate_bank = parameter(low, num_attn, c.num_heads, c.gate_width)
        self.ve_gate_bank = parameter(low, num_ve, c.num_heads, c.gate_width)
        self.smear_gate = parameter(low, 1, c.gate_width)
        self.skip_gate = parameter(low, len(c.skip_pairs), c.gate_width)
        self.post_lambdas = parameter(high, layers, 2, 2)  # [layer, attention | MLP, lane]
        self.resid_lambdas = parameter(high, layers, 2, *((2,) if settings.resid_per_lane else ()))
        self.x0_lambdas = parameter(high, layers)
        self.bigram_lambdas = parameter(high, layers)
        # Per layer the scales of Q, K, V and of O, then smear, backout and one for each skip.
        self.scalars = parameter(high, 2 * layers + 2 + len(c.skip_pairs))
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        bound = math.sqrt(3) * 0.5 / math.sqrt(self.shape.model_dim)
        self.lm_head.normal_(0, 0.005, generator=generator)
        self.embed.copy_(self.lm_head.T)
        self.value_embeds.normal_(0, 0.01, generator=generator)
        self.attn_bank.uniform_(-bound, bound, generator=generator)
        self.mlp_bank.uniform_(-bound, bound, generator=generator)
        self.mlp_bank[:, 1].zero_()
        for zero in (
            self.bigram_embed,
            self.attn_gate_bank,
            self.ve_gate_bank,
            self.smear_gate,
            self.skip_gate,
        ):
            zero.zero_()
        self.x0_lambdas.zero_()
        self.bigram_lambdas.fill_(0.05)
        self.post_lambdas.fill_(1)
        self.post_lambdas[self.shape.parallel_start :, 0, 1] = 1.5
        self.resid_lambdas.fill_(math.sqrt(1.1))
        layers = self.shape.num_layers
        self.scalars[: 2 * layers : 2] = 0.5
        self.scalars[1 : 2 * layers : 2] = 1.0
        self.scalars[2 * layers :] = torch.tensor([0.0, 0.5, *[-1.5] * len(self.shape.skip_pairs)])

    def set_windows(self, short: int, long: int, *, yarn: bool = True) -> None:
        """Change the windows, in blocks; the last evaluation widens the long one without a YaRN step."""
        block = self.shape.window_block
        if yarn and long != self.windows[1]:
            self.yarn.rescale(self.windows[1] * block, long * block)
        self.windows = (short, long)

    def window_of(self, layer: int) -> int:
        short, long = self.windows
        return (long if layer in self.shape.long_window_layers else short) * self.shape.window_block

    def documents(self, cu_seqlens: Tensor, longest: int) -> Documents:
        """Prepare a batch's cumulative lengths, on the host, for the device of the model."""
        device, dtype = self.embed.device, self.embed.dtype
        documents = Documents(to_device(cu_seqlens, device), longest)
        if device.type == "cuda" and dtype.itemsize == 2:
            documents.flash = flash_attention()
        else:
            for layer in self.shape.attention_layers:
                window, paired = self.window_of(layer), layer in self.shape.paired_layers
                if (window, paired) not in documents.masks:
                    bounds = ((1 + paired) * cu_seqlens).tolist()
                    mask = band_mask(bounds, window, self.shape.head_dim, dtype)
                    documents.masks[window, paired] = to_device(mask, device)
        return documents

    def forward(self, tokens: Tensor, bigram_ids: Tensor, documents: Documents) -> Tensor:
        """Return final normalized states [T, E] of packed tokens [T]."""
        paired = self.shape.paired_layers
        tables = [self.yarn.table(len(tokens), i in paired, self.embed) for i in self.shape.attention_layers]
        compiles = self.settings.compile == "true" or (self.settings.compile == "auto" and tokens.is_cuda)
        states = compiled(GPT.states) if compiles else GPT.states
        mlp = triton_kernels().relu_squared_mlp if has_kernels(self.embed) else relu_squared_mlp
        return states(self, tokens, bigram_ids, documents, tables, self.windows, self.yarn.scale, mlp)

    def states(
        self,
        tokens: Tensor,
        bigram_ids: Tensor,
        documents: Documents,
        tables: list[Tensor],
        windows: tuple[int, int],
        scale: float,
        mlp: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        c, s = self.shape, self.settings
        dim, dtype = c.model_dim, self.embed.dtype

        # Take everything apart once: bank[i] in a layer costs a zero-filled gradient of the whole bank.
        if s.flat_unbind:
            attn_weights = unbind_bank(self.attn_bank.to(dtype))
            matrices = unbind_bank(self.mlp_bank.to(dtype))  # even: first, odd: second
        else:
            attn_weights = [self.attn_bank[i].to(dtype) for i in range(len(self.attn_bank))]
            matrices = [self.mlp_bank[i // 2, i % 2].to(dtype) for i in range(2 * len(self.mlp_bank))]
        scalars = self.scalars.to(dtype).unbind(0)
        smear, backout = scalars[2 * c.num_layers : 2 * c.num_layers + 2]
        skip_lambdas = scalars[2 * c.num_layers + 2 :]
        resid = [column.unbind(0) for column in self.resid_lambdas.to(dtype).flatten(1).unbind(1)]
        ra0, ra1, rm0, rm1 = resid if s.resid_per_lane else (resid[0], resid[0], resid[1], resid[1])
        pa0, pa1, pm0, pm1 = (x.unbind(0) for x in self.post_lambdas.to(dtype).flatten(1).unbind(1))
        x0_lambdas, bigram_lambdas = (
            self.x0_lambdas.to(dtype).unbind(0),
            self.bigram_lambdas.to(dtype).unbind(0),
        )
        attn_gates, skip_gates = self.attn_gate_bank.unbind(0), self.skip_gate.split(1)
        ve_gates = dict(zip(c.value_embed_layers, self.ve_gate_bank.unbind(0), strict=True))

        # Embeddings. Smear and bigrams cross document boundaries, as in the record.
        x = F.embedding(tokens, self.embed)
        smeared = smear * torch.sigmoid(F.linear(x[1:, : c.gate_width], self.smear_gate))
        x0 = norm(torch.cat([x[:1], x[1:] + smeared * x[:-1]]))
        xb = F.embedding(bigram_ids, self.bigram_embed)
        vocab = self.embed.shape[0]
        rows = torch.arange(len(c.value_embed_layers), device=tokens.device)[:, None] * vocab + tokens
        values = dict(zip(c.value_embed_layers, F.embedding(rows, self.value_embeds).unbind(0), strict=True))

        lane0, lane1 = x0 + bigram_lambdas[0] * xb, None
        skipped: dict[int, Tensor] = {}
        subtracted = None
        for i in range(c.num_layers):
            if i == c.parallel_start:
                lane1 = lane0
            for (source, target), gate, scalar in zip(c.skip_pairs, skip_gates, skip_lambdas, strict=True):
                if target == i:
                    opening = 2 * torch.sigmoid(F.linear(x0[:, : c.gate_width], gate))
                    lane0 = lane0 + torch.sigmoid(scalar) * opening * skipped[source]
            # Layer 0 has its bigrams already.
            injected = x0_lambdas[i] * x0 + bigram_lambdas[i] * xb if i else x0_lambdas[i] * x0

            if i not in c.attention_free_layers:
                place = c.attention_layers.index(i)
                qkv, output = attn_weights[place].split([3 * dim, dim])
                folded = pa0[i] if lane1 is None and s.fold_post_attn else 1.0
                layer = AttentionLayer(
                    scalars[2 * i] * qkv,
                    scalars[2 * i + 1] * folded * output,
                    attn_gates[place],
                    values.get(i),
                    ve_gates.get(i),
                    tables[place],
                    (windows[1] if i in c.long_window_layers else windows[0]) * c.window_block,
                    i in c.paired_layers,
                    i in c.key_offset_layers,
                )
                if s.inject == "before":
                    lane0 = ra0[i] * lane0 + injected
                a = attention(norm(lane0), layer, c.num_heads, documents, scale)
                # One-lane layers do not scale it: the scale of O does.
                scaled = lane1 is not None or (s.post_attn_lambda_single and not s.fold_post_attn)
                a0 = pa0[i] * a if scaled else a
                lane0 = lane0 + a0 if s.inject == "before" else ra0[i] * lane0 + a0 + injected
                if lane1 is not None:
                    lane1 = ra1[i] * lane1 + pa1[i] * a
            elif s.inject_attnless_layer:
                lane0 = lane0 + injected
            skipped[i] = lane0

            first, second = matrices[2 * i : 2 * i + 2]
            scaled = s.final_post_mlp or i < c.num_layers - 1
            if lane1 is None:
                if s.fold_post_mlp and scaled:
                    second, scaled = pm0[i] * second, False
                m = mlp(norm(lane0), first, second)
                lane0 = rm0[i] * lane0 + (pm0[i] * m if scaled else m)
            else:
                # Attention reads lane 0, the MLP lane 1; both write to both.
                m = mlp(norm(lane1), first, second)
                lane0 = rm0[i] * lane0 + (pm0[i] * m if scaled else m)
                lane1 = rm1[i] * lane1 + (pm1[i] * m if scaled else m)
            if i == c.backout_layer:
                subtracted = lane0
        out = lane0 if lane1 is None else (lane0 + lane1) / 2
        assert subtracted is not None
        return norm(out - backout * subtracted)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        bigram_ids: Tensor,
        documents: Documents,
        mtp: tuple[float, ...],
    ) -> Tensor:
        """Return the training loss: cross-entropy of the next tokens, weighted by `mtp`, summed over rows."""
        hidden = self(tokens, bigram_ids, documents)
        return head_loss(
            hidden, self.lm_head, targets, mtp, self.shape.softcap, float8=self.settings.float8_head
        )


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled: `GPT.states` has one graph for each stage, and for its evaluation."""
    return torch._dynamo.config.patch(recompile_limit=64)(
        torch.compile(function, fullgraph=True, dynamic=False)
    )


def build_model(settings: Settings, shape: Shape) -> GPT:
    if settings.flat_forward:
        return GPT(settings, shape)
    from recipes.speedrun.reference import ReferenceGPT

    return ReferenceGPT(settings, shape)


# -----------------------------------------------------------------------------
# Head: softcapped logits, targets several tokens ahead, 8-bit products


# Scales of 8-bit operands: states and weight in e4m3, gradients of the logits in e5m2.
HIDDEN_SCALE, HEAD_SCALE, GRAD_SCALE = 100 / 448, 1.6 / 448, 0.75 / 448


def head_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    mtp: tuple[float, ...] = (1.0,),
    softcap: tuple[float, float, float] = (23.0, 5.0, 7.5),
    *,
    float8: bool = False,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the multi-token cross-entropy of softcapped logits, summed over rows.

    Equivalent to (mtp = (1.0,)):
        a, b, c = softcap
        logits = a * torch.sigmoid((hidden @ head + b) / c)
        loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-1)

    Args:
        hidden: [T, E]. head: [E, V].
        targets: [T]; negative ones are ignored. The target k tokens ahead of row t is targets[t + k].
        mtp: weight of each token ahead.
        float8: 8-bit operands in the three products of a training step, on a GPU that has them.
        chunk_rows: rows of logits that exist at a time; None: by the device's memory.
    """
    # Targets [T, K]; a missing one has weight 0.
    padded = torch.cat([targets, targets.new_full((len(mtp) - 1,), -1)])
    ahead = padded.unfold(0, len(mtp), 1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights = torch.stack([torch.full_like(targets, w, dtype=wide) for w in mtp], dim=1).masked_fill_(
        ahead < 0, 0
    )
    trains = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    float8 = float8 and trains and multiplies_8_bits(hidden, head)
    if chunk_rows is None:
        budget = 8 << 20
        if hidden.is_cuda:
            budget = torch.cuda.get_device_properties(hidden.device).total_memory // 8
        chunk_rows = max(budget // (head.shape[1] * hidden.element_size()), 64)
    return HeadLoss.apply(hidden, head, ahead.clamp(min=0), weights, softcap, float8, chunk_rows, trains)


def multiplies_8_bits(hidden: Tensor, head: Tensor) -> bool:
    if not has_kernels(hidden) or any(side % 16 for side in (*hidden.shape, *head.shape)):
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


class HeadLoss(torch.autograd.Function):
    """The forward computes loss and gradients, one chunk of rows at a time; the backward scales them."""

    @staticmethod
    def forward(ctx, hidden, head, targets, weights, softcap, float8, chunk_rows, trains):
        num_rows, fused = len(hidden), has_kernels(hidden)
        hidden, head = hidden.detach(), head.detach()
        wide = weights.dtype
        losses = torch.zeros(num_rows, dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if trains else None
        grad_head = None
        if float8:
            operands = Float8Products(hidden, head)
        for first in range(0, num_rows, chunk_rows):
            rows = slice(first, first + chunk_rows)
            logits = operands.logits(rows) if float8 else hidden[rows] @ head
            if fused:
                grad = logits if trains else None
                if float8:
                    grad = torch.empty_like(logits, dtype=torch.float8_e5m2)
                scale = operands.scales[2] if float8 else None
                triton_kernels().softcap_rows(
                    logits, grad, targets[rows], weights[rows], losses[rows], softcap, scale
                )
            else:
                losses[rows], grad = softcap_rows(
                    logits.to(wide), targets[rows], weights[rows], softcap, trains
                )
            del logits
            if grad_hidden is None or grad is None:
                continue
            if float8:
                grad_hidden[rows] = operands.hidden_grad(grad)
                part = operands.head_grad(grad, rows)
            else:
                grad = grad.to(hidden.dtype)
                torch.mm(grad, head.T, out=grad_hidden[rows])
                part = hidden[rows].T @ grad
            # Sums over chunks are wide; a single product is rounded once.
            grad_head = part if grad_head is None else grad_head.to(wide).add_(part)
        if trains and grad_head is None:
            grad_head = torch.zeros_like(head)
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(head.dtype))
        return losses.sum(dtype=torch.float64).to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # type: ignore[override]
        return *(g * upstream.to(g.dtype) for g in ctx.saved_tensors), *(None,) * 6


def softcap_rows(
    logits: Tensor, targets: Tensor, weights: Tensor, softcap: tuple[float, float, float], wants_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return losses [R] and gradients of rows of logits [R, V]: kernels.softcap_rows in plain torch."""
    a, b, c = softcap
    z = a * torch.sigmoid((logits + b) / c)
    lse, weight = z.logsumexp(-1, keepdim=True), weights.sum(-1, keepdim=True)
    losses = (weight * lse)[:, 0] - (weights * z.gather(1, targets)).sum(-1)
    if not wants_grad:
        return losses, None
    grad = (z - lse).exp_().mul_(weight).scatter_add_(1, targets, -weights)
    # The slope of the cap: a/c s (1 - s) with s = z / a.
    return losses, grad.mul_(z).mul_(z.mul_(-1 / a).add_(1)).mul_(1 / c)


class Float8Products:
    """The head's three products with 8-bit operands. They demand a column-major second operand."""

    def __init__(self, hidden: Tensor, head: Tensor) -> None:
        scales = (HIDDEN_SCALE, HEAD_SCALE, GRAD_SCALE)
        self.scales = [torch.full((), scale, device=hidden.device) for scale in scales]
        self.hidden, self.head = (
            (x / scale).clamp_(-448, 448).to(torch.float8_e4m3fn)
            for x, scale in ((hidden, HIDDEN_SCALE), (head, HEAD_SCALE))
        )
        self.head_by_columns = turned(self.head).T

    def multiply(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)

    def logits(self, rows: slice) -> Tensor:
        return self.multiply(self.hidden[rows], self.head_by_columns, self.scales[0], self.scales[1])

    def hidden_grad(self, grad: Tensor) -> Tensor:
        return self.multiply(grad, self.head.T, self.scales[2], self.scales[1])

    def head_grad(self, grad: Tensor, rows: slice) -> Tensor:
        return self.multiply(turned(self.hidden[rows]), turned(grad).T, self.scales[0], self.scales[2])


def turned(x: Tensor) -> Tensor:
    """Return a contiguous copy of x.T for 8-bit x."""
    out = torch.empty(x.shape[::-1], dtype=torch.uint8, device=x.device)
    return transpose_copy(x.view(torch.uint8), out).view(x.dtype)


# -----------------------------------------------------------------------------
# Optimizer: NorMuon for the banks in every step, Adam for the rest in every second step


# name: (betas, multiplier of the learning rate, of the weight decay). The order is that of the reductions.
ADAM: dict[str, tuple[tuple[float, float], float, float]] = {
    "scalars": ((0.9, 0.99), 5.0, 0.0),
    "smear_gate": ((0.9, 0.99), 0.01, 0.0),
    "skip_gate": ((0.9, 0.99), 0.05, 0.0),
    "attn_gate_bank": ((0.9, 0.99), 1.0, 1.0),
    "ve_gate_bank": ((0.9, 0.99), 1.0, 1.0),
    "lm_head": ((0.5, 0.95), 1.0, 150.0),
    "bigram_embed": ((0.75, 0.95), 75.0, 5.0),
    "post_lambdas": ((0.9, 0.95), 1.0, 0.0),
    "x0_lambdas": ((0.9, 0.95), 1.0, 0.0),
    "bigram_lambdas": ((0.9, 0.95), 1.0, 0.0),
    "resid_lambdas": ((0.9, 0.95), 5.0, 0.0),
    "value_embeds": ((0.75, 0.95), 75.0, 5.0),
    "embed": ((0.5, 0.95), 1.0, 150.0),
}
BANKS = ("attn_bank", "mlp_bank")
SHARDED = ("value_embeds", "bigram_embed", "lm_head", "embed")  # each rank updates its rows
ADAM_EPS = 1e-10


def adam_update(
    p: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    beta1: float,
    beta2: float,
    rate: Tensor,
    decay: Tensor,
) -> None:
    """Adam with cautious weight decay: only where the update moves a weight towards zero."""
    grad = grad.to(exp_avg.dtype)
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    update = exp_avg / (exp_avg_sq.sqrt() + ADAM_EPS) * rate
    mask = (update * p > 0).to(update.dtype)
    p.copy_(p - (update + p * mask * decay))


# NorMuon's step in four parts; `fusion` says which of them are one compiled function.


def momentum_part(grad: Tensor, buffer: Tensor, momentum: Any) -> Tensor:
    update, new = muon_reference.nesterov(grad.to(buffer.dtype), buffer, momentum)
    buffer.copy_(new)
    return update


def polar_part(update: Tensor, dtype: torch.dtype | str, tall: bool) -> Tensor:
    if tall or update.shape[-2] <= update.shape[-1]:
        return polar(update, compute_dtype=dtype)
    return polar(update.mT.contiguous(), compute_dtype=dtype).mT.contiguous()


def variance_part(factor: Tensor, second: Tensor) -> Tensor:
    update, new = muon_reference.reduce_variance(factor, second, 0.95)
    second.copy_(new)
    return update


def write_part(weight: Tensor, low: Tensor | None, update: Tensor, rate: Any, decay: Any, mode: str) -> None:
    master = weight.to(update.dtype) if low is None else to_master(weight, low, mode)
    new = muon_reference.cautious_decay(master, update, rate, decay)
    if low is None:
        weight.copy_(new)
        return
    high, rest = from_master(new, mode)
    weight.copy_(high)
    low.copy_(rest)


def momentum_and_polar(grad, buffer, momentum, dtype, tall) -> Tensor:
    return polar_part(momentum_part(grad, buffer, momentum), dtype, tall)


def variance_and_write(weight, low, factor, second, rate, decay, mode) -> None:
    write_part(weight, low, variance_part(factor, second), rate, decay, mode)


# fusion: whether momentum and polar factor are one function, and whether variance and write are.
FUSIONS = {"momentum": (True, False), "write": (True, True), "none": (False, False)}

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Optimizer(torch.optim.Optimizer):
    """One step in upstream's order: start all reductions, update while they end, send the weights back.

    Each rank updates a share of the matrices of a bank and of the rows of a table, and holds their state.

    Args:
        model: on its device. rank, world_size: of the default process group.
    """

    def __init__(self, model: GPT, settings: Settings, rank: int = 0, world_size: int = 1) -> None:
        self.model, self.settings, self.rank, self.world_size = model, settings, rank, world_size
        self.parameters = dict(model.named_parameters())
        super().__init__(self.parameters.values(), {})
        self.on_gpu = model.embed.is_cuda
        self.moments: dict[str, dict[str, Any]] = {}
        for name in ADAM:
            p = self.parameters[name].detach()
            part = self.part_of(p) if name in SHARDED else p
            wide = torch.promote_types(part.dtype, torch.float32)
            self.moments[name] = {
                "step": 0,
                **{key: torch.zeros_like(part, dtype=wide) for key in ("exp_avg", "exp_avg_sq")},
            }
        self.adam_update = compiled(adam_update) if self.on_gpu else adam_update
        # Banks as matrices; NorMuon's parameters are this rank's share of them, in the same memory.
        dim = model.shape.model_dim
        self.banks = {
            "attn_bank": model.attn_bank.detach().view(-1, dim, dim),
            "mlp_bank": model.mlp_bank.detach().flatten(0, 1),
        }
        self.shares = {name: nn.Parameter(self.part_of(bank)) for name, bank in self.banks.items()}
        # The second matrix of an MLP learns twice as fast, on top of the factor for its shape.
        doubled = self.part_of(torch.tensor([1.0, 2.0] * len(model.mlp_bank)))
        self.muon = NorMuon(
            [
                {"params": [("attn_bank", self.shares["attn_bank"])]},
                {"params": [("mlp_bank", self.shares["mlp_bank"])], "lr_mul": doubled.tolist()},
            ],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            residual=settings.residual,
            # On a CPU always fp32: a timed choice could differ between two starts of one run.
            compute_dtype="auto" if self.on_gpu else torch.float32,
            nonfinite="ignore",  # looking for NaN would read a device value in every step
        )
        # Rows of the bigram table that have a gradient here, on the host, and how many tokens read them.
        self.touched, self.num_noted = torch.zeros(len(model.bigram_embed), dtype=torch.bool), 0

    def is_shared(self, x: Tensor) -> bool:
        """Return whether each rank updates its share of a bank or table; else all ranks update all of it."""
        return self.world_size > 1 and len(x) % self.world_size == 0

    def part_of(self, x: Tensor) -> Tensor:
        x = x.detach()
        return x.chunk(self.world_size)[self.rank] if self.is_shared(x) else x

    def note(self, bigram_ids: Tensor) -> None:
        """Take note of the rows of the bigram table that a batch reads, on the host: only these are sent."""
        if self.world_size > 1:
            self.touched[bigram_ids] = True
            self.num_noted += len(bigram_ids)

    def forget(self) -> None:
        """Every row may have a gradient: the next exchange is that of whole tables."""
        self.num_noted = len(self.touched)

    @torch.no_grad()
    def step(self, here: Position) -> None:  # type: ignore[override]
        """Update with the mean of all ranks' gradients."""
        p, tied = self.parameters, self.model.tied
        names = [*BANKS, *(name for name in ADAM if here.adam_step and not (tied and name == "embed"))]
        reduced = {name: self.reduce(name) for name in names}
        if here.adam_step:
            self.touched.zero_()
            self.num_noted = 0

        gathers = {}
        # Small ones first, then the tables; the polar factors of the banks last, while tables are sent back.
        for name in sorted(names, key=lambda name: SHARDED.index(name) if name in SHARDED else -1):
            if name not in BANKS:
                part = self.part_of(p[name]) if name in SHARDED else p[name].detach()
                self.adam(name, part, reduced[name](), here.lr_mul)
                if name in SHARDED:
                    gathers[name] = self.gather(p[name].detach(), part)
        for group in self.muon.param_groups:
            group.update(lr=self.settings.lr * here.lr_mul, momentum=here.momentum)
        for name, share in self.shares.items():
            share.grad = reduced[name]()
        self.step_banks(here)
        for name, bank in self.banks.items():
            gathers[name] = self.gather(bank, self.shares[name].detach())

        if here.adam_step and tied:
            gathers.pop("lm_head")()
            if self.settings.transpose_kernels:
                transpose_copy(p["lm_head"].detach(), p["embed"].detach())
            else:
                p["embed"].copy_(p["lm_head"].T)
        for wait in gathers.values():
            wait()

    def step_banks(self, here: Position) -> None:
        s = self.settings
        if s.fusion == "step":
            self.muon.step()
            return
        fuse_momentum, fuse_write = FUSIONS[s.fusion]
        fused = compiled if self.on_gpu else (lambda function: function)
        for group in self.muon.param_groups:
            (weight,) = group["params"]
            rows, cols = weight.shape[-2:]
            state, wide = self.muon.state[weight], torch.promote_types(weight.dtype, torch.float32)
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight, dtype=wide)
                state["second_momentum"] = torch.zeros(
                    len(weight), max(rows, cols), dtype=wide, device=weight.device
                )
                if weight.dtype == torch.bfloat16 and s.residual != "none":
                    state["residual"] = torch.zeros_like(weight, dtype=torch.int16)
            lr = s.lr * here.lr_mul
            factor = lr * muon_reference.shape_factor(rows, cols)
            multipliers = torch.tensor(group["lr_mul"], dtype=wide).expand(len(weight)).view(-1, 1, 1)
            rate = to_device(factor * multipliers, weight.device)
            momentum, decay = (
                torch.tensor(here.momentum, dtype=wide),
                torch.tensor(s.weight_decay * lr, dtype=wide),
            )
            low, buffer = state.get("residual"), state["momentum_buffer"]
            second = state["second_momentum"].unsqueeze(-1 if rows >= cols else -2)
            live, dtype = weight.detach(), group["compute_dtype"]
            if fuse_momentum:
                factors = fused(momentum_and_polar)(weight.grad, buffer, momentum, dtype, s.tall_polar)
            else:
                factors = fused(polar_part)(
                    fused(momentum_part)(weight.grad, buffer, momentum), dtype, s.tall_polar
                )
            if fuse_write:
                fused(variance_and_write)(live, low, factors, second, rate, decay, s.residual)
            else:
                fused(write_part)(live, low, fused(variance_part)(factors, second), rate, decay, s.residual)

    def adam(self, name: str, part: Tensor, grad: Tensor, lr_mul: float) -> None:
        (beta1, beta2), own_lr_mul, wd_mul = ADAM[name]
        if name in ("bigram_embed", "value_embeds"):
            own_lr_mul = self.settings.table_lr_mul
        state, lr = self.moments[name], self.settings.adam_lr * lr_mul * own_lr_mul
        state["step"] += 1
        rate = lr * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        decay = lr * lr * self.settings.adam_decay * wd_mul
        # 0-dimensional tensors on the host: a new value is no new graph.
        rates = (torch.tensor(number, dtype=state["exp_avg"].dtype) for number in (rate, decay))
        self.adam_update(part, grad, state["exp_avg"], state["exp_avg_sq"], beta1, beta2, *rates)

    def reduce(self, name: str) -> Callable[[], Tensor]:
        """Start to average a gradient over ranks; the result waits for it and returns this rank's part."""
        grad = self.parameters[name].grad
        assert grad is not None, name
        if name in BANKS:
            grad = grad.view_as(self.banks[name])
        if self.world_size == 1:
            return lambda: grad
        if not (name in BANKS + SHARDED and self.is_shared(grad)):
            work: Any = dist.all_reduce(grad, dist.ReduceOp.AVG, async_op=True)
            return lambda: (work.wait(), grad)[1]
        # Selecting and adding rows pays while few of them are touched.
        if name == "bigram_embed" and self.num_noted <= len(grad) // 2:
            return self.exchange_rows(grad)
        part = torch.empty_like(self.part_of(grad))
        work: Any = reduce_scatter(part, grad.contiguous(), dist.ReduceOp.AVG, async_op=True)
        return lambda: (work.wait(), part)[1]

    def gather(self, whole: Tensor, part: Tensor) -> Callable[[], Any]:
        """Start to send this rank's part of a bank or table to the others; the result waits for theirs."""
        if not self.is_shared(whole):
            return lambda: None
        work: Any = all_gather(whole, part if self.on_gpu else part.clone(), async_op=True)
        return work.wait

    def exchange_rows(self, grad: Tensor) -> Callable[[], Tensor]:
        """`reduce` for the bigram table: send each owner the rows that were touched here, not all."""
        own = len(grad) // self.world_size
        touched = self.touched.clone()
        touched[self.rank * own : (self.rank + 1) * own] = False  # a rank sends nothing to itself
        send_counts = touched.view(self.world_size, own).sum(1)
        send_rows = to_device(touched.nonzero()[:, 0].int(), grad.device)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts)  # between hosts, which size the buffers
        sizes = receive_counts.tolist(), send_counts.tolist()
        rows = send_rows.new_empty(sum(sizes[0]))
        values = grad.new_empty(len(rows), grad.shape[1])
        sent = grad.index_select(0, send_rows)
        works: list[Any] = [
            dist.all_to_all_single(rows, send_rows, *sizes, async_op=True),
            dist.all_to_all_single(values, sent, *sizes, async_op=True),
        ]

        def wait() -> Tensor:
            for work in works:
                work.wait()
            total = self.part_of(grad)
            # One rank after the other: its rows differ, so the order of the sum is fixed.
            for their_rows, theirs in zip(rows.split(sizes[0]), values.split(sizes[0]), strict=True):
                total.index_add_(0, their_rows - self.rank * own, theirs)
            return total.div_(self.world_size)

        return wait

    def untie(self) -> None:
        """The embedding becomes a parameter of its own and inherits the head's moments."""
        head, embed = self.moments["lm_head"], self.moments["embed"]
        embed["step"] = head["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            whole = self.whole(head[key], self.parameters["lm_head"])
            embed[key].copy_(self.part_of(whole.T))

    def whole(self, part: Tensor, like: Tensor) -> Tensor:
        """Return the parts of all ranks, if the ranks share a parameter `like` this one."""
        if not self.is_shared(like):
            return part
        whole = part.new_empty(len(part) * self.world_size, *part.shape[1:])
        all_gather(whole, part.contiguous())
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Return the state of whole parameters: another number of ranks can load it. A collective."""
        adam = {}
        for name, state in self.moments.items():
            p = self.parameters[name]
            whole = {k: self.whole(v, p) if name in SHARDED else v for k, v in state.items() if k != "step"}
            adam[name] = {"step": state["step"], **whole}
        muon = {}
        for name, (key, state) in zip(BANKS, self.muon.state_dict()["state"].items(), strict=False):
            bank = self.banks[name]
            muon[key] = {k: self.whole(v, bank) if is_stack(v) else v for k, v in state.items()}
        return {"adam": adam, "muon": muon}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, state in self.moments.items():
            state["step"] = saved["adam"][name]["step"]
            for key in ("exp_avg", "exp_avg_sq"):
                whole = saved["adam"][name][key]
                state[key].copy_(self.part_of(whole) if name in SHARDED else whole)
        muon = self.muon.state_dict()
        muon["state"] = {
            key: {k: self.part_of(v).clone() if is_stack(v) else v for k, v in state.items()}
            for key, state in saved["muon"].items()
        }
        self.muon.load_state_dict(muon)


def is_stack(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 1


# -----------------------------------------------------------------------------
# Training


class Training:
    """Model, data and optimizer, which follow the schedule.

    Args:
        settings: validated. size: instead of SIZES[settings.size].
        paths: (training, validation) shards instead of those of `settings.data`.
        device, rank, world_size: of this process.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        *,
        size: Size | None = None,
        paths: tuple[list[Path], list[Path]] | None = None,
    ) -> None:
        self.size = size or SIZES[settings.size]
        self.device, self.rank, self.world_size = torch.device(device), rank, world_size
        self.schedule = self.size.schedule.of_length(settings.steps)
        if settings.micro_batches % world_size:
            raise ValueError(
                f"micro_batches: expected a multiple of the {world_size} ranks, got {settings.micro_batches}"
            )
        # The global batch is cut into the same micro-batches whatever the number of ranks.
        self.accumulation = settings.micro_batches // world_size
        for stage in self.schedule.stages:
            if stage.tokens % (16 * settings.micro_batches):
                raise ValueError(
                    f"micro_batches: expected each to have a multiple of 16 tokens, got {stage.tokens} "
                    f"tokens in {settings.micro_batches}"
                )
        bos = settings.bos
        if paths is None and settings.data:
            folder = Path(settings.data)
            paths = sorted(folder.glob("*train*.bin")), sorted(folder.glob("*val*.bin"))
            if not all(paths):
                raise ValueError(f"data: expected *train*.bin and *val*.bin shards in {folder}, found fewer")
        elif paths is None:
            corpus = standard_library_corpus(vocab_size=settings.vocab_size)
            paths, bos = (corpus.train_paths, corpus.validation_paths), corpus.bos
        self.settings, self.bos = settings, bos
        train_paths, self.validation_paths = paths
        torch.manual_seed(settings.seed)
        self.model = build_model(settings, self.size.shape).to(self.device)
        first = self.schedule.stages[0]
        self.model.windows = first.windows
        self.loader = DocumentLoader(
            train_paths, first.tokens // self.accumulation, first.max_seq_len,
            bos=bos, rank=rank, world_size=world_size,
        )  # fmt: skip
        # Seeds differ in data as well as in weights.
        for _ in range(settings.seed % 64):
            self.loader.next_batch()
        self.optimizer = Optimizer(self.model, settings, rank, world_size)
        self.completed = 0

    def step(self, i: int) -> dict[str, Tensor | float]:
        here = self.schedule.at(i)
        stage = here.stage
        if self.model.windows != stage.windows:
            self.model.set_windows(*stage.windows)
        self.loader.resize(stage.tokens // self.accumulation, stage.max_seq_len)
        total: Tensor | float = 0.0
        for _ in range(self.accumulation):
            batch = self.loader.next_batch()
            loss = self.loss(batch, here.mtp, stage.max_seq_len) / self.accumulation
            loss.backward()
            total = total + loss.detach()
        model = self.model
        if model.tied and here.adam_step:
            # The head alone is updated; it gets the embedding's gradient too.
            assert model.lm_head.grad is not None and model.embed.grad is not None
            if self.settings.transpose_kernels:
                transpose_add(model.embed.grad, model.lm_head.grad)
            else:
                model.lm_head.grad += model.embed.grad.T
        self.optimizer.step(here)
        for name, p in model.named_parameters():
            if name in BANKS or here.adam_step:  # between Adam's turns its gradients add up
                p.grad = None
        if self.model.tied and i == self.schedule.untie_step:
            self.model.tied = False
            self.optimizer.untie()
        self.completed = i + 1
        # The loss is a sum over tokens and weights; the log has means.
        local = stage.tokens // self.settings.micro_batches
        return {"loss": total / (local * sum(here.mtp)), "lr_mul": here.lr_mul, "tokens": stage.tokens}

    def loss(self, batch: Batch, mtp: tuple[float, ...], longest: int) -> Tensor:
        """Return the summed loss of a batch, which is on the host."""
        largest = max(int(batch.inputs[0]), int(batch.targets.max()))
        if largest >= self.settings.vocab_size:
            raise ValueError(
                f"vocab_size: expected more than the largest token {largest}, got {self.settings.vocab_size}"
            )
        bigram_ids = bigram_hash(batch.inputs, self.size.shape.bigram_vocab_size)
        if torch.is_grad_enabled():
            self.optimizer.note(bigram_ids)
        documents = self.model.documents(batch.cu_seqlens, longest)
        tokens, targets, ids = (to_device(x, self.device) for x in (batch.inputs, batch.targets, bigram_ids))
        return self.model.loss(tokens, targets, ids, documents, mtp)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean cross-entropy of the validation tokens; at the end with the widest window."""
        windows = self.model.windows
        if self.completed == self.schedule.num_steps:
            self.model.set_windows(windows[0], max(self.schedule.final_window, windows[1]), yarn=False)
        batches = validation_batches(
            self.validation_paths, self.size.validation_batch, self.size.validation_tokens, bos=self.bos
        )
        total = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss and tokens
        # The same batches whatever the number of ranks: cutting them would take context away.
        for batch in itertools.islice(batches, self.rank, None, self.world_size):
            total[0] += self.loss(batch, (1.0,), len(batch.inputs))
            total[1] += len(batch.inputs)
        self.model.windows = windows
        total = total.cpu()
        if self.world_size > 1:
            dist.all_reduce(total)
        return float(total[0] / total[1])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a step reads and writes, the same on every rank. A collective."""
        # Gradients that wait for Adam's turn are averaged here, in the running process too.
        pending = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        if pending and self.world_size > 1:
            for grad in pending.values():
                dist.all_reduce(grad, dist.ReduceOp.AVG)
            self.optimizer.forget()
        yarn = self.model.yarn
        return {
            "parameters": {name: p.detach() for name, p in self.model.named_parameters()},
            "pending": pending,
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "model": (self.model.windows, self.model.tied, yarn.frequencies, yarn.scale),
            "completed": self.completed,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(state["parameters"][name])
            p.grad = state["pending"][name].to(self.device) if name in state["pending"] else None
        self.optimizer.load_state_dict(state["optimizer"])
        if state["pending"]:
            self.optimizer.forget()
        self.loader.load_state_dict(state["loader"])
        self.model.windows, self.model.tied, self.model.yarn.frequencies, self.model.yarn.scale = state[
            "model"
        ]
        self.model.yarn.tables.clear()
        self.completed = state["completed"]


# -----------------------------------------------------------------------------
# Loop


def main(arguments: list[str] | None = None) -> None:
    settings, run = start(__doc__, Settings, PRESETS, arguments, log_every=10, eval_every=20, save_every=100)
    training = Training(settings, run.device, run.rank, run.world_size)
    if (state := run.load()) is not None:
        training.load_state_dict(state)
    if run.step == 0:
        run.evaluation(val_loss=training.evaluate())
    for step in run.steps():
        run.log(**training.step(step))
        if run.eval_due:
            run.evaluation(val_loss=training.evaluate())
        if run.save_due:
            run.save(training.state_dict())


if __name__ == "__main__":
    main()
