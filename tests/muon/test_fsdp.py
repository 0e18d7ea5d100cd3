"""FSDP2: the single-process trajectory, two collectives for all matrices, checkpoints that reshard."""

from __future__ import annotations

import io

import pytest
import torch
from ranks import fully_shard
from torch import nn

from leanstep.muon import NorMuon

OPTIONS = {"lr": 0.03, "compute_dtype": torch.float32}


class Model(nn.Module):
    """Matrices of uneven sizes, a bank, an embedding with its head, a gain."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.up = nn.Linear(10, 27)
        self.down = nn.Linear(27, 10, bias=False)
        self.again, self.qkv = nn.Linear(10, 27, bias=False), nn.Linear(10, 27, bias=False)
        self.bank = nn.Parameter(torch.zeros(3, 10, 10))
        self.head = nn.Linear(10, 13)

    def forward(self, tokens):
        x = self.embed(tokens)
        for matrix in self.bank.unbind(0):
            x = x + torch.tanh(x @ matrix)
        return self.head(x + self.down(torch.relu(self.up(x)) + torch.tanh(self.again(x)) * self.qkv(x)))


def make_model(dtype=torch.float32):
    torch.manual_seed(3)
    model = Model()
    nn.init.normal_(model.bank, std=0.3)
    return model.to(dtype)


def make_groups(model):
    # Two matrices of one shape; a split one, whose parts have separate factors; a bank with a rate per
    # matrix.
    pairs = dict(model.named_parameters())
    matrices, split, bank = ("up.weight", "again.weight", "down.weight"), ("qkv.weight",), ("bank",)
    rest = [name for name in pairs if name not in (*matrices, *split, *bank)]

    def group(names, **options):
        return {"params": [(name, pairs[name]) for name in names], **options}

    return [
        group(matrices),
        group(split, split=[10, 10, 7], lr_rule="none"),
        group(bank, lr_mul=[1.0, 2.0, 0.5]),
        group(rest, algorithm="adam"),
    ]


def advance(model, optimizer, first, steps, rank=None, world_size=2):
    for step in range(first, first + steps):
        tokens = torch.randint(0, 13, (world_size, 6), generator=torch.Generator().manual_seed(step))
        if rank is not None:
            tokens = tokens[rank : rank + 1]
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def full(tensor):
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def run_fsdp(rank, world_size, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.tensor.debug import CommDebugMode

    def build():
        model = make_model()
        fully_shard(model.up)
        fully_shard(model)
        return model, NorMuon(make_groups(model), **OPTIONS)

    model, optimizer = build()
    advance(model, optimizer, 0, 10, rank, world_size)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    advance(model, optimizer, 10, 9, rank, world_size)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with CommDebugMode() as counter:
        optimizer.step()
    advance(model, optimizer, 19, 1, rank, world_size)
    whole = {name: full(p) for name, p in model.named_parameters()}

    resumed, fresh = build()
    weights, state = get_state_dict(resumed, fresh)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(resumed, fresh, model_state_dict=weights, optim_state_dict=state)
    advance(resumed, fresh, 10, 9, rank, world_size)
    for param in resumed.parameters():
        param.grad = torch.ones_like(param)
    fresh.step()
    advance(resumed, fresh, 19, 1, rank, world_size)
    again = {name: full(p) for name, p in resumed.named_parameters()}
    same = all(torch.equal(whole[name], again[name]) for name in whole)

    theirs = None
    if hasattr(torch.optim, "Muon"):
        muon = torch.optim.Muon([model.down.weight])
        model.down.weight.grad = torch.ones_like(model.down.weight)
        with CommDebugMode() as stock:
            muon.step()
        theirs = stock.get_total_counts()
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    return buffer.getvalue(), same, counter.get_total_counts(), theirs


def load_only(rank, world_size, folder):
    """The same checkpoint on another number of ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = make_model()
    fully_shard(model)
    optimizer = NorMuon(make_groups(model), **OPTIONS)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    states = {
        name: {key: full(value) for key, value in optimizer.state[param].items()}
        for name, param in model.named_parameters()
    }
    buffer = io.BytesIO()
    torch.save(({name: full(p) for name, p in model.named_parameters()}, states), buffer)
    return buffer.getvalue()


def expected_run(world_size):
    model = make_model()
    optimizer = NorMuon(make_groups(model), **OPTIONS)
    advance(model, optimizer, 0, 10, None, world_size)
    middle = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = {
        name: {key: value.clone() for key, value in optimizer.state[param].items()}
        for name, param in model.named_parameters()
    }
    advance(model, optimizer, 10, 9, None, world_size)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    advance(model, optimizer, 19, 1, None, world_size)
    return middle, states, {name: p.detach() for name, p in model.named_parameters()}


# torch's own FSDP2 and checkpoint code calls functions that torch 2.13 renamed.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("world", "others"), [(2, (1, 4)), (4, (1,))])
def test_fsdp2_follows_one_process_resumes_and_reshards(run_ranks, tmp_path, world, others):
    results = run_ranks(world, run_fsdp, str(tmp_path), timeout=120)
    middle, states, last = expected_run(world)
    for data, same, ours, theirs in results:
        weights = torch.load(io.BytesIO(data), weights_only=True)
        for name, value in last.items():
            torch.testing.assert_close(weights[name], value, atol=5e-5, rtol=1e-4, msg=name)
        assert same, "resuming from the checkpoint changed a bit"
        # Two shapes and a split matrix sharded by rows: two all-to-alls each, and the finite check.
        # torch.optim.Muon: one matrix.
        assert ours == 7
        assert theirs is None or theirs >= 10
    for data in (run_ranks(other, load_only, str(tmp_path), timeout=120)[-1] for other in others):
        weights, loaded = torch.load(io.BytesIO(data), weights_only=True)
        for name, value in middle.items():
            torch.testing.assert_close(weights[name], value, atol=5e-5, rtol=1e-4, msg=name)
            assert set(loaded[name]) == set(states[name])
            for key, tensor in states[name].items():
                assert loaded[name][key].dtype == tensor.dtype
                torch.testing.assert_close(
                    loaded[name][key], tensor, atol=5e-5, rtol=1e-3, msg=f"{name} {key}"
                )


def refused(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    columns = nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"^columns: .* sharded along dimension 0, got \(Shard\(dim=1\)"):
        NorMuon([("columns", columns)], lr=0.02)


def test_a_parameter_sharded_by_columns_is_refused(run_ranks):
    run_ranks(1, refused)
