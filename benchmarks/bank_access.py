"""Every layer's weights out of the parameter banks, and their gradients back into them.

python -m benchmarks.bank_access --help
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import (
    Benchmark,
    Outputs,
    Params,
    Row,
    Step,
    Workload,
    main,
)
from leanstep.muon.banks import unbind_bank


def _make_banks(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    layers, dim, hidden = params["layers"], params["model_dim"], params["hidden"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(device)

    return Workload(
        {
            "mlp_bank": draw(layers, 2, hidden, dim),
            "attn_bank": draw(layers, 4 * dim, dim),
            "upstream:mlp": draw(layers, 2, hidden, dim),
            "upstream:attn": draw(layers, 4 * dim, dim),
        }
    )


def _access(
    take: Callable[[Tensor, Tensor], tuple[list[Tensor], list[Tensor]]],
) -> Callable[[Workload], Step]:
    """Read every layer's matrices from both banks, and backpropagate one gradient through each."""

    def build(workload: Workload) -> Step:
        t = workload.tensors
        # In a training step, these arrive one at a time from the matrix products.
        upstream = [*t["upstream:mlp"].flatten(0, 1).unbind(0), *t["upstream:attn"].unbind(0)]

        def step() -> Outputs:
            mlp, attn = (t[name].detach().requires_grad_() for name in ("mlp_bank", "attn_bank"))
            mlp_weights, attn_weights = take(mlp, attn)
            grads = torch.autograd.grad([*mlp_weights, *attn_weights], [mlp, attn], upstream)
            return {"grad:mlp_bank": grads[0], "grad:attn_bank": grads[1]}

        return step

    return build


def _by_index(mlp: Tensor, attn: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [mlp[i, j] for i in range(mlp.shape[0]) for j in range(2)], [attn[i] for i in range(attn.shape[0])]


def _by_halves(mlp: Tensor, attn: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    first, second = mlp[:, 0].unbind(0), mlp[:, 1].unbind(0)
    return [w for pair in zip(first, second, strict=True) for w in pair], list(attn.unbind(0))


def _by_unbind(mlp: Tensor, attn: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return list(unbind_bank(mlp)), list(unbind_bank(attn))


def _stream_banks(workload: Workload) -> Step:
    t = workload.tensors

    def step() -> Outputs:
        return {"grad:mlp_bank": t["upstream:mlp"].clone(), "grad:attn_bank": t["upstream:attn"].clone()}

    return step


# Three ways to read a bank; values and gradients have the same bits.
BANK_FORMS = {"index": _by_index, "halves": _by_halves, "unbind": _by_unbind}


def train_from_banks(form: str, seed: int, steps: int, *, compiled: bool = False) -> list[float]:
    """Losses of a residual network in bfloat16 whose weights are read from banks in one of `BANK_FORMS`."""
    generator = torch.Generator().manual_seed(seed)
    layers, dim = 4, 32

    def draw(*shape: int, scale: float) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.bfloat16().requires_grad_()

    mlp, attn = draw(layers, 2, 4 * dim, dim, scale=0.1), draw(layers, 4 * dim, dim, scale=0.1)
    truth = torch.randn(dim, dim, generator=generator) / dim**0.5
    optimizer = torch.optim.AdamW([mlp, attn], lr=2e-3)

    def loss_of(x: Tensor, mlp: Tensor, attn: Tensor) -> Tensor:
        mlp_weights, attn_weights = BANK_FORMS[form](mlp, attn)
        hidden = x.bfloat16()
        for layer in range(layers):
            mixed = F.rms_norm(hidden, (dim,)) @ attn_weights[layer].T
            hidden = hidden + mixed[:, :dim] * torch.tanh(mixed[:, dim : 2 * dim])
            up = F.relu(F.rms_norm(hidden, (dim,)) @ mlp_weights[2 * layer].T).square()
            hidden = hidden + up @ mlp_weights[2 * layer + 1]
        return (hidden.float() - x @ truth).square().mean()

    step = torch.compile(loss_of, dynamic=False, fullgraph=True) if compiled else loss_of
    losses = []
    for _ in range(steps):
        loss = step(torch.randn(64, dim, generator=generator), mlp, attn)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


BENCHMARK = Benchmark(
    name="bank-access",
    summary="Every layer's weights out of the parameter banks, and their gradients back into them.",
    make=_make_banks,
    rows=(
        Row("plain", "reference", _access(_by_index), note="bank[i] in every layer"),
        Row("leanstep", "fast", _access(_by_unbind), note="unbind once; backward is one stack"),
        Row(
            "halves",
            "fast",
            _access(_by_halves),
            note="bank[:, 0] and bank[:, 1], each unbound: one zero fill per half",
        ),
        Row("limit", "limit", _stream_banks, note="one copy of the gradients"),
    ),
    sizes={
        "tiny": {"layers": 11, "model_dim": 32, "hidden": 128},
        "odd": {"layers": 1, "model_dim": 41, "hidden": 17},
        "cpu": {"layers": 11, "model_dim": 256, "hidden": 1024},
        "seed": {"layers": 11, "model_dim": 768, "hidden": 3072},
        "gpu": {"layers": 11, "model_dim": 768, "hidden": 3072},
    },
    prove_sizes=("tiny", "odd"),
    dtypes=(torch.float32, torch.bfloat16),
    # Nothing is computed here, only moved: every path must return the same bits.
    floor=0.0,
)

if __name__ == "__main__":
    main(BENCHMARK)
