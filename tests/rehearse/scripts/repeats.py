"""A step that repeats calls of many kinds: views, in-place, lists, several outputs, values, other floats."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
model = nn.DataParallel(nn.TransformerEncoder(layer, 2).cuda())
frozen = copy.deepcopy(model).requires_grad_(False)
assert all(isinstance(p, nn.Parameter) for p in frozen.parameters())
assert len({id(p) for p in [*model.parameters(), *frozen.parameters()]}) == 2 * len(list(model.parameters()))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
seen = []
for step in range(6):
    x = torch.randn(4, 8, 32, device="cuda")
    lengths = torch.tensor([8, 5, 3 + step, 1]).cuda()
    mask = torch.arange(8, device="cuda")[None] < lengths[:, None]
    a, b = model(x).chunk(2, -1)
    target = frozen(x).split(16, -1)[0]
    mixed = torch.cat([a * (1.0 + 0.1 * step), b], -1)[..., :16]
    loss = F.mse_loss(mixed, target, reduction="none").sum(-1)[mask].mean()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (step + 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    count = torch.zeros((), dtype=torch.int64, device="cuda").add_(1).add_(step)
    seen.append((int(mask.sum()), int(count), mixed.mul(2).dtype, torch.ones(3, device="cuda").add(1).shape))
    print([(m, c, str(d), tuple(s)) for m, c, d, s in seen][-1], flush=True)
