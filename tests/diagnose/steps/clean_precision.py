"""Widening to compute and narrowing the result is no round trip; narrowing first rounds and is meant."""  # expect: nothing
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
table = torch.nn.Parameter(torch.randn(512, 256).bfloat16())
gain = torch.nn.Parameter(torch.rand(256))
optimizer = torch.optim.SGD([table, gain], lr=0.01)
ids = torch.randint(0, 512, (256,))


def norm(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


for _ in range(4):
    optimizer.zero_grad()
    h = norm(table[ids]).float() * gain
    rounded = h.detach().bfloat16().float()
    (h - rounded).square().mean().backward()
    h.detach().mul_(2)
    optimizer.step()
