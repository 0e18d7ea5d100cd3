"""One GRPO update with long prompts: full logits, log_softmax, then the response is cut out."""

import torch
from policy import DEVICE, Policy, Rollouts, make_batch

TEMPERATURE, CLIP, ENTROPY_BONUS = 0.8, 0.2, 0.01


def setup(dtype: torch.dtype = torch.float32) -> tuple[Policy, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Policy().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_fn(model: Policy, batch: Rollouts) -> torch.Tensor:
    hidden = model(batch.tokens)
    logits = model.head(hidden[:, :-1]) / TEMPERATURE
    logp_all = torch.log_softmax(logits, dim=-1)
    logp_rows = logp_all.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    entropy_rows = -(logp_all.exp() * logp_all).sum(-1)
    mask = batch.loss_mask[:, 1:].bool()
    logp, entropy = logp_rows[mask], entropy_rows[mask]
    ratio = torch.exp(logp - batch.old_logp)
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy_loss = -torch.minimum(ratio * batch.advantages, clipped * batch.advantages).mean()
    return policy_loss - ENTROPY_BONUS * entropy.mean()


def train_step(model: Policy, optimizer: torch.optim.Optimizer, batch: Rollouts) -> torch.Tensor:
    loss = loss_fn(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main(steps: int = 5) -> None:
    model, optimizer = setup()
    model.to(DEVICE)
    losses = [train_step(model, optimizer, make_batch(step).to(DEVICE)) for step in range(steps)]
    for step, loss in enumerate(torch.stack(losses).tolist(), 1):
        print(f"step {step}  loss {loss:.6f}")


if __name__ == "__main__":
    main()
