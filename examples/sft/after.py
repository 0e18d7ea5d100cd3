"""The loss of `before.py` without the logits of the prompt."""

import argparse

import torch
from torch import Tensor, nn

from leanstep.heads import linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, WIDTH, VOCAB = 256, 256, 32_000


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.embedding(tokens))


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, LENGTH))
    labels = tokens.clone()
    labels[:, : 3 * LENGTH // 4] = -100
    return tokens.to(DEVICE), labels.to(DEVICE)


def loss_of(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(model(tokens), model.head, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    size = parser.parse_args().batch_size
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(10):
        tokens, labels = batch_of(size)
        loss = loss_of(model, tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
