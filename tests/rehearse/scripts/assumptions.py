"""Guards that real training loops have, on values that nobody knows: what test_branches.py looks at."""

import json
import math

import torch
from torch import nn

model = nn.Linear(2_048, 1_024).cuda()  # its gradient has more elements than a rehearsal follows
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
best, total, seen = math.inf, 0.0, []
host = torch.zeros(1)


@torch.compile
def scaled(x, factor):
    return (x * factor).sum()


for _ in range(3):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(32, 2_048, device="cuda")).square().mean()
    if not loss.isfinite():  # MARK finite
        continue
    is_bad = bool(torch.isnan(loss))
    if is_bad:  # MARK variable
        continue
    if math.isinf(loss.item()):  # MARK math
        raise SystemExit(1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if not all(torch.isfinite(p.grad).all() for p in model.parameters()):  # MARK gradients
        continue
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if norm < 100.0:  # MARK compared
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    total += loss.item()
    if total < best:  # MARK accumulated
        best = total
    host.copy_(loss.detach())
    if host > 0:  # MARK on the host
        pass
    scaled(loss.detach(), total)
    nans = torch.isnan(model.weight)
    seen.append(
        {
            "finite": bool(torch.isfinite(model.weight).all()),
            "nan": bool(nans.any()),
            "selected": len(model.weight[nans]),
            "self": bool(loss == loss),
            "norm": float(norm),
            "scale": scaler.get_scale(),
            "text": f"{total:.1f} {json.dumps(total)}",
        }
    )
    print(json.dumps(seen))
