"""Train a small GPT on parameter banks: banks are taken apart once, Muon works shape by shape."""

import torch
import torch.nn.functional as F
from text import VOCAB, make_batch
from torch import Tensor, nn

from leanstep.muon import NorMuon, split_params, unbind_bank

LAYERS, WIDTH, HEADS = 32, 128, 4


class GPT(nn.Module):
    """The weights of all layers in two banks, as speedruns keep them: one collective for each."""

    def __init__(self) -> None:
        super().__init__()
        bound = 0.5 * (3 / WIDTH) ** 0.5
        self.attention_bank = nn.Parameter(torch.empty(LAYERS, 4, WIDTH, WIDTH).uniform_(-bound, bound))
        self.mlp_bank = nn.Parameter(torch.empty(LAYERS, 2, 4 * WIDTH, WIDTH).uniform_(-bound, bound))
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.rms_norm(self.embed(tokens), (WIDTH,))
        attention, mlp = unbind_bank(self.attention_bank), unbind_bank(self.mlp_bank)
        for layer in range(LAYERS):
            query, key, value, out = attention[4 * layer : 4 * layer + 4]
            up, down = mlp[2 * layer : 2 * layer + 2]
            z = F.rms_norm(x, (WIDTH,))
            q, k, v = (F.linear(z, w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (query, key, value))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
            x = x + F.linear(y, out)
            x = x + F.relu(F.linear(F.rms_norm(x, (WIDTH,)), up)).square() @ down
        return self.head(F.rms_norm(x, (WIDTH,)))


def setup(dtype: torch.dtype = torch.float32) -> tuple[GPT, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = GPT().to(dtype)
    groups = split_params(
        model, algorithm="muon", muon={"weight_decay": 0}, adam={"betas": (0.9, 0.95), "weight_decay": 0}
    )
    return model, [NorMuon(groups, lr=0.01, adam={"lr": 0.003})]


def loss_fn(model: GPT, data: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = data
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train_step(model: GPT, optimizers: list[torch.optim.Optimizer], data: tuple[Tensor, Tensor]) -> Tensor:
    loss = loss_fn(model, data)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def main(steps: int = 5) -> None:
    model, optimizers = setup()
    losses = [train_step(model, optimizers, make_batch(step)) for step in range(steps)]
    for step, loss in enumerate(torch.stack(losses).tolist(), 1):
        print(f"step {step}  loss {loss:.6f}")


if __name__ == "__main__":
    main()
