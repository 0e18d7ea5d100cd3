"""All features of the model, as fields of one frozen record.

A feature that is switched off allocates no parameters. Defaults are the 74th speedrun record.
`GPTConfig.preset` has the record, a CPU-sized model, a plain model and the model of the golden vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class GPTConfig:
    """Shape, features and ablation switches of the model.

    Args:
        vocab_size: token ids in use; tables and head have `padded_vocab` rows.
        vocab_multiple: the vocabulary is padded to a multiple of this.
        num_layers, model_dim, num_heads, head_dim, mlp_hidden: num_heads * head_dim must be model_dim.
        mlp_bank_layers: layers in the MLP bank, padding included (so that ranks share it evenly).
        attention_free_layers: layers with an MLP only.
        long_window_layers: layers that use the long window; the others use the short one.
        window_block: tokens per window block.
        windows: (short, long) in blocks, before the first `set_windows`.
        attention_scale: softmax scale before any YaRN step.
        rotary_base: lowest frequency is 1 / rotary_base; half of each head rotates.
        yarn: rescale frequencies and softmax scale when the long window changes.
        paired_layers: layers whose heads are interleaved in pairs along time.
        key_offset_layers: layers whose non-rotating key half comes from the previous token.
        value_embed_layers: layers with a table of value embeddings, tables in this order.
        attention_gate: per-head sigmoid gate on the attention output.
        gate_width: leading features that the gates read.
        bigram_vocab_size: rows of the hashed bigram table; 0 switches it off.
        smear: mix the previous token's embedding into each token's.
        x0_inject: add the normalised embedding to the residual in every layer.
        inject: add x0 and bigram "after" or "before" attention.
        inject_attention_free: add them in attention-free layers as well.
        parallel_start: first layer with two residual lanes; None keeps one.
        skip_pairs: (source, target) layers of gated skip connections.
        backout_layer: the stream after this layer is partly subtracted at the end; None switches it off.
        post_attn_lambda_single: scale attention outputs of one-lane layers (the record removed this).
        fold_post_attn: multiply that scale into the output matrix instead of the activations.
        fold_post_mlp: multiply the MLP's output scale into its second matrix (one-lane layers).
        final_post_mlp: the last layer has its MLP output scale.
        resid_per_lane: the second lane has its own residual scales.
        softcap: (a, b, c) of a * sigmoid((logit + b) / c); None for plain logits.
        mtp: default multi-token weights of the training loss.
        transposed_head: store the head input-major, so that its gradient comes out in storage layout.
        tied: head and embedding start tied (the trainer unties them).
        scalar_multiple: the packed scalars are padded to a multiple of this (the world size).
        respect_docs: keep smear, key offset and bigram within documents (the record lets them cross).
        flat_forward: `build_model` returns the flattened model; False: the model of modules.
        float8_head: the head's three products in a training step use 8-bit operands on a GPU that supports
            them (capability 8.9 or newer); elsewhere nothing changes.
        dtype: activations, tables and gates. bank_dtype: the two banks (None: like `dtype`).
    """

    vocab_size: int = 50257
    vocab_multiple: int = 128
    num_layers: int = 11
    model_dim: int = 768
    num_heads: int = 6
    head_dim: int = 128
    mlp_hidden: int = 3072
    mlp_bank_layers: int | None = 12
    attention_free_layers: tuple[int, ...] = (6,)
    long_window_layers: tuple[int, ...] = (3, 10)
    window_block: int = 128
    windows: tuple[int, int] = (1, 3)
    attention_scale: float = 0.1
    rotary_base: float = 1024.0
    yarn: bool = True
    paired_layers: tuple[int, ...] = (0, 2, 5, 9)
    key_offset_layers: tuple[int, ...] = (3, 10)
    value_embed_layers: tuple[int, ...] = (1, 2, 8, 9, 10)
    attention_gate: bool = True
    gate_width: int = 12
    bigram_vocab_size: int = 251520
    smear: bool = True
    x0_inject: bool = True
    inject: Literal["after", "before"] = "after"
    inject_attention_free: bool = False
    parallel_start: int | None = 7
    skip_pairs: tuple[tuple[int, int], ...] = ((3, 6),)
    backout_layer: int | None = 7
    post_attn_lambda_single: bool = False
    fold_post_attn: bool = False
    fold_post_mlp: bool = False
    final_post_mlp: bool = True
    resid_per_lane: bool = False
    softcap: tuple[float, float, float] | None = (23.0, 5.0, 7.5)
    mtp: tuple[float, ...] = (1.0,)
    transposed_head: bool = True
    tied: bool = True
    scalar_multiple: int = 1
    respect_docs: bool = False
    flat_forward: bool = True
    float8_head: bool = False
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    bank_dtype: Literal["float32", "bfloat16", "float64"] | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "vocab_multiple",
            "num_layers",
            "model_dim",
            "num_heads",
            "head_dim",
            "mlp_hidden",
        ):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "a positive number")
        _check(
            self.num_heads * self.head_dim == self.model_dim,
            "num_heads * head_dim",
            f"{self.num_heads} * {self.head_dim}",
            f"model_dim = {self.model_dim}",
        )
        _check(
            self.head_dim % 8 == 0,
            "head_dim",
            self.head_dim,
            "a multiple of 8 (a quarter of the features are frequencies)",
        )
        for name in (
            "attention_free_layers",
            "long_window_layers",
            "paired_layers",
            "key_offset_layers",
            "value_embed_layers",
        ):
            layers = getattr(self, name)
            in_range = all(0 <= layer < self.num_layers for layer in layers) and len(set(layers)) == len(
                layers
            )
            _check(in_range, name, layers, f"distinct layers within 0..{self.num_layers - 1}")
            if name != "attention_free_layers":
                clash = set(layers) & set(self.attention_free_layers)
                _check(not clash, name, layers, f"layers with attention, not {sorted(clash)}")
        clash = set(self.paired_layers) & set(self.key_offset_layers)
        _check(
            not clash, "key_offset_layers", self.key_offset_layers, f"no paired layers, not {sorted(clash)}"
        )
        _check(
            not self.paired_layers or self.num_heads % 2 == 0,
            "num_heads",
            self.num_heads,
            "even for paired layers",
        )
        _check(
            0 < self.gate_width <= self.model_dim
            and self.gate_width % 2 == 0
            and self.gate_width // 2 <= self.head_dim,
            "gate_width",
            self.gate_width,
            f"an even number up to model_dim = {self.model_dim}",
        )
        _check(
            self.parallel_start is None or 0 < self.parallel_start < self.num_layers,
            "parallel_start",
            self.parallel_start,
            f"None or a layer within 1..{self.num_layers - 1}",
        )
        _check(
            self.backout_layer is None or 0 <= self.backout_layer < self.num_layers,
            "backout_layer",
            self.backout_layer,
            f"None or a layer within 0..{self.num_layers - 1}",
        )
        ordered = all(0 <= source < target < self.num_layers for source, target in self.skip_pairs)
        _check(ordered, "skip_pairs", self.skip_pairs, "(source, target) layers with source < target")
        _check(self.inject in ("after", "before"), "inject", self.inject, "'after' or 'before'")
        _check(
            self.bank_layers >= self.num_layers,
            "mlp_bank_layers",
            self.mlp_bank_layers,
            f">= {self.num_layers}",
        )
        _check(
            self.bigram_vocab_size == 0 or self.bigram_vocab_size > 1,
            "bigram_vocab_size",
            self.bigram_vocab_size,
            "0 or > 1",
        )
        _check(0 < self.windows[0] <= self.windows[1], "windows", self.windows, "0 < short <= long")
        _check(len(self.mtp) >= 1, "mtp", self.mtp, "at least one weight")
        _check(
            self.softcap is None or len(self.softcap) == 3, "softcap", self.softcap, "None or three numbers"
        )
        _check(self.dtype in DTYPES, "dtype", self.dtype, " or ".join(DTYPES))
        _check(
            self.bank_dtype is None or self.bank_dtype in DTYPES,
            "bank_dtype",
            self.bank_dtype,
            " or ".join(DTYPES),
        )

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def bank_layers(self) -> int:
        return self.num_layers if self.mlp_bank_layers is None else self.mlp_bank_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with attention. The index in this tuple is the index in the attention bank."""
        return tuple(i for i in range(self.num_layers) if i not in self.attention_free_layers)

    @property
    def lanes_from(self) -> int:
        """First two-lane layer; num_layers if there is only one lane."""
        return self.num_layers if self.parallel_start is None else self.parallel_start

    @property
    def scalar_slots(self) -> dict[str, int]:
        """Indices of the single numbers in `scalars`, after the num_layers pairs of attention lambdas."""
        names = ["smear"] if self.smear else []
        names += ["backout"] if self.backout_layer is not None else []
        names += [f"skip{i}" for i in range(len(self.skip_pairs))]
        return {name: 2 * self.num_layers + i for i, name in enumerate(names)}

    @property
    def num_scalars(self) -> int:
        used = 2 * self.num_layers + len(self.scalar_slots)
        return -(-used // self.scalar_multiple) * self.scalar_multiple

    def has_post_attn(self, layer: int) -> bool:
        """Return whether a post lambda scales the attention output of this layer."""
        return layer >= self.lanes_from or self.post_attn_lambda_single

    def has_post_mlp(self, layer: int) -> bool:
        return self.final_post_mlp or layer < self.num_layers - 1

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """Return a named configuration with some fields replaced: `preset("tiny", vocab_size=1024)`."""
        if name not in PRESETS:
            raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
        unknown = set(overrides) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"preset: GPTConfig has no field {', '.join(sorted(unknown))}")
        return replace(cls(**PRESETS[name]), **overrides)


def _check(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


_TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "num_layers": 4,
    "model_dim": 64,
    "num_heads": 4,
    "head_dim": 16,
    "mlp_hidden": 256,
    "mlp_bank_layers": None,
    "window_block": 16,
}

PRESETS: dict[str, dict[str, Any]] = {
    "record-74": {"mtp": (1.0, 0.5, 0.25), "dtype": "bfloat16", "float8_head": True},
    "tiny": {
        **_TINY_SHAPE,
        "attention_free_layers": (1,),
        "long_window_layers": (0, 3),
        "key_offset_layers": (0, 3),
        "paired_layers": (2,),
        "value_embed_layers": (2, 3),
        "bigram_vocab_size": 5 * 512,
        "parallel_start": 2,
        "skip_pairs": ((0, 1),),
        "backout_layer": 2,
        "mtp": (1.0, 0.5, 0.25),
    },
    # Every feature off: a GPT with RMS norm, rotary, relu-squared, for recipes that need just a model.
    "plain": {
        **_TINY_SHAPE,
        "windows": (64, 64),
        "attention_free_layers": (),
        "long_window_layers": (0, 1, 2, 3),
        "key_offset_layers": (),
        "paired_layers": (),
        "value_embed_layers": (),
        "attention_gate": False,
        "bigram_vocab_size": 0,
        "smear": False,
        "x0_inject": False,
        "parallel_start": None,
        "skip_pairs": (),
        "backout_layer": None,
        "softcap": None,
        "transposed_head": False,
        "tied": False,
        "respect_docs": True,
    },
    "vectors": {
        "vocab_size": 100,
        "model_dim": 64,
        "num_heads": 4,
        "head_dim": 16,
        "mlp_hidden": 256,
        "window_block": 4,
        "bigram_vocab_size": 640,
    },
}
