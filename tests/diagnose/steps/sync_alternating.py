"""Two networks trained in turn: the branch on the first one's loss is one read per step of both."""
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
maker = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
judge = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
maker_optimizer = torch.optim.SGD(maker.parameters(), lr=0.1)
judge_optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
real = torch.randn(64, 16)

for _ in range(5):
    noise = torch.randn(64, 8)
    made = maker(noise)
    judge_optimizer.zero_grad()
    loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
    loss.backward()
    if loss > 0.1:  # expect: host-sync count=1
        judge_optimizer.step()
    maker_optimizer.zero_grad()
    F.softplus(-judge(made)).mean().backward()
    maker_optimizer.step()
