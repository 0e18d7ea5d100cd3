"""One GRPO update with long prompts: only the rows that the loss reads ever meet the LM head."""

import torch
from policy import DEVICE, LENGTH, RESPONSE, Policy, Rollouts, make_batch

from leanstep.heads import linear_logprobs, plan_rows

TEMPERATURE, CLIP, ENTROPY_BONUS = 0.8, 0.2, 0.01


def setup(dtype: torch.dtype = torch.float32) -> tuple[Policy, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Policy().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_fn(model: Policy, batch: Rollouts) -> torch.Tensor:
    hidden = model(batch.tokens)
    lengths, masks = [LENGTH] * len(batch.tokens), list(batch.loss_mask[:, -RESPONSE:])
    counts, where = [RESPONSE] * len(masks), hidden.device
    plan = plan_rows(lengths, counts, loss_masks=masks, select="loss_mask", device=where)
    targets = plan.targets(batch.tokens.flatten())
    flat, head = hidden.flatten(0, 1), model.head.weight
    out = linear_logprobs(flat, head, targets, rows=plan.rows, entropy="grad", temperature=TEMPERATURE)
    logp, entropy = out.logp, out.entropy
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
