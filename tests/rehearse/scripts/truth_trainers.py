"""transformers' Trainer and TRL's SFTTrainer with a small model: more variants of truth.py."""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.utils.import_utils import is_tracing
from trl import SFTConfig, SFTTrainer
from trl.kernels import chunked_logprob

DEVICE = sys.argv[1]
chunked_logprob._TRITON_AVAILABLE = False  # the same tile loop on both devices
VOCAB, LENGTH = 4000, 128
ROWS = Dataset.from_list(
    [
        {
            "input_ids": [(7 * i + j) % VOCAB for j in range(LENGTH)],
            "labels": [j % VOCAB for j in range(LENGTH)],
        }
        for i in range(8)
    ]
)


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def settings(folder, **more):
    return dict(
        output_dir=folder, per_device_train_batch_size=4, max_steps=2, report_to=[], save_strategy="no",
        logging_strategy="no", use_cpu=DEVICE == "cpu", optim="adamw_torch_fused", disable_tqdm=True,
        dataloader_pin_memory=False, **more,
    )  # fmt: skip


def trainer(**more):
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model(), TrainingArguments(**settings(folder, **more)), train_dataset=ROWS).train()


def tokenizer():
    words = models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="1")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="2")


def sft():
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            **settings(folder, max_length=LENGTH, gradient_checkpointing=False, bf16=False, loss_type="nll")
        )
        SFTTrainer(
            model(), arguments, train_dataset=ROWS.remove_columns("labels"), processing_class=tokenizer()
        ).train()


# On a device transformers does not trace: its masks and its attention are those of real tensors.
assert not is_tracing(torch.ones(1, device=DEVICE))
VARIANTS = {"transformers": trainer, "trl": sft}
