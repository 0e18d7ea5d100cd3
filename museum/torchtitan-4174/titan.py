import sys
import types

import torch
import torch.nn.functional as F
import torchtitan

# The package itself imports vllm; its losses do not.
rl = sys.modules["torchtitan.experiments.rl"] = types.ModuleType("torchtitan.experiments.rl")
rl.__path__ = [f"{next(iter(torchtitan.__path__))}/experiments/rl"]
from torchtitan.experiments.rl.losses.dapo import DAPOLoss  # noqa: E402

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(37, 16), torch.nn.Linear(16, 37))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.randint(37, (4, 12))
old = F.log_softmax(torch.randn(4, 12, 37), -1).gather(-1, ids[..., None])[..., 0]
old[0, 5] = old[2, 7] = float("-inf")
advantages, mask = torch.randn(4, 1).expand(4, 12), torch.arange(12).expand(4, 12) >= 1
# The batcher's count, before (all response tokens) and after the fix (those with a finite log-probability).
count = (mask & old.isfinite()).sum() if "--fixed" in sys.argv else mask.sum()
logits = model(ids.roll(1, 1))
options = {"generator_logprobs": old, "advantages": advantages, "loss_mask": mask}
DAPOLoss(DAPOLoss.Config())(logits, ids, int(count), **options)[0].backward()
optimizer.step()
