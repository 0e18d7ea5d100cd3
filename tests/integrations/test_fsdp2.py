"""FSDP2: a sharded head under `linear_logprobs` and `NorMuon` on a `fully_shard` model equal one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

VOCAB, WIDTH, ROWS = 41, 16, 10

pytestmark = pytest.mark.filterwarnings("ignore")


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        from leanstep.logprob import linear_logprobs

        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        hidden = x[:, :-1].reshape(-1, WIDTH)
        targets = ids[:, 1:].reshape(-1)[rows]
        out = linear_logprobs(hidden, self.head.weight, targets, rows=rows, entropy="grad")
        return -(out.logp.mean() + 0.01 * out.entropy.mean())


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (4, 6), generator=generator)
    return ids, torch.arange(2, 2 + ROWS)


def train(model: nn.Module, steps: int, rank: int, world_size: int) -> list[float]:
    from leanstep.muon import NorMuon, split_params
    from leanstep.muon.fsdp import FsdpNorMuon

    kind = FsdpNorMuon if world_size > 1 else NorMuon
    optimizer = kind(split_params(model), lr=0.02)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        ids, _ = data(step)
        local = ids.shape[0] // world_size
        ids = ids[rank * local : (rank + 1) * local]
        # Every sequence has 5 scored rows; the same ones on every rank, so that means of means agree.
        rows = torch.cat([torch.arange(1, 5) + 5 * i for i in range(local)])
        loss = model(ids, rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def build() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM()


def fsdp2_rank(rank: int, world_size: int, steps: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    losses = train(model, steps, rank, world_size)
    weights = {n: p.full_tensor().detach().numpy() for n, p in model.named_parameters()}
    return losses, weights


def refused_rank(rank: int, world_size: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from leanstep.muon import NorMuon, split_params

    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    with pytest.raises(ValueError) as caught:
        NorMuon(split_params(model), lr=0.02)
    return str(caught.value)


def test_plain_norm_muon_names_the_optimizer_for_shards(run_ranks):
    (message,) = run_ranks(1, refused_rank)
    assert "got a DTensor; use leanstep.muon.fsdp.FsdpNorMuon" in message


def test_two_sharded_ranks_follow_one_process(run_ranks):
    model = build()
    losses = train(model, 5, 0, 1)
    results = run_ranks(2, fsdp2_rank, 5, timeout=120)
    together = np.mean([r[0] for r in results], axis=0)
    np.testing.assert_allclose(together, losses, rtol=1e-4)
    for name, parameter in model.named_parameters():
        for _, weights in results:
            np.testing.assert_allclose(
                weights[name], parameter.detach().numpy(), rtol=2e-3, atol=2e-4, err_msg=name
            )
