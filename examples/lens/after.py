"""Train a context controller from preferences: the objective as one block of tensor ops."""

import torch
from controller import BLOCK, MAX_LOD, TOKENS, Cached, Controller, make_batch

from leanstep.lens import LensBatch, LensConfig, LensObjective

objective = LensObjective(LensConfig(block_size=BLOCK, max_lod=MAX_LOD))


def setup(dtype: torch.dtype = torch.float32) -> tuple[Controller, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Controller().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


def loss_fn(model: Controller, batch: Cached) -> torch.Tensor:
    scores = model(batch)
    contexts = LensBatch.from_tensors(
        batch.positions, batch.lods, batch.losses, batch.rows, num_tokens=TOKENS
    )
    return objective(scores, contexts).loss


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
