"""A frozen teacher of twenty layers runs under no_grad: its activations are no churn."""  # expect: nothing
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
teacher = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(20)).requires_grad_(False)
student = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
x = torch.randn(512, 512)

for _ in range(4):
    optimizer.zero_grad()
    with torch.no_grad():
        goal = x
        for layer in teacher:
            goal = torch.relu(layer(goal))
    (student(x) - goal).square().mean().backward()
    optimizer.step()
