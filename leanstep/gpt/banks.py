"""Parameters: matrices of equal shape are stored in banks, which a training step unbinds once.

With `bank[i]` inside a loop over layers, autograd writes one zero-filled gradient of the whole bank per layer
and sums them. The backward of `unbind` on the flattened bank is a single `stack`.

This module also has what both models share: the rows of the hashed bigram table, tied weights, the schedule's
state, and sampling.
"""

# L layers · A layers with attention · D model · F hidden · V padded vocabulary

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.gpt.attention import PlanCache, Rotary
from leanstep.gpt.config import DTYPES, GPTConfig

# Odd multipliers of the record; products wrap around in 32 bits.
TOKEN_FACTOR = 36313
PREVIOUS_FACTOR = 27191


def unbind_bank(bank: Tensor) -> tuple[Tensor, ...]:
    """Return every matrix of a bank [..., rows, cols] as a view.

    Equivalent to:
        matrices = tuple(bank.flatten(0, -3)[i] for i in range(bank.flatten(0, -3).shape[0]))

    Args:
        bank: [..., rows, cols], at least three dimensions.

    Returns:
        views [rows, cols], the leading dimensions in order.

    Peak extra memory: none forward; backward one `stack` of the gradients, where indexing writes and adds a
        zero-filled gradient of the whole bank per matrix.
    Use something else when: a step uses one matrix of many; `bank[i]` is just as good then.
    """
    if bank.dim() < 3:
        raise ValueError(
            f"bank: expected [..., rows, cols] with at least 3 dimensions, got {tuple(bank.shape)}"
        )
    return bank.flatten(0, -3).unbind(0)


def bigram_hash(tokens: Tensor, table_size: int, starts: Tensor | None = None) -> Tensor:
    """Return row ids [T] of the bigram table for tokens [T].

    Position 0 takes the last row. Position 1 takes the last row's number for its predecessor, as the record
    does (it overwrites slot 0 before hashing). Document boundaries are ignored unless `starts` is passed.

    Equivalent to:
        last = table_size - 1
        tokens32 = tokens.to(torch.int32)
        previous = torch.cat([torch.full((2,), last, dtype=torch.int32), tokens32[1:-1]])[: len(tokens)]
        ids = ((36313 * tokens32) ^ (27191 * previous)).long().remainder(last)
        ids[:1] = last

    Args:
        tokens: [T] integers.
        table_size: rows of the table; ids are within 0..table_size - 1.
        starts: [T] bool, True at the first token of each document; those take the last row.
    """
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ValueError(f"tokens: expected [T] integers, got {tokens.dtype} {tuple(tokens.shape)}")
    if table_size < 2:
        raise ValueError(f"table_size: expected at least 2, got {table_size}")
    last = table_size - 1
    current = tokens.long()
    if current.numel() == 0:
        return current
    previous = torch.cat([current.new_full((1,), last), current[:-1]])
    if starts is None:
        previous[1:2] = last
    mixed = torch.bitwise_xor(_wrap(TOKEN_FACTOR * current), _wrap(PREVIOUS_FACTOR * previous))
    ids = torch.remainder(mixed, last)
    ids[:1] = last
    if starts is not None:
        ids.masked_fill_(starts, last)
    return ids


def _wrap(x: Tensor) -> Tensor:
    """Return the low 32 bits as a signed number; exact, because both factors are far below 63 bits."""
    return ((x + 2**31) & (2**32 - 1)) - 2**31


def flag_starts(bounds: Sequence[int], length: int) -> Tensor:
    """Return [length] bool, True at the first token of each document."""
    starts = torch.zeros(length, dtype=torch.bool)
    starts[[bound for bound in bounds if bound < length]] = True
    return starts


class BankedGPT(nn.Module):
    """Parameters and training state of the model; `GPT` and `ReferenceGPT` add the forward pass.

    State that a schedule changes is not in `state_dict` (which holds parameters only) but in
    `schedule_state`: the windows, the YaRN frequencies and scale, and whether head and embedding are tied.
    """

    # Registered by `_allocate`; parameters of a switched-off feature do not exist.
    embed: Tensor
    lm_head: Tensor
    bigram_embed: Tensor
    value_embeds: Tensor
    attn_bank: Tensor
    mlp_bank: Tensor
    attn_gate_bank: Tensor
    ve_gate_bank: Tensor
    smear_gate: Tensor
    skip_gate: Tensor
    post_lambdas: Tensor
    resid_lambdas: Tensor
    x0_lambdas: Tensor
    bigram_lambdas: Tensor
    scalars: Tensor

    def __init__(self, config: GPTConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.rotary = Rotary(config.head_dim, config.rotary_base, config.attention_scale)
        self.plans = PlanCache()
        self.windows = config.windows
        self.tied = config.tied
        self._allocate(config)
        self.reset_parameters(generator)

    def _allocate(self, c: GPTConfig) -> None:
        dtype = DTYPES[c.dtype]
        bank_dtype = DTYPES[c.bank_dtype or c.dtype]
        # Lambdas stay in fp32 under bf16; they take the dtype of the activations only if that is wider.
        lambda_dtype = torch.float64 if dtype == torch.float64 else torch.float32

        def add(name: str, *shape: int, dtype: torch.dtype = dtype, when: bool = True) -> None:
            if when:
                self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

        d, vocab, layers, num_attn = c.model_dim, c.padded_vocab, c.num_layers, len(c.attention_layers)
        add("embed", vocab, d)
        add("lm_head", *((d, vocab) if c.transposed_head else (vocab, d)))
        add("bigram_embed", c.bigram_vocab_size, d, when=c.bigram_vocab_size > 0)
        add("value_embeds", len(c.value_embed_layers) * vocab, d, when=bool(c.value_embed_layers))
        add("attn_bank", num_attn, 4 * d, d, dtype=bank_dtype, when=num_attn > 0)
        add("mlp_bank", c.bank_layers, 2, c.mlp_hidden, d, dtype=bank_dtype)
        add("attn_gate_bank", num_attn, c.num_heads, c.gate_width, when=c.attention_gate and num_attn > 0)
        add(
            "ve_gate_bank",
            len(c.value_embed_layers),
            c.num_heads,
            c.gate_width,
            when=bool(c.value_embed_layers),
        )
        add("smear_gate", 1, c.gate_width, when=c.smear)
        add("skip_gate", len(c.skip_pairs), c.gate_width, when=bool(c.skip_pairs))
        add("post_lambdas", layers, 2, 2, dtype=lambda_dtype)
        add("resid_lambdas", layers, 2, *((2,) if c.resid_per_lane else ()), dtype=lambda_dtype)
        add("x0_lambdas", layers, dtype=lambda_dtype, when=c.x0_inject)
        add("bigram_lambdas", layers, dtype=lambda_dtype, when=c.bigram_vocab_size > 0)
        add("scalars", c.num_scalars, dtype=lambda_dtype)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set the initial values of the record. Random ones come from `generator`, in a fixed order."""
        c = self.config
        bound = math.sqrt(3) * 0.5 / math.sqrt(c.model_dim)
        parameters = dict(self.named_parameters())
        head = self.lm_head
        head.normal_(0, 0.005, generator=generator)
        self.embed.copy_(head.T if c.transposed_head else head)
        if "bigram_embed" in parameters:
            self.bigram_embed.zero_()
            self.bigram_lambdas.fill_(0.05)
        if "value_embeds" in parameters:
            self.value_embeds.normal_(0, 0.01, generator=generator)
        if "attn_bank" in parameters:
            self.attn_bank.uniform_(-bound, bound, generator=generator)
        self.mlp_bank.uniform_(-bound, bound, generator=generator)
        self.mlp_bank[:, 1].zero_()
        for name in ("attn_gate_bank", "ve_gate_bank", "smear_gate", "skip_gate", "x0_lambdas"):
            if name in parameters:
                parameters[name].zero_()
        self.post_lambdas.fill_(1)
        self.post_lambdas[c.lanes_from :, 0, 1] = 1.5
        self.resid_lambdas.fill_(math.sqrt(1.1))
        self.scalars.fill_(1)
        self.scalars[: 2 * c.num_layers : 2] = 0.5
        for name, slot in c.scalar_slots.items():
            self.scalars[slot] = {"smear": 0.0, "backout": 0.5}.get(name, -1.5)

    def hidden(
        self, inputs: Tensor, cu_seqlens: Tensor | None = None, *, bigram_ids: Tensor | None = None
    ) -> Tensor:
        """Return final normalised states [T, E]; implemented by `GPT` and `ReferenceGPT`."""
        raise NotImplementedError

    def optional(self, name: str) -> Tensor | None:
        """Return a parameter, or None if its feature is switched off."""
        return self._parameters.get(name)

    def scalar(self, name: str) -> Tensor:
        """Return one of the packed scalars as a 0-dimensional view."""
        slot = self.config.scalar_slots[name]
        return self.scalars[slot : slot + 1].squeeze(0)

    def bank_views(self) -> dict[str, Tensor]:
        """Return the banks as stacks of matrices for the optimizer: first MLP matrices even, second odd."""
        d = self.config.model_dim
        views = {"mlp_bank": self.mlp_bank.detach().flatten(0, 1)}
        if "attn_bank" in self._parameters:
            views["attn_bank"] = self.attn_bank.detach().view(-1, d, d)
        return views

    def rows_read(self, inputs: Tensor, cu_seqlens: Tensor | None = None) -> dict[str, Tensor]:
        """Return the rows of the bigram and value tables that a forward reads, by parameter.

        No other row of these tables gets a gradient.

        Args:
            inputs, cu_seqlens: as for `forward`, on the host.
        """
        c, rows = self.config, {}
        if c.bigram_vocab_size:
            bounds = [0] if cu_seqlens is None else cu_seqlens.tolist()
            starts = flag_starts(bounds, inputs.shape[0]) if c.respect_docs else None
            rows["bigram_embed"] = bigram_hash(inputs, c.bigram_vocab_size, starts)
        if c.value_embed_layers:
            offsets = torch.arange(len(c.value_embed_layers)) * c.padded_vocab
            rows["value_embeds"] = inputs + offsets[:, None]
        return rows

    # State that a schedule changes.

    def window_tokens(self, layer: int) -> int:
        """Return how many earlier time slots a layer's attention sees."""
        # Not `self.windows[condition]`: torch.compile cannot index a tuple with a bool.
        short, long = self.windows
        return (long if layer in self.config.long_window_layers else short) * self.config.window_block

    def set_windows(self, short: int, long: int, *, yarn: bool = True) -> None:
        """Change the windows (in blocks). A new long window is a YaRN step, unless `yarn` is False.

        The record's last evaluation widens the window without one.
        """
        if not 0 < short <= long:
            raise ValueError(f"windows: expected 0 < short <= long, got {short}, {long}")
        block = self.config.window_block
        if yarn and self.config.yarn and long != self.windows[1]:
            self.rotary.rescale(self.windows[1] * block, long * block)
        self.windows = (short, long)

    def schedule_state(self) -> dict[str, Any]:
        """Return the state that a schedule changes besides the parameters; JSON-able, exact."""
        return {"windows": list(self.windows), "tied": self.tied, "rotary": self.rotary.state_dict()}

    def load_schedule_state(self, state: Mapping[str, Any]) -> None:
        short, long = state["windows"]
        self.rotary.load_state_dict(state["rotary"])
        self.windows = (short, long)
        self.tied = bool(state["tied"])

    # Head and embedding: two parameters that are kept equal while tied.

    def head_weight(self) -> Tensor:
        """[V, D]; a view, so gradients reach the stored layout."""
        return self.lm_head.T if self.config.transposed_head else self.lm_head

    def head_weight_gradient(self) -> Tensor | None:
        """Return the head's gradient as [V, D], or None."""
        grad = self.lm_head.grad
        return grad if grad is None or not self.config.transposed_head else grad.T

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [T, V] of final states [T, D], softcapped as in the loss."""
        raw = torch.matmul(hidden, self.head_weight().T)
        if self.config.softcap is None:
            return raw
        a, b, c = self.config.softcap
        return a * torch.sigmoid((raw + b) / c)

    @torch.no_grad()
    def mean_loss(
        self,
        inputs: Tensor,
        targets: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        bigram_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the evaluation loss: mean cross-entropy of the next token."""
        return self(inputs, targets, cu_seqlens, bigram_ids=bigram_ids, mtp=(1.0,)) / inputs.shape[0]

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        generator: torch.Generator | None = None,
        temperature: float = 1.0,
        stop: int | None = None,
    ) -> Tensor:
        """Sample continuations; the prompts of a batch are packed as documents of one sequence.

        Every new token runs the whole sequence again: fine for short sequences, wasteful for long ones.
        With a model whose smear, key offset or bigrams cross documents, a row's first token sees its
        neighbour; `respect_docs` prevents that.

        Args:
            tokens: [T] one prompt, or [B, T] prompts of equal length, T >= 1.
            max_new_tokens: how many tokens to add.
            generator: for sampling, on the model's device.
            temperature: softmax temperature; 0 takes the most likely token.
            stop: after a row produces this token, it only repeats it.

        Returns:
            [T + new] or [B, T + new] int64, prompts included. Padding ids are never sampled.
        """
        if tokens.dim() not in (1, 2) or tokens.is_floating_point() or tokens.shape[-1] < 1:
            raise ValueError(
                f"tokens: expected [T] or [B, T] integers, got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: expected 0 or more, got {max_new_tokens}")
        if temperature < 0:
            raise ValueError(f"temperature: expected 0 or more, got {temperature}")
        rows = tokens.long() if tokens.dim() == 2 else tokens.long()[None]
        count, vocab = rows.shape[0], self.config.vocab_size
        done = torch.zeros(count, dtype=torch.bool, device=rows.device)
        for _ in range(max_new_tokens):
            length = rows.shape[1]
            bounds = torch.arange(0, count * length + 1, length, dtype=torch.int32)
            states = self.hidden(rows.reshape(-1), bounds)[length - 1 :: length]
            logits = self.logits(states)[:, :vocab].float()
            if temperature == 0:
                new = logits.argmax(-1)
            else:
                new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
            if stop is not None:
                new = torch.where(done, stop, new)
                done |= new == stop
            rows = torch.cat([rows, new[:, None]], dim=1)
        return rows if tokens.dim() == 2 else rows[0]

    @torch.no_grad()
    def tie_gradients(self) -> None:
        """While tied: add the embedding's gradient to the head's and clear it; the head alone is updated."""
        if not self.tied or self.embed.grad is None:
            return
        if self.lm_head.grad is None:
            self.lm_head.grad = torch.zeros_like(self.lm_head)
        if self.config.transposed_head:
            from leanstep.muon.transpose import transpose_add

            transpose_add(self.embed.grad, self.lm_head.grad)
        else:
            self.lm_head.grad += self.embed.grad
        self.embed.grad = None

    @torch.no_grad()
    def copy_tied(self) -> None:
        """While tied: copy the head's updated values to the embedding."""
        if not self.tied:
            return
        if self.config.transposed_head:
            from leanstep.muon.transpose import transpose_copy

            transpose_copy(self.lm_head, self.embed)
        else:
            self.embed.copy_(self.lm_head)

    def untie(self) -> None:
        """Update head and embedding separately from now on (the optimizer copies its own state)."""
        self.tied = False
