"""A Trainer of transformers, with gradient accumulation."""

import tempfile

import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, x, labels=None):
        loss = (self.layer(x) - labels).square().mean()
        loss.item()  # SYNC
        return {"loss": loss}


torch.manual_seed(0)
data = [{"x": torch.randn(16), "labels": torch.zeros(4)} for _ in range(96)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=8, gradient_accumulation_steps=2, report_to=[],
        save_strategy="no", logging_strategy="no", use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(Model(), arguments, train_dataset=data).train()
