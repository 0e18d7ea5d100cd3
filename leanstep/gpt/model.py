"""The flattened model: one forward over the banks, unbound once; no Block, Attention or MLP modules.

`GPT._states` is the model. It runs on one of two sets of operations. `FUNCTIONS` have hand-written backwards
and are faster on a CPU. `PLAIN` is tensor code that torch.compile captures whole; GPUs use it.
"""

# T tokens · E model · A layers with attention

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from leanstep.gpt.attention import check_cu_seqlens
from leanstep.gpt.banks import BankedGPT, bigram_hash, flag_starts, unbind_bank
from leanstep.gpt.config import GPTConfig
from leanstep.gpt.layers import MLP, Mix, Norm, ResidualMLP, SmearNorm, injections
from leanstep.gpt.loss import head_loss
from leanstep.gpt.mlp import has_kernel
from leanstep.gpt.plain import FUSED, PLAIN, Operations, Terms
from leanstep.gpt.projections import AttentionOut, AttentionWeights, HeadShape, attention
from leanstep.gpt.reference import ReferenceGPT
from leanstep.logprob.layout import to_device

FUNCTIONS = Operations(
    norm=Norm.apply,
    mix=Mix.apply,
    mlp=MLP.apply,
    residual_mlp=ResidualMLP.apply,
    smear_norm=SmearNorm.apply,
    injections=injections,
    attention=attention,
    attention_out=AttentionOut.apply,
    attention_weights=AttentionWeights.apply,
)


@dataclass
class _Documents:
    """Inputs that depend on a batch's documents and on the schedule; built on the host, before the graph.

    Args:
        starts: [T] bool, True at the first token of each document; None if documents are ignored.
        plans: of attention, by layer; None without attention.
        tables: of rotary angles, by layer.
        scale: of the softmax; a tensor if the forward is compiled.
    """

    starts: Tensor | None
    plans: list[Any]
    tables: list[Tensor | None]
    scale: Tensor | float


@dataclass
class _Layers:
    """Per-layer tensors of one step, each list indexed by layer (None if a layer has no such tensor).

    ops, shapes, documents: how this step runs, the same for all layers.
    """

    ops: Operations
    shapes: dict[int, HeadShape]
    documents: _Documents
    projections: list[Tensor | None]
    outputs: list[Tensor | None]
    first: list[Tensor]
    second: list[Tensor]
    values: list[Tensor | None]
    ve_weights: list[Tensor | None]
    edges: list[Tensor | None]
    injected: list[Terms]


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
        run: "functions", "plain" code, or "compiled" plain code. "auto": functions on a CPU; on a GPU the
            loss is compiled, one graph for each number of tokens, and `hidden` and `generate`, whose lengths
            vary, are plain.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        generator: torch.Generator | None = None,
        run: Literal["auto", "functions", "plain", "compiled"] = "auto",
    ) -> None:
        super().__init__(config, generator=generator)
        if run not in ("auto", "functions", "plain", "compiled"):
            raise ValueError(f"run: expected auto, functions, plain or compiled, got {run!r}")
        self.run = run
        # Tensor cores work best with multiples of 64 columns; on a CPU, padding only costs time.
        self._shapes = self._head_shapes(2)
        self._wide_shapes = self._head_shapes(64)

    def _head_shapes(self, row_multiple: int) -> dict[int, HeadShape]:
        c = self.config
        return {
            layer: HeadShape(
                heads=c.num_heads,
                dim=c.head_dim,
                paired=layer in c.paired_layers,
                key_offset=layer in c.key_offset_layers,
                gated=c.attention_gate,
                has_ve=layer in c.value_embed_layers,
                row_multiple=row_multiple,
            )
            for layer in c.attention_layers
        }

    def hidden(
        self, inputs: Tensor, cu_seqlens: Tensor | None = None, *, bigram_ids: Tensor | None = None
    ) -> Tensor:
        """Return final normalised states [T, E] of tokens [T] in documents bounded by `cu_seqlens`."""
        return self._hidden(inputs, cu_seqlens, bigram_ids, self._way(inputs.device, compiles=False))

    def _way(self, device: torch.device, *, compiles: bool) -> str:
        """Return the set of operations: from `run`, or the best for the device."""
        if self.run != "auto":
            return self.run
        if device.type == "cpu":
            return "functions"
        return "compiled" if compiles and device.type == "cuda" else "plain"

    def _hidden(
        self, inputs: Tensor, cu_seqlens: Tensor | None, bigram_ids: Tensor | None, run: str
    ) -> Tensor:
        if inputs.dim() != 1 or inputs.is_floating_point() or inputs.numel() == 0:
            raise ValueError(
                f"inputs: expected [T] integers, T >= 1, got {inputs.dtype} {tuple(inputs.shape)}"
            )
        length = inputs.shape[0]
        if cu_seqlens is None:
            cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
        bounds = check_cu_seqlens(cu_seqlens, length)
        documents = self._documents(bounds, inputs, plain=run != "functions")
        if run == "functions":
            return self._states(inputs, bigram_ids, documents, FUNCTIONS, self._shapes)
        states = _compiled() if run == "compiled" else _plain_states
        return states(self, inputs, bigram_ids, documents, has_kernel(self.mlp_bank))

    def _documents(self, bounds: list[int], inputs: Tensor, *, plain: bool) -> _Documents:
        c, dtype, device, length = self.config, self.embed.dtype, inputs.device, inputs.shape[0]
        plans: list[Any] = [None] * c.num_layers
        tables: list[Tensor | None] = [None] * c.num_layers
        for layer, shape in self._shapes.items():
            plans[layer] = self.plans.get(
                bounds, self.window_tokens(layer), shape.paired, shape.dim, dtype, device
            )
            if plain:
                tables[layer] = self.rotary.real_table(length, shape.paired, dtype, device)
            else:
                tables[layer] = self.rotary.full_table(shape.heads, length, shape.paired, dtype, device)
        starts = to_device(flag_starts(bounds, length), device) if c.respect_docs else None
        scale = self.rotary.scale_on(dtype, device) if plain else self.rotary.attention_scale
        return _Documents(starts, plans, tables, scale)

    def _states(
        self,
        inputs: Tensor,
        bigram_ids: Tensor | None,
        documents: _Documents,
        ops: Operations,
        shapes: dict[int, HeadShape],
    ) -> Tensor:
        """Run the model, from tokens to final states."""
        c = self.config
        x0 = self._embed(inputs, documents.starts, ops)
        xb = self._embed_bigrams(inputs, bigram_ids, documents.starts) if c.bigram_vocab_size else None
        layers = self._take_apart(inputs, x0, xb, ops, shapes, documents)
        lane0 = x0
        if xb is not None:
            lane0 = ops.mix(None, [], 1.0, self.bigram_lambdas[:1].to(x0.dtype).squeeze(0), x0, xb)

        scales = self._lane_scales(x0.dtype)
        sources = {source for source, _ in c.skip_pairs}
        skipped: dict[int, Tensor] = {}
        lane1 = backout = None
        for i in range(c.num_layers):
            if i == c.lanes_from:
                lane1 = lane0
            for gate, source in self._skips_into(i, x0, skipped):
                lane0 = torch.addcmul(lane0, gate, source)
            if i in shapes:
                lane0, lane1 = self._attention_layer(i, lane0, lane1, layers, scales)
            elif c.inject_attention_free and c.injects:
                lane0 = ops.mix(layers.edges[i], layers.injected[i], 1.0, lane0)
            if i in sources:
                skipped[i] = lane0
            lane0, lane1 = self._mlp_layer(i, lane0, lane1, layers, scales)
            if i == c.backout_layer:
                backout = lane0
        return self._merge_lanes(lane0, lane1, backout, ops)

    def _embed(self, inputs: Tensor, starts: Tensor | None, ops: Operations) -> Tensor:
        """Return normalised token embeddings [T, E], mixed with the previous token's if `smear` is on."""
        x = F.embedding(inputs, self.embed)
        if self.config.smear:
            return ops.smear_norm(x, self.scalar("smear").to(x.dtype), self.smear_gate, starts)
        return ops.norm(x)

    def _embed_bigrams(self, inputs: Tensor, bigram_ids: Tensor | None, starts: Tensor | None) -> Tensor:
        if bigram_ids is None:
            bigram_ids = bigram_hash(inputs, self.config.bigram_vocab_size, starts)
        return F.embedding(bigram_ids, self.bigram_embed)

    def _lane_scales(self, dtype: torch.dtype) -> _LaneScales:
        resid = [column.unbind(0) for column in self.resid_lambdas.to(dtype).flatten(1).unbind(1)]
        post = [column.unbind(0) for column in self.post_lambdas.to(dtype).flatten(1).unbind(1)]
        # One pair of residual scales for both lanes, or one pair each.
        if self.config.resid_per_lane:
            return _LaneScales(resid[:2], resid[2:], post[:2], post[2:])
        return _LaneScales([resid[0]] * 2, [resid[1]] * 2, post[:2], post[2:])

    def _attention_layer(
        self, i: int, lane0: Tensor, lane1: Tensor | None, layers: _Layers, scales: _LaneScales
    ) -> tuple[Tensor, Tensor | None]:
        """Return both lanes after the attention of layer i, which reads lane 0."""
        c, ops, shape, documents = self.config, layers.ops, layers.shapes[i], layers.documents
        edge, injected, resid = layers.edges[i], layers.injected[i], scales.attn_resid[0][i]
        if c.inject == "before":
            lane0 = ops.mix(edge, injected, resid, lane0)
            edge, injected, resid = None, [], 1.0
        plan, output = documents.plans[i], layers.outputs[i]
        y, gate = ops.attention(
            lane0,
            layers.projections[i],
            layers.values[i],
            layers.ve_weights[i],
            documents.tables[i],
            documents.starts,
            plan,
            shape,
            documents.scale,
        )
        if lane1 is None and (c.fold_post_attn or not c.has_post_attn(i)):
            return ops.attention_out(y, gate, output, lane0, resid, edge, injected, plan, shape), None
        a = ops.attention_out(y, gate, output, None, 1.0, None, [], plan, shape)
        lane0 = ops.mix(edge, injected, resid, scales.attn_post[0][i], lane0, a)
        if lane1 is not None:
            lane1 = ops.mix(None, [], scales.attn_resid[1][i], scales.attn_post[1][i], lane1, a)
        return lane0, lane1

    def _mlp_layer(
        self, i: int, lane0: Tensor, lane1: Tensor | None, layers: _Layers, scales: _LaneScales
    ) -> tuple[Tensor, Tensor | None]:
        """Return both lanes after the MLP of layer i, which reads lane 1 if there is one."""
        c, ops, first, second = self.config, layers.ops, layers.first[i], layers.second[i]
        resid0, resid1 = scales.mlp_resid[0][i], scales.mlp_resid[1][i]
        post0, post1 = (scales.mlp_post[0][i], scales.mlp_post[1][i]) if c.has_post_mlp(i) else (1.0, 1.0)
        if lane1 is None:
            if c.has_post_mlp(i) and c.fold_post_mlp:
                second, post0 = post0 * second, 1.0
            return ops.residual_mlp(lane0, resid0, post0, first, second), None
        m = ops.mlp(lane1, first, second)
        lane0 = ops.mix(None, [], resid0, post0, lane0, m)
        return lane0, ops.mix(None, [], resid1, post1, lane1, m)

    def _merge_lanes(
        self, lane0: Tensor, lane1: Tensor | None, backout: Tensor | None, ops: Operations
    ) -> Tensor:
        """Return the normalised mean of the lanes, minus the share of the backout layer."""
        if lane1 is None and backout is None:
            return ops.norm(lane0)
        factors, lanes = ([1.0], [lane0]) if lane1 is None else ([0.5, 0.5], [lane0, lane1])
        if backout is not None:
            factors, lanes = [*factors, -self.scalar("backout").to(lane0.dtype)], [*lanes, backout]
        return ops.norm(ops.mix(None, [], *factors, *lanes))

    def _take_apart(
        self,
        inputs: Tensor,
        x0: Tensor,
        xb: Tensor | None,
        ops: Operations,
        shapes: dict[int, HeadShape],
        documents: _Documents,
    ) -> _Layers:
        """Return everything the layers need from banks and tables, fetched once."""
        c, dtype = self.config, x0.dtype
        count = c.num_layers
        projections: list[Tensor | None] = [None] * count
        outputs: list[Tensor | None] = [None] * count
        values: list[Tensor | None] = [None] * count
        ve_weights: list[Tensor | None] = [None] * count
        if c.value_embed_layers:
            offsets = torch.arange(len(c.value_embed_layers), device=inputs.device) * c.padded_vocab
            looked_up = F.embedding(inputs + offsets[:, None], self.value_embeds).unbind(0)
            half = c.gate_width // 2
            # Paired layers' gates read the stream only; the others read half of it and half of the embedding.
            _, outer = self.ve_gate_bank.split(half, dim=2)
            for layer, table, weight in zip(c.value_embed_layers, looked_up, outer.unbind(0), strict=True):
                values[layer] = table
                ve_weights[layer] = None if layer in c.paired_layers else weight
        if shapes:
            pairs = self.scalars[: 2 * count].view(count, 2).unbind(0)
            scales = torch.stack([pairs[layer] for layer in shapes]).to(dtype)
            if c.post_attn_lambda_single and c.fold_post_attn:
                posts = self.post_lambdas[:, 0, 0].to(dtype).unbind(0)
                one = torch.ones_like(posts[0])
                folded = torch.stack([posts[i] if i < c.lanes_from else one for i in shapes])
                scales = torch.stack([scales[:, 0], scales[:, 1] * folded], dim=1)
            taken = ops.attention_weights(
                self.attn_bank,
                scales,
                self.optional("attn_gate_bank"),
                self._own_gates(dtype) if c.value_embed_layers else None,
                dtype,
                list(shapes.values()),
            )
            for place, layer in enumerate(shapes):
                projections[layer], outputs[layer] = taken[place], taken[len(shapes) + place]
        matrices = unbind_bank(self.mlp_bank.to(dtype))
        edges, injected = self._injections(x0, xb, ops)
        return _Layers(
            ops,
            shapes,
            documents,
            projections,
            outputs,
            list(matrices[: 2 * count : 2]),
            list(matrices[1 : 2 * count : 2]),
            values,
            ve_weights,
            edges,
            injected,
        )

    def _own_gates(self, dtype: torch.dtype) -> Tensor:
        """Return the value-embedding gate weights for the stream; outside paired layers, half are zero."""
        c = self.config
        half = c.gate_width // 2
        inner, outer = self.ve_gate_bank.split(half, dim=2)
        outer_weights = [
            weight if layer in c.paired_layers else torch.zeros_like(weight)
            for layer, weight in zip(c.value_embed_layers, outer.unbind(0), strict=True)
        ]
        return torch.cat([inner, torch.stack(outer_weights)], dim=2).to(dtype)

    def _injections(
        self, x0: Tensor, xb: Tensor | None, ops: Operations
    ) -> tuple[list[Tensor | None], list[Terms]]:
        """Return, per layer, an autograd edge and the terms (number, tensor) to add."""
        c = self.config
        receiving = [i for i in range(c.num_layers) if i in self._shapes or c.inject_attention_free]
        if not c.injects or not receiving:
            return [None] * c.num_layers, [[] for _ in range(c.num_layers)]
        x0_factors = self.x0_lambdas.to(x0.dtype) if c.x0_inject else None
        xb_factors = self.bigram_lambdas.to(x0.dtype) if xb is not None else None
        return ops.injections(x0, x0_factors, xb, xb_factors, receiving, c.num_layers)

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
        hidden = self._hidden(inputs, cu_seqlens, bigram_ids, self._way(inputs.device, compiles=True))
        return head_loss(
            hidden,
            self.lm_head,
            targets,
            mtp=mtp or self.config.mtp,
            softcap=self.config.softcap,
            transposed=self.config.transposed_head,
            float8=self.config.float8_head,
        )


def _plain_states(
    model: GPT, inputs: Tensor, bigram_ids: Tensor | None, documents: _Documents, kernels: bool
) -> Tensor:
    return model._states(inputs, bigram_ids, documents, FUSED if kernels else PLAIN, model._wide_shapes)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # One graph per batch shape and pair of windows. Without fullgraph, Dynamo would run eager code at its
    # graph limit.
    return torch.compile(_plain_states, fullgraph=True, dynamic=False)


def build_model(config: GPTConfig, *, generator: torch.Generator | None = None) -> GPT | ReferenceGPT:
    """Return the flattened model, or the model of modules if `config.flat_forward` is False."""
    return (GPT if config.flat_forward else ReferenceGPT)(config, generator=generator)
