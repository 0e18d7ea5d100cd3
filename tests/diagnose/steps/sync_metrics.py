"""A trainer class: one branch on the gradient norm, three metrics read one by one, one line of log."""
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 48), torch.nn.Linear(48, 8)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class Trainer:
    def __init__(self):
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.log = []

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not torch.isfinite(norm):  # expect: host-sync count=1
            return
        self.optimizer.step()
        self.schedule.step()
        accuracy = (logits.argmax(-1) == y).float().mean()
        self.log.append([metric.item() for metric in (loss, norm, accuracy)])  # expect: host-sync count=3


def main():
    trainer = Trainer()
    x, y = torch.randn(64, 32), torch.randint(0, 8, (64,))
    for step in range(4):
        trainer.step(x, y)
        print(f"step {step}: loss {trainer.log[-1][0]:.3f}")


if __name__ == "__main__":
    main()
