"""The heads that Cut Cross-Entropy is compared with: Gemma 2 2B, 8192 tokens, eager and compiled."""

import sys

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

# args: the row's name; memory is what a call needs beyond its operands
PUBLISHED = {
    "source": "https://github.com/apple/ml-cross-entropy",
    "date": "2024-11",
    "role": "development",
    "class": "kernels",
    "device": "a100",
    "steps": 1000,
    "rows": {
        "cce-head-eager": {
            "args": "cce-head-eager",
            "kernels_ms": {"forward": 82, "backward": 122, "both": 209},
            "kernels_extra_mib": {"forward": 24000, "backward": 16000, "both": 28000},
        },
        "cce-head-compile": {
            "args": "cce-head-compile",
            "kernels_ms": {"both": 144},
            "kernels_extra_mib": {"both": 16000},
        },
    },
}
TOKENS, WIDTH, VOCAB, SOFTCAP = 8192, 2304, 256_000, 30.0
torch.set_float32_matmul_precision("high")
# The figures are of torch 2.4.1, whose compiler wrote the scatter of the loss's gradient.
torch._inductor.config.optimize_scatter_upon_const_tensor = False
hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn(VOCAB, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
targets = torch.randint(0, VOCAB, (TOKENS,), device="cuda")
pace = torch.optim.SGD([torch.zeros(1, device="cuda", requires_grad=True)], lr=0.0)


def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = torch.tanh(hidden @ weight.T / SOFTCAP) * SOFTCAP
    return F.cross_entropy(logits.float(), targets)


row = PUBLISHED["rows"][sys.argv[1]]
call = torch.compile(head) if sys.argv[1].endswith("compile") else head
for part in row["kernels_ms"]:
    call(hidden, weight, targets).backward()
    hidden.grad = weight.grad = None
    loss = call(hidden, weight, targets) if part == "backward" else None
    pace.step()
    loss = call(hidden, weight, targets) if loss is None else loss
    if part != "forward":
        loss.backward()
    pace.step()
    del loss
