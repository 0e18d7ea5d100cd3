"""Tokens are mixed by copying the activations into the other layout and adding the result back across layouts."""
import torch

torch.manual_seed(0)
torch.set_num_threads(1)


class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        y = self.tokens(x.transpose(1, 2).contiguous())  # expect: transposed-copy count=1
        return x + y.transpose(1, 2)  # expect: transposed-copy count=1


model = Mixer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(32, 64, 256)
for _ in range(4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
