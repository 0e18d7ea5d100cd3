"""Each step leaves objects behind that refer to each other: the garbage collector will free them."""

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


class Output:
    def __init__(self, hidden, loss):
        self.hidden, self.loss, self.itself = hidden, loss, self


for _ in range(40):
    hidden = model(torch.randn(32, 64))
    output = Output(hidden, hidden.square().mean())
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
