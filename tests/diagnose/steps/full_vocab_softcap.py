"""Capped logits: the tanh and the log-softmax each keep a [512, 8192] tensor."""
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
ROWS, DIM, VOCAB = 512, 32, 8192


class LanguageModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x, targets):
        logits = self.head(torch.tanh(self.body(x)))
        capped = 30 * torch.tanh(logits / 30)  # expect: full-vocab count=1
        return F.cross_entropy(capped, targets)  # expect: full-vocab count=1


model = LanguageModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, targets = torch.randn(ROWS, DIM), torch.randint(0, VOCAB, (ROWS,))
for _ in range(4):
    optimizer.zero_grad()
    model(x, targets).backward()
    optimizer.step()
