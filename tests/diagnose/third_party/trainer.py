"""A transformers Trainer on a tiny random Qwen2; 32 of 48 positions are prompt."""

import tempfile

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
model = Qwen2ForCausalLM(config)
ids = torch.randint(0, 1024, (64, 48))
labels = ids.clone()
labels[:, :32] = -100
data = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), max_steps=5, per_device_train_batch_size=8, report_to=[], logging_steps=1,
    save_strategy="no", use_cpu=True, disable_tqdm=True,
)  # fmt: skip
Trainer(model, args, train_dataset=data).train()
