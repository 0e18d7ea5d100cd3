"""The flattened model: one forward over the banks, taken apart once; no Block, Attention or MLP modules."""

# T tokens · E model · A layers with attention

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from leanstep.gpt.attention import attend, check_cu_seqlens
from leanstep.gpt.banks import BankedGPT, bigram_hash, unbind_bank
from leanstep.gpt.config import GPTConfig
from leanstep.gpt.layers import MLP, Injections, Mix, Norm, NormLinear, Number, ResidualMLP, SmearNorm, number
from leanstep.gpt.loss import head_loss
from leanstep.gpt.projections import AttentionOut, AttentionWeights, Heads, HeadShape
from leanstep.gpt.reference import ReferenceGPT
from leanstep.logprob.layout import to_device


@dataclass
class _Layers:
    """Per-layer tensors of one step, each list indexed by layer (None where a layer has no such thing)."""

    projections: list[Tensor | None]
    outputs: list[Tensor | None]
    first: list[Tensor]
    second: list[Tensor]
    values: list[Tensor | None]
    ve_weights: list[Tensor | None]
    edges: list[Tensor | None]
    injected: list[list[tuple[Number, Tensor]]]


@dataclass
class _LaneScales:
    """Scales of the residual stream (`resid`) and of what a layer adds (`post`), by lane and layer."""

    attn_resid: Sequence[Sequence[Tensor]]
    mlp_resid: Sequence[Sequence[Tensor]]
    attn_post: Sequence[Sequence[Tensor]]
    mlp_post: Sequence[Sequence[Tensor]]


class GPT(BankedGPT):
    """The model; `hidden` is the whole forward. Same parameters and results as `ReferenceGPT`.

    Args:
        config: shape, features, switches.
        generator: makes the initial values.
    """

    def __init__(self, config: GPTConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config, generator=generator)
        # Tensor cores want 64 columns at a time; on a CPU padding only costs.
        self._shapes_by_device = {"cpu": self._head_shapes(2), "gpu": self._head_shapes(64)}
        self._constants: dict[tuple[str, torch.device], Tensor] = {}

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

    @property
    def _shapes(self) -> dict[int, HeadShape]:
        return self._shapes_by_device["cpu" if self.embed.device.type == "cpu" else "gpu"]

    def _constant(self, name: str, values: tuple[int, ...], device: torch.device) -> Tensor:
        """A small tensor that no step changes, copied to the device once."""
        constant = self._constants.get((name, device))
        if constant is None:
            with torch.inference_mode(False):
                constant = to_device(torch.tensor(values), device)
            # A tensor of a tracing mode is of no use to the next call.
            if type(constant) is Tensor:
                self._constants[name, device] = constant
        return constant

    def hidden(
        self, inputs: Tensor, cu_seqlens: Tensor | None = None, *, bigram_ids: Tensor | None = None
    ) -> Tensor:
        """Final normalised states [T, E] of tokens [T] in documents bounded by `cu_seqlens`."""
        c = self.config
        if inputs.dim() != 1 or inputs.is_floating_point() or inputs.numel() == 0:
            raise ValueError(
                f"inputs: expected [T] integers, T >= 1, got {inputs.dtype} {tuple(inputs.shape)}"
            )
        length = inputs.shape[0]
        if cu_seqlens is None:
            cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
        bounds = check_cu_seqlens(cu_seqlens, length)
        starts = self._document_starts(bounds, inputs) if c.respect_docs else None

        x0 = self._embed(inputs, starts)
        xb = self._embed_bigrams(inputs, bigram_ids, starts) if c.bigram_vocab_size else None
        layers = self._take_apart(inputs, x0, xb)
        lane0 = x0
        if xb is not None:
            lane0 = Mix.apply(None, [], 1.0, self.bigram_lambdas[:1].to(x0.dtype).squeeze(0), x0, xb)

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
                lane0, lane1 = self._attention_layer(i, lane0, lane1, layers, scales, bounds, starts)
            elif c.inject_attention_free and c.injects:
                lane0 = Mix.apply(layers.edges[i], layers.injected[i], 1.0, lane0)
            if i in sources:
                skipped[i] = lane0
            lane0, lane1 = self._mlp_layer(i, lane0, lane1, layers, scales)
            if i == c.backout_layer:
                backout = lane0
        return self._merge_lanes(lane0, lane1, backout)

    def _embed(self, inputs: Tensor, starts: Tensor | None) -> Tensor:
        """Normalised token embeddings [T, E], smeared over the previous token if the model does that."""
        x = F.embedding(inputs, self.embed)
        if self.config.smear:
            return SmearNorm.apply(x, self.scalar("smear").to(x.dtype), self.smear_gate, starts)
        return Norm.apply(x)

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
        self,
        i: int,
        lane0: Tensor,
        lane1: Tensor | None,
        layers: _Layers,
        scales: _LaneScales,
        bounds: list[int],
        starts: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Both lanes after the attention of layer i, which reads lane 0."""
        c = self.config
        edge, injected, resid = layers.edges[i], layers.injected[i], scales.attn_resid[0][i]
        if c.inject == "before":
            lane0 = Mix.apply(edge, injected, resid, lane0)
            edge, injected, resid = None, [], 1.0
        y, gate, plan = self._attend(i, lane0, layers, bounds, starts)
        output, shape = layers.outputs[i], self._shapes[i]
        if lane1 is None and (c.fold_post_attn or not c.has_post_attn(i)):
            return AttentionOut.apply(y, gate, output, lane0, resid, edge, injected, plan, shape), None
        a = AttentionOut.apply(y, gate, output, None, 1.0, None, [], plan, shape)
        lane0 = Mix.apply(edge, injected, resid, scales.attn_post[0][i], lane0, a)
        if lane1 is not None:
            lane1 = Mix.apply(None, [], scales.attn_resid[1][i], scales.attn_post[1][i], lane1, a)
        return lane0, lane1

    def _mlp_layer(
        self, i: int, lane0: Tensor, lane1: Tensor | None, layers: _Layers, scales: _LaneScales
    ) -> tuple[Tensor, Tensor | None]:
        """Both lanes after the MLP of layer i, which reads lane 1 where there is one."""
        c, first, second = self.config, layers.first[i], layers.second[i]
        resid0, resid1 = scales.mlp_resid[0][i], scales.mlp_resid[1][i]
        post0, post1 = (scales.mlp_post[0][i], scales.mlp_post[1][i]) if c.has_post_mlp(i) else (1.0, 1.0)
        if lane1 is None:
            if c.has_post_mlp(i) and c.fold_post_mlp:
                second, post0 = post0 * second, 1.0
            return ResidualMLP.apply(lane0, resid0, post0, first, second, c.fused_mlp), None
        m = MLP.apply(lane1, first, second, c.fused_mlp)
        lane0 = Mix.apply(None, [], resid0, post0, lane0, m)
        return lane0, Mix.apply(None, [], resid1, post1, lane1, m)

    def _merge_lanes(self, lane0: Tensor, lane1: Tensor | None, backout: Tensor | None) -> Tensor:
        """The normalised mean of the lanes, less the share of the backout layer."""
        if lane1 is None and backout is None:
            return Norm.apply(lane0)
        factors, lanes = ([1.0], [lane0]) if lane1 is None else ([0.5, 0.5], [lane0, lane1])
        if backout is not None:
            factors, lanes = [*factors, -self.scalar("backout").to(lane0.dtype)], [*lanes, backout]
        return Norm.apply(Mix.apply(None, [], *factors, *lanes))

    def _take_apart(self, inputs: Tensor, x0: Tensor, xb: Tensor | None) -> _Layers:
        """Everything the layers need of the banks and tables, fetched once."""
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
        if self._shapes:
            index = self._constant("attention_layers", c.attention_layers, inputs.device)
            scales = self.scalars[: 2 * count].view(count, 2).index_select(0, index).to(dtype)
            if c.post_attn_lambda_single and c.fold_post_attn:
                single = (index < c.lanes_from)[:, None]
                folded = self.post_lambdas[:, 0].index_select(0, index).to(dtype)[:, :1]
                scales = torch.cat([scales[:, :1], scales[:, 1:] * torch.where(single, folded, 1.0)], dim=1)
            ve_gates = None
            if c.value_embed_layers:
                reads = torch.ones(
                    len(c.value_embed_layers), 1, c.gate_width, dtype=dtype, device=inputs.device
                )
                for table, layer in enumerate(c.value_embed_layers):
                    if layer not in c.paired_layers:
                        reads[table, :, c.gate_width // 2 :] = 0
                ve_gates = self.ve_gate_bank * reads
            shapes = list(self._shapes.values())
            taken = AttentionWeights.apply(
                self.attn_bank, scales, self.optional("attn_gate_bank"), ve_gates, dtype, shapes
            )
            for place, layer in enumerate(c.attention_layers):
                projections[layer], outputs[layer] = taken[place], taken[len(shapes) + place]
        matrices = unbind_bank(self.mlp_bank.to(dtype))
        edges, injected = self._injections(x0, xb)
        return _Layers(
            projections,
            outputs,
            list(matrices[: 2 * count : 2]),
            list(matrices[1 : 2 * count : 2]),
            values,
            ve_weights,
            edges,
            injected,
        )

    def _injections(self, x0: Tensor, xb: Tensor | None):
        """Per layer an autograd edge, and the terms (number, tensor) to add."""
        c = self.config
        receiving = [i for i in range(c.num_layers) if i in self._shapes or c.inject_attention_free]
        edges: list[Tensor | None] = [None] * c.num_layers
        injected: list[list[tuple[Number, Tensor]]] = [[] for _ in range(c.num_layers)]
        if not c.injects or not receiving:
            return edges, injected
        x0_factors = self.x0_lambdas.to(x0.dtype) if c.x0_inject else None
        xb_factors = self.bigram_lambdas.to(x0.dtype) if xb is not None else None
        made = Injections.apply(x0, x0_factors, xb, xb_factors, receiving)
        for layer, edge in zip(receiving, made, strict=True):
            edges[layer] = edge
            if x0_factors is not None:
                injected[layer].append((number(x0_factors.detach()[layer]), x0.detach()))
            if xb_factors is not None and xb is not None and layer > 0:
                injected[layer].append((number(xb_factors.detach()[layer]), xb.detach()))
        return edges, injected

    def _attend(self, layer: int, lane0: Tensor, layers: _Layers, bounds: list[int], starts: Tensor | None):
        """Attention of one layer up to its output matrix: (blocks of y, gate, plan)."""
        shape = self._shapes[layer]
        plan = self.plans.get(
            bounds, self.window_tokens(layer), shape.paired, shape.dim, lane0.dtype, lane0.device
        )
        size = (lane0.shape[0], shape.paired, lane0.dtype, lane0.device)
        # Broadcasting costs a CPU four times the product's time, a GPU nothing.
        on_cpu = lane0.device.type == "cpu"
        table = self.rotary.full_table(shape.heads, *size) if on_cpu else self.rotary.head_table(*size)
        projected = NormLinear.apply(lane0, layers.projections[layer])
        scale, q_scale = self.rotary.attention_scale, 1.0
        if plan.block_mask is not None:
            # Flex attention takes scaled queries; here they are scaled before they are rounded.
            scale, q_scale = 1.0, scale
        q, k, v, gate = Heads.apply(
            projected, layers.values[layer], layers.ve_weights[layer], table, starts, plan, shape, q_scale
        )
        return attend(q, k, v, plan, scale), gate, plan

    def _skips_into(self, layer: int, x0: Tensor, skipped: dict[int, Tensor]):
        c = self.config
        for i, (source, target) in enumerate(c.skip_pairs):
            if target == layer:
                opening = torch.sigmoid(F.linear(x0[:, : c.gate_width], self.skip_gate[i : i + 1]))
                yield 2 * torch.sigmoid(self.scalar(f"skip{i}")).to(x0.dtype) * opening, skipped[source]

    @staticmethod
    def _document_starts(bounds: list[int], inputs: Tensor) -> Tensor:
        starts = torch.zeros(inputs.shape[0], dtype=torch.bool)
        starts[[b for b in bounds if b < inputs.shape[0]]] = True
        return to_device(starts, inputs.device)

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        bigram_ids: Tensor | None = None,
        mtp: tuple[float, ...] | None = None,
    ) -> Tensor:
        """Training loss: multi-token cross-entropy summed over rows."""
        hidden = self.hidden(inputs, cu_seqlens, bigram_ids=bigram_ids)
        return head_loss(
            hidden,
            self.lm_head,
            targets,
            mtp=mtp or self.config.mtp,
            softcap=self.config.softcap,
            transposed=self.config.transposed_head,
            float8=self.config.float8_head,
        )


def build_model(config: GPTConfig, *, generator: torch.Generator | None = None) -> GPT | ReferenceGPT:
    """The flattened model, or the one of modules when `config.flat_forward` is False."""
    return (GPT if config.flat_forward else ReferenceGPT)(config, generator=generator)
