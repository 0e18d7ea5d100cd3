"""The model as ordinary modules: Attention, MLP and Block, each indexing its slice of a bank, dense masks.

This is the truth of the tests (in float64 after `model.double()`), and the ablation `flat_forward=False`.
"""

# T tokens · E model · H heads · D head size · V vocabulary

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.speedrun.train import GPT, Documents, Settings, Shape, norm, rotate


def dense_mask(bounds: list[int], window: int) -> Tensor:
    """[T, T] bool: causal, same document, at most `window` back."""
    document = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(pairwise(bounds))])
    time = torch.arange(bounds[-1])
    distance = time[:, None] - time
    return (distance >= 0) & (distance <= window) & (document[:, None] == document)


def softcap_loss(
    logits: Tensor, targets: Tensor, mtp: tuple[float, ...], softcap: tuple[float, float, float]
) -> Tensor:
    """Return the multi-token cross-entropy per row [T] of raw logits [T, V]; negative targets are ignored."""
    a, b, c = softcap
    logp = (a * torch.sigmoid((logits + b) / c)).log_softmax(-1)
    loss = torch.zeros_like(logp[:, 0])
    rows = len(logits)
    for k, weight in enumerate(mtp[:rows]):
        ahead = targets[k:]
        picked = logp[: rows - k].gather(1, ahead.clamp(min=0)[:, None])[:, 0]
        loss = loss + weight * F.pad(torch.where(ahead >= 0, -picked, 0.0), (0, k))
    return loss


class Attention(nn.Module):
    """One attention layer without parameters of its own."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.paired = layer in shape.paired_layers
        self.key_offset = layer in shape.key_offset_layers

    def forward(self, z, qkvo, lambdas, gate, ve, ve_gate, table, bounds, window, scale, post=1.0) -> Tensor:
        """z [T, E] normalized; qkvo [4E, E]; lambdas (qkv, o); `post` is folded into the output matrix."""
        c, (length, dim) = self.shape, z.shape
        qkv_weight, o_weight = lambdas[0] * qkvo[: 3 * dim], lambdas[1] * post * qkvo[3 * dim :]
        q, k, v = F.linear(z, qkv_weight).view(length, 3 * c.num_heads, -1).split(c.num_heads, dim=1)
        q, k = rotate(norm(q), table).to(z.dtype), rotate(norm(k), table).to(z.dtype)
        if self.key_offset:
            half = k.shape[-1] // 2
            k = torch.cat([k[..., :half], torch.cat([k[:1, :, half:], k[:-1, :, half:]])], dim=-1)
        if ve is not None:
            half = c.gate_width // 2
            seen = z[:, : c.gate_width] if self.paired else torch.cat([z[:, :half], ve[:, :half]], dim=-1)
            v = v + 2 * torch.sigmoid(F.linear(seen, ve_gate))[..., None] * ve.view(length, c.num_heads, -1)
        y = self.attend(q, k, v, bounds, window, scale)
        y = y * torch.sigmoid(F.linear(z[:, : c.gate_width], gate))[..., None]
        return F.linear(y.reshape(length, dim), o_weight)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], window: int, scale: float) -> Tensor:
        length, heads, dim = q.shape
        if self.paired:
            # Head h of token t: time slot 2t + h // (H/2) of stream h mod (H/2).
            q, k, v = (x.reshape(2 * length, heads // 2, dim) for x in (q, k, v))
            bounds = [2 * b for b in bounds]
        mask = dense_mask(bounds, window).to(q.device)
        heads_first = (x.transpose(0, 1) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale)
        return y.transpose(0, 1).reshape(length, heads, dim)


class MLP(nn.Module):
    """relu-squared; both matrices are stored [hidden, E]."""

    def forward(self, z: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return F.relu(F.linear(z, first)).square() @ second


class Block(nn.Module):
    """One layer on one or two lanes."""

    def __init__(self, settings: Settings, shape: Shape, layer: int) -> None:
        super().__init__()
        self.settings, self.shape, self.layer = settings, shape, layer
        self.attention = None if layer in shape.attention_free_layers else Attention(shape, layer)
        self.mlp = MLP()

    def forward(self, lane0, lane1, injected, attention_inputs, model: GPT):
        """Return (lane 0, lane 1, lane 0 between attention and MLP)."""
        s, i = self.settings, self.layer
        resid, post = model.resid_lambdas[i].to(lane0.dtype), model.post_lambdas[i].to(lane0.dtype)
        ra0, rm0 = (resid[0, 0], resid[1, 0]) if s.resid_per_lane else (resid[0], resid[1])
        ra1, rm1 = (resid[0, 1], resid[1, 1]) if s.resid_per_lane else (resid[0], resid[1])
        if self.attention is not None:
            if s.inject == "before":
                lane0 = ra0 * lane0 + injected
            fold = lane1 is None and s.fold_post_attn
            a = self.attention(norm(lane0), *attention_inputs, post=post[0, 0] if fold else 1.0)
            a0 = post[0, 0] * a if (lane1 is not None or s.post_attn_lambda_single) and not fold else a
            lane0 = lane0 + a0 if s.inject == "before" else ra0 * lane0 + a0 + injected
            if lane1 is not None:
                lane1 = ra1 * lane1 + post[0, 1] * a
        elif s.inject_attnless_layer:
            lane0 = lane0 + injected
        middle = lane0

        first, second = (w.to(lane0.dtype) for w in (model.mlp_bank[i, 0], model.mlp_bank[i, 1]))
        if i == self.shape.num_layers - 1 and not s.final_post_mlp:
            post = torch.ones_like(post)
        seen = norm(lane0 if lane1 is None else lane1)
        if lane1 is None and s.fold_post_mlp:
            return rm0 * lane0 + self.mlp(seen, first, post[1, 0] * second), None, middle
        m = self.mlp(seen, first, second)
        lane0 = rm0 * lane0 + post[1, 0] * m
        return lane0, None if lane1 is None else rm1 * lane1 + post[1, 1] * m, middle


class ReferenceGPT(GPT):
    """The parameters of `GPT` with a forward of modules and a loss of whole logits."""

    def __init__(self, settings: Settings, shape: Shape, *, generator: torch.Generator | None = None) -> None:
        super().__init__(settings, shape, generator=generator)
        self.blocks = nn.ModuleList(Block(settings, shape, layer) for layer in range(shape.num_layers))

    def forward(self, tokens: Tensor, bigram_ids: Tensor, documents: Documents) -> Tensor:
        c = self.shape
        x = F.embedding(tokens, self.embed)
        scalars = self.scalars.to(x.dtype)
        smear, backout, *skips = scalars[2 * c.num_layers :]
        gate = smear * torch.sigmoid(F.linear(x[1:, : c.gate_width], self.smear_gate))
        x0 = norm(torch.cat([x[:1], x[1:] + gate * x[:-1]]))
        xb = F.embedding(bigram_ids, self.bigram_embed)
        bigram_lambdas = self.bigram_lambdas.to(x.dtype)
        lane0, lane1 = x0 + bigram_lambdas[0] * xb, None
        # Layer 0 has its bigrams already.
        injected = [
            s * x0 + (bigram_lambdas[i] * xb if i else 0) for i, s in enumerate(self.x0_lambdas.to(x.dtype))
        ]
        sources: dict[int, Tensor] = {}
        subtracted = None
        bounds = documents.cu_seqlens.tolist()
        for layer, block in enumerate(self.blocks):
            if layer == c.parallel_start:
                lane1 = lane0
            for i, (source, target) in enumerate(c.skip_pairs):
                if target == layer:
                    gate = 2 * torch.sigmoid(F.linear(x0[:, : c.gate_width], self.skip_gate[i : i + 1]))
                    lane0 = lane0 + torch.sigmoid(skips[i]) * gate * sources[source]
            inputs = self.attention_inputs(layer, tokens, bounds)
            lane0, lane1, sources[layer] = block(lane0, lane1, injected[layer], inputs, self)
            if layer == c.backout_layer:
                subtracted = lane0
        out = lane0 if lane1 is None else (lane0 + lane1) / 2
        assert subtracted is not None
        return norm(out - backout * subtracted)

    def attention_inputs(self, layer: int, tokens: Tensor, bounds: list[int]) -> tuple[Any, ...]:
        """Return (qkvo, lambdas, gate, ve, ve_gate, table, bounds, window, scale), by indexing banks."""
        c = self.shape
        if layer in c.attention_free_layers:
            return ()
        dtype, place = self.embed.dtype, c.attention_layers.index(layer)
        ve = ve_gate = None
        if layer in c.value_embed_layers:
            i = c.value_embed_layers.index(layer)
            ve = F.embedding(tokens, self.value_embeds.view(-1, *self.embed.shape)[i])
            ve_gate = self.ve_gate_bank[i]
        lambdas = self.scalars[2 * layer : 2 * layer + 2].to(dtype)
        table = self.yarn.table(len(tokens), layer in c.paired_layers, self.embed)
        qkvo, gate = self.attn_bank[place].to(dtype), self.attn_gate_bank[place]
        return qkvo, lambdas, gate, ve, ve_gate, table, bounds, self.window_of(layer), self.yarn.scale

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        bigram_ids: Tensor,
        documents: Documents,
        mtp: tuple[float, ...],
    ) -> Tensor:
        logits = self(tokens, bigram_ids, documents) @ self.lm_head
        wide = torch.promote_types(logits.dtype, torch.float32)
        return softcap_loss(logits.to(wide), targets, mtp, self.shape.softcap).sum()
