"""Train a context controller from preferences: the objective as loops over pairs and entries."""

import torch
from controller import Cached, Controller, make_batch
from pair_losses import controller_loss


def setup(dtype: torch.dtype = torch.float32) -> tuple[Controller, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Controller().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def loss_fn(model: Controller, batch: Cached) -> torch.Tensor:
    scores = model(batch)
    return controller_loss(scores, batch.positions, batch.lods, batch.losses)


def train_step(model: Controller, optimizer: torch.optim.Optimizer, batch: Cached) -> torch.Tensor:
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main(steps: int = 5) -> None:
    model, optimizer = setup()
    losses = [train_step(model, optimizer, make_batch(step)) for step in range(steps)]
    for step, loss in enumerate(torch.stack(losses).tolist(), 1):
        print(f"step {step}  loss {loss:.6f}")


if __name__ == "__main__":
    main()
