"""Each chunk of the head runs its own backward, so only one is ever kept."""  # expect: nothing
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
ROWS, DIM, VOCAB, CHUNK = 1024, 32, 4096, 128
body, head = torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, VOCAB, bias=False)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
x, targets = torch.randn(ROWS, DIM), torch.randint(0, VOCAB, (ROWS,))

for _ in range(4):
    optimizer.zero_grad()
    hidden = body(x)
    leaf = hidden.detach().requires_grad_()
    total = torch.zeros(leaf.shape)
    for start in range(0, ROWS, CHUNK):
        piece = hidden.detach()[start : start + CHUNK].requires_grad_()
        (F.cross_entropy(head(piece), targets[start : start + CHUNK], reduction="sum") / ROWS).backward()
        total[start : start + CHUNK] = piece.grad
    hidden.backward(total)
    optimizer.step()
