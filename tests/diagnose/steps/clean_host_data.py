"""Indices are drawn and looked at on the host, as a loader does; a scalar of the schedule is there as well."""
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
device = "cpu"
text = list(range(97)) * 40
embed, head = torch.nn.Embedding(97, 16), torch.nn.Linear(16, 97)
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
rate = torch.tensor(0.1)


def batch():
    starts = torch.randint(len(text) - 9, (8,))
    rows = torch.stack([torch.tensor(text[i : i + 9]) for i in starts])
    if rows.max() > 96:
        raise ValueError("a token outside of the vocabulary")
    return rows.to(device)


for step in range(5):  # expect: nothing
    ids = batch()
    optimizer.zero_grad()
    loss = F.cross_entropy(head(embed(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    rate.fill_(0.1 / (step + 1))
    for group in optimizer.param_groups:
        group["lr"] = rate.item()
    optimizer.step()
