import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
split = vars(parser.parse_args())
torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
rows = []
for number in range(8):
    ids = torch.randint(64, (10,))
    labels = ids.clone()
    labels[: 1 + number] = -100
    rows.append({"input_ids": ids, "labels": labels})
options = TrainingArguments(
    "/tmp/museum", max_steps=1, use_cpu=True, report_to=[], save_strategy="no", **split
)
Trainer(GPT2LMHeadModel(config), options, train_dataset=rows).train()
