"""Each snippet of sync_snippets.py on the device, in a step of its own: the odd ones."""

import torch
from sync_snippets import SNIPPETS, namespace

pace = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cuda"))], lr=0.0)
for code, _ in SNIPPETS.values():
    names = namespace("cuda")
    pace.step()
    exec(compile(code, "snippet.py", "exec"), names)
    pace.step()
