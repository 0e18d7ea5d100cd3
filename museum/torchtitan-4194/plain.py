import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(37, 16), torch.nn.Linear(16, 37))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids, labels = torch.randint(37, (4, 12)), torch.randint(37, (4, 12))
labels[0, 3:] = -100
loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
(loss / (labels != -100).sum()).backward()
optimizer.step()
