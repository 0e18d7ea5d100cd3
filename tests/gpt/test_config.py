from __future__ import annotations

import dataclasses

import pytest
import torch

from leanstep.gpt import GPT, GPTConfig


def test_record_preset_has_the_record_s_shapes():
    config = GPTConfig.preset("record-74")
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
    assert shapes == {
        "embed": (50304, 768),
        "lm_head": (768, 50304),
        "bigram_embed": (251520, 768),
        "value_embeds": (5 * 50304, 768),
        "attn_bank": (10, 3072, 768),
        "mlp_bank": (12, 2, 3072, 768),
        "attn_gate_bank": (10, 6, 12),
        "ve_gate_bank": (5, 6, 12),
        "smear_gate": (1, 12),
        "skip_gate": (1, 12),
        "post_lambdas": (11, 2, 2),
        "resid_lambdas": (11, 2),
        "x0_lambdas": (11,),
        "bigram_lambdas": (11,),
        "scalars": (25,),
    }


def test_bf16_model_keeps_its_lambdas_in_fp32():
    model = GPT(GPTConfig.preset("tiny", dtype="bfloat16"))
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert kinds["attn_bank"] == kinds["embed"] == kinds["smear_gate"] == torch.bfloat16
    assert kinds["resid_lambdas"] == kinds["scalars"] == torch.float32
    banks = GPT(GPTConfig.preset("tiny", bank_dtype="bfloat16"))
    assert banks.mlp_bank.dtype == torch.bfloat16 and banks.embed.dtype == torch.float32


def test_scalars_are_padded_to_the_world_size():
    assert GPTConfig.preset("record-74", scalar_multiple=8).num_scalars == 32
    assert GPTConfig.preset("record-74").scalar_slots == {"smear": 22, "backout": 23, "skip0": 24}
    assert GPTConfig.preset("record-74", smear=False).scalar_slots == {"backout": 22, "skip0": 23}


def test_config_is_frozen_and_presets_take_fields():
    config = GPTConfig.preset("tiny", vocab_size=300)
    assert config.vocab_size == 300 and config.padded_vocab == 384
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_heads": 5}, "num_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"head_dim": 4, "num_heads": 16}, "head_dim"),
        ({"attention_free_layers": (9,)}, "attention_free_layers"),
        ({"paired_layers": (1,)}, "paired_layers"),
        ({"paired_layers": (0,)}, "key_offset_layers"),
        ({"parallel_start": 9}, "parallel_start"),
        ({"backout_layer": 4}, "backout_layer"),
        ({"skip_pairs": ((2, 1),)}, "skip_pairs"),
        ({"inject": "around"}, "inject"),
        ({"mlp_bank_layers": 3}, "mlp_bank_layers"),
        ({"windows": (3, 1)}, "windows"),
        ({"mtp": ()}, "mtp"),
        ({"dtype": "int8"}, "dtype"),
        ({"gate_width": 65}, "gate_width"),
        ({"bigram_vocab_size": 1}, "bigram_vocab_size"),
    ],
)
def test_contradictions_are_named(fields: dict, words: str):
    with pytest.raises(ValueError, match=words):
        GPTConfig.preset("tiny", **fields)


def test_unknown_preset_and_field_are_named():
    with pytest.raises(ValueError, match="record-74"):
        GPTConfig.preset("huge")
    with pytest.raises(ValueError, match="colour"):
        GPTConfig.preset("tiny", colour="red")
