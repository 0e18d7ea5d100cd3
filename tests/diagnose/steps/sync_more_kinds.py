"""More ways to look: a copy to the host, a list of scalars, a one-hot of unknown width, a print, unique."""
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(64, 16), torch.randint(0, 8, (64,))
seen = []

for step in range(4):
    optimizer.zero_grad()
    logits = model(x)
    target = F.one_hot(y).float()  # expect: host-sync count=1
    loss = F.mse_loss(logits.softmax(-1), target)
    loss.backward()
    optimizer.step()
    seen.append(logits.detach().cpu().numpy())  # expect: host-sync count=1
    pair = torch.tensor([loss.detach(), logits.detach().amax()])  # expect: host-sync count=1
    print(f"loss {loss}")  # expect: host-sync count=1
    classes = logits.detach().argmax(-1).unique()  # expect: host-sync count=1
    rows = torch.where(logits.detach()[:, 0] > 0)[0]  # expect: host-sync count=1
    logits.detach()[rows] = 0.0
