"""FSDP2: a sharded head under `linear_logprobs` steps as the stock head; what NorMuon refuses of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import fully_shard
from torch import nn

VOCAB, WIDTH = 41, 16

pytestmark = pytest.mark.filterwarnings("ignore")


class StockLM(nn.Module):
    """A model as people write it: all logits, log_softmax, masked sums."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, items: int, coefficient: float) -> torch.Tensor:
        log_p = torch.log_softmax(self.head(self.backbone(ids)), -1)
        logp = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return -((logp + coefficient * entropy) * mask).sum() / items

    def backbone(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return (x + self.down(torch.relu(self.up(x))))[:, :-1]


def refused_rank(rank: int, world_size: int) -> tuple[int, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from leanstep.muon import NorMuon, split_params

    mesh = init_device_mesh("cpu", (world_size,))
    model = StockLM()
    fully_shard(model, mesh=mesh)
    state = NorMuon(split_params(model), lr=0.02).state_dict()
    columns = nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)]))
    with pytest.raises(ValueError) as caught:
        NorMuon([("columns", columns)], lr=0.02)
    return len(state["param_groups"]), str(caught.value)


def test_norm_muon_detects_shards_and_names_a_parameter_cut_by_columns(run_ranks):
    ((groups, message),) = run_ranks(1, refused_rank)
    assert groups == 2
    assert message.startswith("columns: expected a DTensor sharded along dimension 0, got (Shard(dim=1)")


class LeanLM(StockLM):
    """Scored rows only, by one call."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, items: int, coefficient: float) -> torch.Tensor:
        from leanstep.heads import linear_logprobs

        rows = mask.reshape(-1).nonzero().squeeze(1)
        hidden, targets = self.backbone(ids).reshape(-1, WIDTH), ids[:, 1:].reshape(-1)[rows]
        out = linear_logprobs(hidden, self.head.weight, targets, rows=rows, entropy="grad")
        return -(out.logp.sum() + coefficient * out.entropy.sum()) / items


def ragged_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left padding, ragged answers, a sample without any; in step 1 the second rank has nothing to score."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, VOCAB, (3, 9), generator=generator)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0, :4], mask[0, 7:] = False, False
    mask[1, : 3 + rank], mask[1, 6 - step :] = False, False
    mask[2] = False
    ids[0, :2] = 0
    if step == 1 and rank == 1:
        mask[:] = False
    return ids, mask


def stock_and_lean_rank(rank: int, world_size: int):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for kind, own_head in ((StockLM, False), (LeanLM, False), (LeanLM, True)):
        torch.manual_seed(0)
        model = kind()
        if own_head:
            # Its own FSDP group: in our forward the weight is then still a sharded DTensor.
            fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses, gradients = [], []
        for step in range(3):
            ids, mask = ragged_batch(step, rank)
            items = sum(int(ragged_batch(step, r)[1].sum()) for r in range(world_size))
            loss = model(ids, mask, items, 0.05)
            optimizer.zero_grad()
            loss.backward()
            gradients.append({n: p.grad.full_tensor().numpy() for n, p in model.named_parameters()})
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, gradients))
    return found


def test_sharded_steps_equal_the_stock_head_under_fsdp2(run_ranks):
    for stock, *leans in run_ranks(2, stock_and_lean_rank, timeout=120):
        for losses, gradients in leans:
            np.testing.assert_allclose(losses, stock[0], rtol=1e-5, atol=1e-6)
            for step, (ours, theirs) in enumerate(zip(gradients, stock[1], strict=True)):
                for name, expected in theirs.items():
                    np.testing.assert_allclose(
                        ours[name], expected, rtol=1e-4, atol=1e-6, err_msg=f"step {step} {name}"
                    )
