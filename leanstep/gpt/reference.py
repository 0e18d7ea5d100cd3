"""The model as ordinary modules: Attention, MLP and Block, each indexing its slice of a bank.

This is the reference for the flattened model and the baseline of the benchmark.
It runs in float64 after `model.double()`.
"""

# T tokens · H heads · D head size · E model

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanstep.gpt.attention import PlanKey, check_cu_seqlens, rotate, windowed_attention
from leanstep.gpt.banks import BankedGPT, bigram_hash, flag_starts
from leanstep.gpt.config import GPTConfig

# fp32 machine epsilon for every activation dtype; torch.rms_norm also uses it for bf16 input.
EPS = torch.finfo(torch.float32).eps


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS)


def dense_mask(bounds: list[int], window: int) -> Tensor:
    """[T, T] bool: causal, same document, at most `window` back."""
    cu = torch.tensor(bounds)
    document = torch.repeat_interleave(torch.arange(len(bounds) - 1), cu.diff())
    time = torch.arange(bounds[-1])
    distance = time[:, None] - time
    return (distance >= 0) & (distance <= window) & (document[:, None] == document)


def softcap_loss(
    logits: Tensor, targets: Tensor, mtp: tuple[float, ...], softcap: tuple[float, float, float] | None
) -> Tensor:
    """Return the multi-token cross-entropy per row [T] of raw logits [T, V]; negative targets are ignored."""
    z = logits
    if softcap is not None:
        a, b, c = softcap
        z = a * torch.sigmoid((logits + b) / c)
    logp = z.log_softmax(-1)
    loss = torch.zeros_like(logp[:, 0])
    rows = logits.shape[0]
    if rows == 0:
        return logits.sum(-1)
    for k, weight in enumerate(mtp):
        if k >= rows:
            break
        ahead = targets[k:]
        picked = logp[: rows - k].gather(1, ahead.clamp(min=0)[:, None])[:, 0]
        loss = loss + weight * F.pad(torch.where(ahead >= 0, -picked, 0.0), (0, k))
    return loss


def shift_keys(k: Tensor, starts: Tensor | None) -> Tensor:
    """Return keys [T, H, D] with the second half of each from the previous token."""
    still = k.shape[-1] // 2
    shifted = torch.cat([k[:1, :, still:], k[:-1, :, still:]])
    if starts is not None:
        shifted = torch.where(starts[:, None, None], k[:, :, still:], shifted)
    return torch.cat([k[:, :, :still], shifted], dim=-1)


class Attention(nn.Module):
    """One attention layer without parameters of its own."""

    def __init__(self, config: GPTConfig, layer: int, core: Literal["dense", "banded"]) -> None:
        super().__init__()
        self.config, self.layer, self.core = config, layer, core
        self.paired = layer in config.paired_layers
        self.key_offset = layer in config.key_offset_layers

    def forward(
        self, z, qkvo, lambdas, gate, ve, ve_gate, model: BankedGPT, bounds, starts, post=None
    ) -> Tensor:
        """z [T, E] normalised; qkvo [4E, E]; lambdas (qkv, o); `post` is folded into the output matrix."""
        c = self.config
        length, dim = z.shape
        qkv_weight = lambdas[0] * qkvo[: 3 * dim]
        o_weight = lambdas[1] * qkvo[3 * dim :]
        if post is not None:
            o_weight = o_weight * post
        q, k, v = F.linear(z, qkv_weight).view(length, 3 * c.num_heads, c.head_dim).split(c.num_heads, dim=1)
        table = model.rotary.head_table(length, self.paired, z.dtype, z.device)
        q, k = rotate(norm(q), table), rotate(norm(k), table)
        if self.key_offset:
            k = shift_keys(k, starts)
        if ve is not None:
            half = c.gate_width // 2
            seen = z[:, : c.gate_width] if self.paired else torch.cat([z[:, :half], ve[:, :half]], dim=-1)
            v = v + 2 * torch.sigmoid(F.linear(seen, ve_gate))[..., None] * ve.view(
                length, c.num_heads, c.head_dim
            )
        y = self.attend(q, k, v, model, bounds)
        if gate is not None:
            y = y * torch.sigmoid(F.linear(z[:, : c.gate_width], gate))[..., None]
        return F.linear(y.reshape(length, dim), o_weight)

    def attend(self, q, k, v, model: BankedGPT, bounds: list[int]) -> Tensor:
        length, heads, dim = q.shape
        window, scale = model.window_tokens(self.layer), model.rotary.attention_scale
        if self.paired:
            # Head h of token t: time slot 2t + h // (H/2) of stream h mod (H/2).
            q, k, v = (x.reshape(2 * length, heads // 2, dim) for x in (q, k, v))
        if self.core == "banded":
            plan = model.plans.get(bounds, PlanKey(window, self.paired, dim, q.dtype, q.device))
            y = windowed_attention(q, k, v, plan, scale)
        else:
            mask = dense_mask([2 * b for b in bounds] if self.paired else bounds, window).to(q.device)
            heads_first = (x.transpose(0, 1) for x in (q, k, v))
            y = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale).transpose(0, 1)
        return y.reshape(length, heads, dim)


class MLP(nn.Module):
    """relu-squared; both matrices are stored [hidden, E]."""

    def forward(self, z: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return F.relu(F.linear(z, first)).square() @ second


class Block(nn.Module):
    """One layer on one or two lanes."""

    def __init__(self, config: GPTConfig, layer: int, core: Literal["dense", "banded"]) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.attention = None if layer in config.attention_free_layers else Attention(config, layer, core)
        self.mlp = MLP()

    def forward(self, lane0, lane1, injection, attention_inputs, model: BankedGPT, bounds, starts):
        """Returns (lane0, lane1, lane0 between attention and MLP)."""
        c, layer = self.config, self.layer
        resid, post = model.resid_lambdas[layer].to(lane0.dtype), model.post_lambdas[layer].to(lane0.dtype)
        ra0, rm0 = (resid[0, 0], resid[1, 0]) if c.resid_per_lane else (resid[0], resid[1])
        ra1, rm1 = (resid[0, 1], resid[1, 1]) if c.resid_per_lane else (resid[0], resid[1])

        if self.attention is not None:
            if c.inject == "before":
                lane0 = ra0 * lane0 + injection
            fold = lane1 is None and c.post_attn_lambda_single and c.fold_post_attn
            a = self.attention(
                norm(lane0), *attention_inputs, model, bounds, starts, post=post[0, 0] if fold else None
            )
            a0 = post[0, 0] * a if c.has_post_attn(layer) and not fold else a
            lane0 = lane0 + a0 if c.inject == "before" else ra0 * lane0 + a0 + injection
            if lane1 is not None:
                lane1 = ra1 * lane1 + post[0, 1] * a
        elif c.inject_attention_free:
            lane0 = lane0 + injection
        middle = lane0

        first, second = (w.to(lane0.dtype) for w in (model.mlp_bank[layer, 0], model.mlp_bank[layer, 1]))
        seen = norm(lane0 if lane1 is None else lane1)
        if not c.has_post_mlp(layer):
            post = torch.ones_like(post)
        if lane1 is None and c.fold_post_mlp:
            lane0 = rm0 * lane0 + self.mlp(seen, first, post[1, 0] * second)
        else:
            m = self.mlp(seen, first, second)
            lane0 = rm0 * lane0 + post[1, 0] * m
            if lane1 is not None:
                lane1 = rm1 * lane1 + post[1, 1] * m
        return lane0, lane1, middle


class ReferenceGPT(BankedGPT):
    """The model of modules. `core` selects attention: "dense" T x T masks (the reference), or banded."""

    def __init__(
        self,
        config: GPTConfig,
        *,
        generator: torch.Generator | None = None,
        core: Literal["dense", "banded"] = "dense",
    ) -> None:
        super().__init__(config, generator=generator)
        self.blocks = nn.ModuleList(Block(config, layer, core) for layer in range(config.num_layers))

    def hidden(
        self, inputs: Tensor, cu_seqlens: Tensor | None = None, *, bigram_ids: Tensor | None = None
    ) -> Tensor:
        """Return final normalised states [T, E]."""
        c = self.config
        bounds = [0, inputs.shape[0]] if cu_seqlens is None else check_cu_seqlens(cu_seqlens, inputs.shape[0])
        starts = None
        if c.respect_docs:
            starts = flag_starts(bounds, inputs.shape[0])

        x = F.embedding(inputs, self.embed)
        dtype = x.dtype
        if c.smear:
            gate = self.scalar("smear").to(dtype) * torch.sigmoid(
                F.linear(x[1:, : c.gate_width], self.smear_gate)
            )
            if starts is not None:
                gate = gate.masked_fill(starts[1:, None], 0)
            x = torch.cat([x[:1], x[1:] + gate * x[:-1]])
        x0 = norm(x)

        lane0, lane1 = x0, None
        injections: list[Tensor | float] = [0.0] * c.num_layers
        if c.x0_inject:
            injections = [s * x0 for s in self.x0_lambdas.to(dtype)]
        if c.bigram_vocab_size:
            if bigram_ids is None:
                bigram_ids = bigram_hash(inputs, c.bigram_vocab_size, starts)
            xb = F.embedding(bigram_ids, self.bigram_embed)
            lambdas = self.bigram_lambdas.to(dtype)
            lane0 = x0 + lambdas[0] * xb
            # Layer 0 already includes its bigram.
            injections = [
                injected + lambdas[i] * xb if i else injected for i, injected in enumerate(injections)
            ]

        skip_sources: dict[int, Tensor] = {}
        backout = None
        for layer, block in enumerate(self.blocks):
            if layer == c.lanes_from:
                lane1 = lane0
            for i, (source, target) in enumerate(c.skip_pairs):
                if target == layer:
                    gate = 2 * torch.sigmoid(F.linear(x0[:, : c.gate_width], self.skip_gate[i : i + 1]))
                    lane0 = (
                        lane0 + torch.sigmoid(self.scalar(f"skip{i}")).to(dtype) * gate * skip_sources[source]
                    )
            lane0, lane1, skip_sources[layer] = block(
                lane0,
                lane1,
                injections[layer],
                self._attention_inputs(layer, inputs, dtype),
                self,
                bounds,
                starts,
            )
            if layer == c.backout_layer:
                backout = lane0
        out = lane0 if lane1 is None else (lane0 + lane1) / 2
        if backout is not None:
            out = out - self.scalar("backout").to(dtype) * backout
        return norm(out)

    def _attention_inputs(self, layer: int, inputs: Tensor, dtype: torch.dtype) -> tuple:
        """Return (qkvo, lambdas, gate, ve, ve_gate) of a layer, each by indexing its bank."""
        c = self.config
        if layer in c.attention_free_layers:
            return ()
        place = c.attention_layers.index(layer)
        lambdas = self.scalars[2 * layer : 2 * layer + 2].to(dtype)
        gate = self.attn_gate_bank[place] if c.attention_gate else None
        ve = ve_gate = None
        if layer in c.value_embed_layers:
            table = c.value_embed_layers.index(layer)
            ve = F.embedding(inputs, self.value_embeds.view(-1, c.padded_vocab, c.model_dim)[table])
            ve_gate = self.ve_gate_bank[table]
        return self.attn_bank[place].to(dtype), lambdas, gate, ve, ve_gate

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
        logits = self.hidden(inputs, cu_seqlens, bigram_ids=bigram_ids) @ self.head_weight().T
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return softcap_loss(wide, targets, mtp or self.config.mtp, self.config.softcap).sum()
