"""NorMuon's step on the parameters of a 124M GPT, on the device: float32, bfloat16, banks of the record.

Cut for `dev/rehearsed.py`: one step before, then for every row the one that makes the state and another.
"""

import torch
from torch import nn

from leanstep.muon import NorMuon

# Steps are cut at this optimizer's `step`; it has no gradient and launches nothing.
pace = torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cuda"))], lr=0.0)
pace.step()


def parameters(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(shape, device="cuda", dtype=dtype)) for shape in shapes]


for dtype, banks in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
    if banks:
        attention, mlp = parameters(dtype, (12, 4 * 768, 768), (24, 768, 3072))
        groups = [
            {"params": [attention], "split": [768] * 4},
            {"params": [mlp], "lr_mul": [1.0, 2.0] * 12},
        ]
    else:
        shapes = [(768, 768)] * 48 + [(3072, 768)] * 12 + [(768, 3072)] * 12
        groups = [{"params": parameters(dtype, *shapes)}]
    rest = parameters(dtype, (50_304, 768), (1024, 768), *[(768,)] * 25)
    optimizer = NorMuon([*groups, {"params": rest, "algorithm": "adam"}], lr=0.02)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.empty_like(param)
    for _ in range(2):
        optimizer.step()
        pace.step()
    del optimizer, groups, rest
