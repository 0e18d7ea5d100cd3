"""The flattened model: one forward over the banks, unbound once; no Block, Attention or MLP modules.

`GPT._states` is the model, in plain tensor code: eager on a CPU, one graph of torch.compile on a GPU.
"""

# T tokens · E model · A layers with attention

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanstep.gpt.attention import PlanKey, check_cu_seqlens
from leanstep.gpt.banks import BankedGPT, bigram_hash, flag_starts, unbind_bank
from leanstep.gpt.config import GPTConfig
from leanstep.gpt.layers import (
    HeadShape,
    Number,
    Term,
    attention,
    attention_weights,
    norm,
    smear_norm,
    weighted_sum,
)
from leanstep.gpt.loss import head_loss
from leanstep.gpt.mlp import fused_mlp, has_kernel, squared_relu_mlp
from leanstep.gpt.reference import ReferenceGPT
from leanstep.logprob.layout import to_device

# A run has up to eight graphs: four stages, each for training and evaluation.
MAX_GRAPHS = 256
RUNS = ("auto", "plain", "compiled")


@dataclass
class _Setup:
    """What the host decides for a batch before the forward starts: a compiled graph takes it as input.

    Args:
        starts: [T] bool, True at the first token of each document; None if documents are ignored.
        plans: of attention, by layer.
        tables: of rotary angles, by layer.
        scale: of the softmax; a tensor if the forward is compiled.
        mlp_kernels: whether the kernels of `mlp.py` run.
        row_multiple: the rows of attention's projections are padded to a multiple of it.
    """

    starts: Tensor | None
    plans: dict[int, Any]
    tables: dict[int, Tensor]
    scale: Number
    mlp_kernels: bool
    row_multiple: int


@dataclass
class _Lookups:
    """Rows of the tables: token and bigram embeddings [T, E], value embeddings [T, E] by layer."""

    tokens: Tensor
    bigrams: Tensor | None
    values: dict[int, Tensor]


@dataclass
class _Layers:
    """Tensors of one step by layer; a layer without attention or value embedding has no entry there."""

    projections: dict[int, Tensor]
    outputs: dict[int, Tensor]
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    values: dict[int, Tensor]
    ve_weights: dict[int, Tensor]
    injected: list[list[Term]]


@dataclass
class _LaneScales:
    """Scales of the residual stream (`resid`) and of layer outputs (`post`), by lane and layer."""

    attn_resid: Sequence[Sequence[Tensor]]
    mlp_resid: Sequence[Sequence[Tensor]]
    attn_post: Sequence[Sequence[Tensor]]
    mlp_post: Sequence[Sequence[Tensor]]


class GPT(BankedGPT):
    """The model; `hidden` is the whole forward. Same parameters and results as `ReferenceGPT`.

    Args:
        config: shape, features, switches.
        generator: draws the initial values.
        run: "plain" runs the code eagerly, "compiled" under torch.compile, one graph for each number of
            tokens. "auto": plain on a CPU; on a GPU the loss is compiled, and `hidden` and `generate`, whose
            lengths vary, are plain.
    """

    def __init__(
        self, config: GPTConfig, *, generator: torch.Generator | None = None, run: str = "auto"
    ) -> None:
        super().__init__(config, generator=generator)
        if run not in RUNS:
            raise ValueError(f"run: expected {' or '.join(RUNS)}, got {run!r}")
        self.run = run
        self._shapes = {
            layer: HeadShape(
                heads=config.num_heads,
                dim=config.head_dim,
                paired=layer in config.paired_layers,
                key_offset=layer in config.key_offset_layers,
                gated=config.attention_gate,
            )
            for layer in config.attention_layers
        }

    def hidden(
        self, inputs: Tensor, cu_seqlens: Tensor | None = None, *, bigram_ids: Tensor | None = None
    ) -> Tensor:
        """Return final normalised states [T, E] of tokens [T] in documents bounded by `cu_seqlens`."""
        return self._hidden(inputs, cu_seqlens, bigram_ids, compiled=self.run == "compiled")

    def _compiles_loss(self, device: torch.device) -> bool:
        return self.run == "compiled" or (self.run == "auto" and device.type == "cuda")

    def _hidden(
        self, inputs: Tensor, cu_seqlens: Tensor | None, bigram_ids: Tensor | None, *, compiled: bool
    ) -> Tensor:
        if inputs.dim() != 1 or inputs.is_floating_point() or inputs.numel() == 0:
            raise ValueError(
                f"inputs: expected [T] integers, T >= 1, got {inputs.dtype} {tuple(inputs.shape)}"
            )
        length = inputs.shape[0]
        if cu_seqlens is None:
            cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
        setup = self._set_up(check_cu_seqlens(cu_seqlens, length), inputs, compiled=compiled)
        if not compiled:
            return self._states(inputs, bigram_ids, setup)
        # Inductor adds up a table's gradient with atomics, in any order; on a CPU a step is repeatable.
        on_cpu = inputs.device.type == "cpu"
        lookups = self._look_up(inputs, bigram_ids, setup.starts) if on_cpu else None
        return _compiled_states()(self, inputs, bigram_ids, setup, lookups)

    def _set_up(self, bounds: list[int], inputs: Tensor, *, compiled: bool) -> _Setup:
        dtype, device, rotary = self.embed.dtype, inputs.device, self.rotary
        # Inductor does not fuse complex numbers, and a float would be a constant of the graph.
        make_table = rotary.real_table if compiled else rotary.head_table
        plans, tables = {}, {}
        for layer, shape in self._shapes.items():
            key = PlanKey(self.window_tokens(layer), shape.paired, shape.dim, dtype, device, compiled)
            plans[layer] = self.plans.get(bounds, key)
            tables[layer] = make_table(inputs.shape[0], shape.paired, dtype, device)
        starts = flag_starts(bounds, inputs.shape[0]) if self.config.respect_docs else None
        return _Setup(
            starts=None if starts is None else to_device(starts, device),
            plans=plans,
            tables=tables,
            scale=rotary.scale_on(dtype, device) if compiled else rotary.attention_scale,
            mlp_kernels=has_kernel(self.mlp_bank),
            # Tensor cores work best with multiples of 64 columns; on a CPU, padding only costs time.
            row_multiple=64 if device.type == "cuda" else 1,
        )

    def _states(
        self, inputs: Tensor, bigram_ids: Tensor | None, setup: _Setup, lookups: _Lookups | None = None
    ) -> Tensor:
        """Run the model, from tokens to final states; `lookups` are looked up here if they are None."""
        c = self.config
        lookups = lookups or self._look_up(inputs, bigram_ids, setup.starts)
        x0, xb = self._embed(lookups.tokens, setup.starts), lookups.bigrams
        layers = self._take_apart(x0, lookups, setup.row_multiple)
        lane0 = x0
        if xb is not None:
            lane0 = weighted_sum((1.0, x0), (self.bigram_lambdas[:1].to(x0.dtype).squeeze(0), xb))

        scales = self._lane_scales(x0.dtype)
        sources = {source for source, _ in c.skip_pairs}
        skipped: dict[int, Tensor] = {}
        lane1 = backout = None
        for i in range(c.num_layers):
            if i == c.lanes_from:
                lane1 = lane0
            for gate, source in self._skips_into(i, x0, skipped):
                lane0 = torch.addcmul(lane0, gate, source)
            if i in self._shapes:
                lane0, lane1 = self._attention_layer(i, lane0, lane1, layers, scales, setup)
            elif c.inject_attention_free:
                lane0 = weighted_sum((1.0, lane0), *layers.injected[i])
            if i in sources:
                skipped[i] = lane0
            lane0, lane1 = self._mlp_layer(i, lane0, lane1, layers, scales, setup)
            if i == c.backout_layer:
                backout = lane0
        return self._merge_lanes(lane0, lane1, backout)

    def _look_up(self, inputs: Tensor, bigram_ids: Tensor | None, starts: Tensor | None) -> _Lookups:
        """Return the rows of all tables for the tokens."""
        c = self.config
        bigrams, values = None, {}
        if c.bigram_vocab_size:
            if bigram_ids is None:
                bigram_ids = bigram_hash(inputs, c.bigram_vocab_size, starts)
            bigrams = F.embedding(bigram_ids, self.bigram_embed)
        if c.value_embed_layers:
            offsets = torch.arange(len(c.value_embed_layers), device=inputs.device) * c.padded_vocab
            rows = F.embedding(inputs + offsets[:, None], self.value_embeds).unbind(0)
            values = dict(zip(c.value_embed_layers, rows, strict=True))
        return _Lookups(F.embedding(inputs, self.embed), bigrams, values)

    def _embed(self, x: Tensor, starts: Tensor | None) -> Tensor:
        """Return normalised token embeddings [T, E], mixed with the previous token's if `smear` is on."""
        if self.config.smear:
            return smear_norm(x, self.scalar("smear").to(x.dtype), self.smear_gate, starts)
        return norm(x)

    def _lane_scales(self, dtype: torch.dtype) -> _LaneScales:
        resid = [column.unbind(0) for column in self.resid_lambdas.to(dtype).flatten(1).unbind(1)]
        post = [column.unbind(0) for column in self.post_lambdas.to(dtype).flatten(1).unbind(1)]
        # One pair of residual scales for both lanes, or one pair each.
        if self.config.resid_per_lane:
            return _LaneScales(resid[:2], resid[2:], post[:2], post[2:])
        return _LaneScales([resid[0]] * 2, [resid[1]] * 2, post[:2], post[2:])

    def _attention_layer(
        self,
        i: int,
        lane0: Tensor,
        lane1: Tensor | None,
        layers: _Layers,
        scales: _LaneScales,
        setup: _Setup,
    ) -> tuple[Tensor, Tensor | None]:
        """Return both lanes after the attention of layer i, which reads lane 0."""
        c = self.config
        injected, resid = layers.injected[i], scales.attn_resid[0][i]
        if c.inject == "before":
            lane0 = weighted_sum((resid, lane0), *injected)
            injected, resid = [], 1.0
        a = attention(
            lane0,
            layers.projections[i],
            layers.outputs[i],
            layers.values.get(i),
            layers.ve_weights.get(i),
            setup.tables[i],
            setup.starts,
            setup.plans[i],
            self._shapes[i],
            setup.scale,
        )
        post: Number = scales.attn_post[0][i]
        if lane1 is None and (c.fold_post_attn or not c.has_post_attn(i)):
            post = 1.0
        lane0 = weighted_sum((resid, lane0), (post, a), *injected)
        if lane1 is not None:
            lane1 = weighted_sum((scales.attn_resid[1][i], lane1), (scales.attn_post[1][i], a))
        return lane0, lane1

    def _mlp_layer(
        self,
        i: int,
        lane0: Tensor,
        lane1: Tensor | None,
        layers: _Layers,
        scales: _LaneScales,
        setup: _Setup,
    ) -> tuple[Tensor, Tensor | None]:
        """Return both lanes after the MLP of layer i, which reads lane 1 if there is one."""
        c, second = self.config, layers.second[i]
        post: list[Number] = [scales.mlp_post[lane][i] if c.has_post_mlp(i) else 1.0 for lane in range(2)]
        if lane1 is None and c.fold_post_mlp:
            second, post[0] = post[0] * second, 1.0
        mlp = fused_mlp if setup.mlp_kernels else squared_relu_mlp
        m = mlp(norm(lane0 if lane1 is None else lane1), layers.first[i], second)
        lane0 = weighted_sum((scales.mlp_resid[0][i], lane0), (post[0], m))
        if lane1 is not None:
            lane1 = weighted_sum((scales.mlp_resid[1][i], lane1), (post[1], m))
        return lane0, lane1

    def _merge_lanes(self, lane0: Tensor, lane1: Tensor | None, backout: Tensor | None) -> Tensor:
        """Return the normalised mean of the lanes, minus the share of the backout layer."""
        terms: list[Term] = [(1.0, lane0)] if lane1 is None else [(0.5, lane0), (0.5, lane1)]
        if backout is not None:
            terms.append((-self.scalar("backout").to(lane0.dtype), backout))
        return norm(weighted_sum(*terms))

    def _take_apart(self, x0: Tensor, lookups: _Lookups, row_multiple: int) -> _Layers:
        """Return everything the layers need from banks and tables, fetched once."""
        c, dtype = self.config, x0.dtype
        projections, outputs = {}, {}
        if self._shapes:
            taken = attention_weights(
                self.attn_bank.to(dtype),
                self._attention_scales(dtype),
                self.optional("attn_gate_bank"),
                self._value_gates() if c.value_embed_layers else None,
                row_multiple,
            )
            projections, outputs = (dict(zip(c.attention_layers, part, strict=True)) for part in taken)
        ve_weights = {}
        if c.value_embed_layers:
            # Paired layers' gates read the stream only; the others read half of it and half of the embedding.
            _, outer = self.ve_gate_bank.chunk(2, dim=2)
            gates = zip(c.value_embed_layers, outer.unbind(0), strict=True)
            ve_weights = {layer: weight for layer, weight in gates if layer not in c.paired_layers}
        matrices = unbind_bank(self.mlp_bank.to(dtype))
        return _Layers(
            projections,
            outputs,
            first=matrices[::2],
            second=matrices[1::2],
            values=lookups.values,
            ve_weights=ve_weights,
            injected=self._injections(x0, lookups.bigrams),
        )

    def _attention_scales(self, dtype: torch.dtype) -> Tensor:
        """Return the scales [A, 2] of every layer's Q, K and V, and of its O."""
        c = self.config
        pairs = self.scalars[: 2 * c.num_layers].view(c.num_layers, 2).unbind(0)
        scales = torch.stack([pairs[layer] for layer in c.attention_layers]).to(dtype)
        if not (c.post_attn_lambda_single and c.fold_post_attn):
            return scales
        posts = self.post_lambdas[:, 0, 0].to(dtype).unbind(0)
        one = torch.ones_like(posts[0])
        folded = torch.stack([posts[i] if i < c.lanes_from else one for i in c.attention_layers])
        return torch.stack([scales[:, 0], scales[:, 1] * folded], dim=1)

    def _value_gates(self) -> Tensor:
        """Return the value-embedding gates' weights for the stream, [A, H, width].

        Zeros where a layer has no value embedding, and in half of the columns outside paired layers.
        """
        c = self.config
        inner, outer = self.ve_gate_bank.chunk(2, dim=2)
        zero = torch.zeros_like(inner[0])
        weights = dict.fromkeys(c.attention_layers, (zero, zero))
        for layer, a, b in zip(c.value_embed_layers, inner.unbind(0), outer.unbind(0), strict=True):
            weights[layer] = (a, b if layer in c.paired_layers else zero)
        return torch.stack([torch.cat(pair, dim=1) for pair in weights.values()])

    def _injections(self, x0: Tensor, xb: Tensor | None) -> list[list[Term]]:
        """Return the terms that each layer adds to the stream."""
        c = self.config
        terms: list[list[Term]] = [[] for _ in range(c.num_layers)]
        if c.x0_inject:
            for layer, factor in enumerate(self.x0_lambdas.to(x0.dtype).unbind(0)):
                terms[layer].append((factor, x0))
        if xb is not None:
            for layer, factor in enumerate(self.bigram_lambdas.to(x0.dtype).unbind(0)):
                # Layer 0 already includes its bigram.
                if layer > 0:
                    terms[layer].append((factor, xb))
        return terms

    def _skips_into(self, layer: int, x0: Tensor, skipped: dict[int, Tensor]):
        c = self.config
        for i, (source, target) in enumerate(c.skip_pairs):
            if target == layer:
                opening = torch.sigmoid(F.linear(x0[:, : c.gate_width], self.skip_gate[i : i + 1]))
                yield 2 * torch.sigmoid(self.scalar(f"skip{i}")).to(x0.dtype) * opening, skipped[source]

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        bigram_ids: Tensor | None = None,
        mtp: tuple[float, ...] | None = None,
    ) -> Tensor:
        """Return the training loss: multi-token cross-entropy summed over rows."""
        hidden = self._hidden(inputs, cu_seqlens, bigram_ids, compiled=self._compiles_loss(inputs.device))
        return head_loss(
            hidden,
            self.lm_head,
            targets,
            mtp=mtp or self.config.mtp,
            softcap=self.config.softcap,
            transposed=self.config.transposed_head,
            float8=self.config.float8_head,
        )


def compile_states(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Tensor]:
    """Return `GPT._states` compiled: one graph per config, batch shape and pair of windows."""
    compiled = torch.compile(GPT._states, backend=backend, fullgraph=True, dynamic=False)
    # All models of a process share the limit; at Dynamo's own, a third ablation would stop.
    return torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS)(compiled)


@functools.cache
def _compiled_states() -> Callable[..., Tensor]:
    return compile_states()


def build_model(config: GPTConfig, *, generator: torch.Generator | None = None) -> GPT | ReferenceGPT:
    """Return the flattened model, or the model of modules if `config.flat_forward` is False."""
    return (GPT if config.flat_forward else ReferenceGPT)(config, generator=generator)
