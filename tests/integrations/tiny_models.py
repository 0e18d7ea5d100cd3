"""Tiny random models, tokenizers and data for the adapters' tests. No network."""

from __future__ import annotations

import pytest
import torch

# The extra `integrations` brings all of them; without it every test module that imports this one is skipped.
for name in ("transformers", "trl", "datasets"):
    pytest.importorskip(name)

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 211


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCAB - 3)} | {
        "<pad>": VOCAB - 3,
        "<eos>": VOCAB - 2,
        "<unk>": VOCAB - 1,
    }
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def config(family: str, vocab: int = VOCAB, width: int = 32, layers: int = 2):
    shared = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 512,
        "pad_token_id": vocab - 3,
        "eos_token_id": vocab - 2,
        "bos_token_id": vocab - 2,
    }
    if family == "llama":
        return LlamaConfig(**shared, tie_word_embeddings=False)
    if family == "qwen2":
        return Qwen2Config(**shared, tie_word_embeddings=False)
    if family == "qwen3":
        return Qwen3Config(**shared, head_dim=width // 2, tie_word_embeddings=True)
    if family == "gemma2":
        return Gemma2Config(
            **shared, head_dim=width // 2, final_logit_softcapping=3.0, query_pre_attn_scalar=16
        )
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            **shared, head_dim=width // 2, moe_intermediate_size=width, num_experts=4, num_experts_per_tok=2,
            router_aux_loss_coef=0.1, tie_word_embeddings=False,
        )  # fmt: skip
    assert family == "gpt2"
    return GPT2Config(
        vocab_size=vocab, n_embd=width, n_layer=layers, n_head=2, n_positions=512, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, eos_token_id=vocab - 2, bos_token_id=vocab - 2,
    )  # fmt: skip


FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gpt2")


def causal_lm(family: str, seed: int = 0, **options):
    torch.manual_seed(seed)
    # Eager experts: the grouped products of a mixture of experts take no doubles.
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config(family, **options), **settings)
    # Larger weights than the initialisation's: softcap, temperature and entropy then do something visible.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model.float()
