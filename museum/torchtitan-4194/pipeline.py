import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(37, 16), torch.nn.Linear(16, 37))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids, labels = torch.randint(37, (4, 12)), torch.randint(37, (4, 12))
labels[0, 3:] = -100
tokens = (labels != -100).sum()
# Before the fix the schedule runs backward on sums, and only the reported loss is divided.
count = tokens if "--fixed" in sys.argv else 1
loss = lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / count  # noqa: E731
stage = PipelineStage(model, 0, 1, torch.device("cpu"))
ScheduleGPipe(stage, 2, loss_fn=loss, scale_grads=False).step(ids, target=labels)
optimizer.step()
