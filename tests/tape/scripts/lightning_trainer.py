"""A Trainer of Lightning."""

import logging
import warnings

import lightning
import torch

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def training_step(self, batch, number):
        loss = self.layer(batch).square().mean()
        loss.item()  # SYNC
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.randn(48, 16), batch_size=8)
trainer = lightning.Trainer(
    accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=1, max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Model(), data)
