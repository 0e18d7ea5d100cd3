"""Public paths under torch.cuda.graph, and what a capture refuses: what test_cuda_graphs.py looks at."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lens_workloads import make_batch
from leanstep.heads import linear_logprobs, linear_policy_loss, token_logprobs
from leanstep.lens import LensObjective

pace = torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cuda"))], lr=0.0)
steps = 0


def cut() -> None:
    global steps
    pace.step()
    steps += 1


def asked(*_: Any) -> None:
    raise AssertionError("asked for free memory")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_().requires_grad_(grad)


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs]))


def head() -> dict[str, Callable[[], Any]]:
    hidden, weight = normal(4_096, 512), normal(20_000, 512)
    targets, rows = torch.randint(20_000, (1_024,), device="cuda"), torch.arange(1_024, device="cuda") * 4
    old, logits = normal(1_024, dtype=torch.float32, grad=False), normal(1_024, 20_000)
    mask = torch.ones_like(old)

    def linear() -> Any:
        out = linear_logprobs(hidden, weight, targets, rows=rows, entropy="grad")
        return out, gradients([out.logp, out.entropy], [hidden, weight])

    def policy() -> Any:
        out = linear_policy_loss(hidden, weight, targets, old, old, mask=mask, rows=rows)
        return out, gradients([out.loss], [hidden, weight])

    def token() -> Any:
        out = token_logprobs(logits, targets, entropy="grad")
        return out, gradients([out.logp, out.entropy], [logits])

    return {"linear_logprobs": linear, "linear_policy_loss": policy, "token_logprobs": token}


def lens() -> dict[str, Callable[[], Any]]:
    params = {"samples": 3, "variants": 3, "tokens": 96, "block": 4, "max_lod": 2, "max_pairs": 8}
    batch, config = make_batch(params, torch.Generator().manual_seed(0), torch.device("cuda"))
    objective, scores = LensObjective(config), normal(*batch.pos.shape, dtype=torch.float32)
    return {"LensObjective": lambda: gradients([objective(scores, batch).loss], [scores])}


def captured(run: Callable[[], Any]) -> dict[str, Any]:
    """Two calls to warm up, one that is captured, two replays: a step of its own."""
    for _ in range(2):
        run()
    torch.cuda.mem_get_info, free = asked, torch.cuda.mem_get_info
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            kept = run()
    finally:
        torch.cuda.mem_get_info = free
    assert not torch.cuda.is_current_stream_capturing()
    cut()
    run()
    cut()
    graph.replay()
    graph.replay()
    cut()
    del kept
    return {"step": steps - 1}


def refused(run: Callable[[], Any]) -> dict[str, Any]:
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run()
    except RuntimeError as problem:
        return {"said": str(problem)}
    return {"said": ""}


def freed() -> dict[str, Any]:
    graph, lost = torch.cuda.CUDAGraph(), torch.ones(300, device="cuda")
    with torch.cuda.graph(graph):
        doubled = lost * 2
    del lost
    try:
        graph.replay()
    except RuntimeError as problem:
        return {"said": str(problem)}
    return {"said": f"{doubled.shape}"}


cut()
seen: dict[str, Any] = {}
for make in (head, lens):
    for name, run in make().items():
        try:
            seen[name] = captured(run)
        except Exception as problem:
            seen[name] = {"trouble": f"{type(problem).__name__}: {problem}"[:300]}
        cut()
number = torch.ones((), device="cuda")
seen["item"] = refused(lambda: number.item())
seen["synchronize"] = refused(torch.cuda.synchronize)
seen["pageable copy"] = refused(lambda: number.cpu())
seen["freed"] = freed()
print(json.dumps(seen))
