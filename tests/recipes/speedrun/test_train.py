"""The training: twelve steps of the record's own trainer, exact resuming, two ranks like one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from killing import stop_and_resume
from speedrun.golden import VECTORS, array, fill, load, make

import leanstep
from leanstep.muon import to_master
from recipes.speedrun import train
from recipes.speedrun.data import write_shard
from recipes.speedrun.train import TINY_SHAPE, Schedule, Settings, Size, Stage, Training

LARGE = (
    "value_embeds",
    "attn_bank",
    "mlp_bank",
    "lm_head",
    "embed",
    "bigram_embed",
    "post",
    "resid",
    "scalars",
)


def trace_training(folder: Path, trace: dict) -> Training:
    c = trace["config"]
    stages = [
        Stage(s["batch_tokens"], s["seq"], tuple(s["windows"]), s["lr_mul"], *(tuple(x) for x in s["mtp"]))
        for s in c["stages"]
    ]
    schedule = Schedule(tuple(stages), c["scheduled"], c["extension"], cooldown=c["cooldown_frac"])
    paths = []
    for i, shard in enumerate([*trace["train_shards"], trace["val_shard"]]):
        paths.append(folder / f"shard_{i}.bin")
        write_shard(paths[-1], array({"shape": [-1], **shard}).to(torch.int32))
    shape = replace(
        VECTORS, bigram_vocab_size=c["bigram_vocab_size"], window_block=c["block"], bank_dtype=torch.bfloat16
    )
    size = Size(shape, schedule, c["val_tokens_per_micro"] * c["val_micros"], c["val_tokens_per_micro"])
    settings = Settings(
        steps=schedule.num_steps, vocab_size=c["vocab_size"], bos=99, micro_batches=c["micro_batches"],
        adam_lr=0.008, residual="truncate",
    )  # fmt: skip
    # The trace keeps the record's momentum ramps, which another length would stretch.
    with mock.patch.object(Schedule, "of_length", lambda self, steps: self):
        training = Training(settings, size=size, paths=(paths[:-1], paths[-1:]))
    with torch.no_grad():
        for name, rule in trace["params"].items():
            if "salt" in rule:
                value = fill(rule["salt"], rule["shape"], rule["scale"])
                if name == "mlp_bank":
                    value[:, 1] *= 0.2
                training.model.get_parameter(name.removesuffix(".weight")).copy_(value)
        training.model.embed.copy_(training.model.lm_head.T)
    return training


def test_twelve_steps_follow_the_records_own_trainer(tmp_path):
    trace = load("trainer_trace")
    training = trace_training(tmp_path, trace)
    assert training.schedule.untie_step == 7
    for row in trace["rows"]:
        if "val_loss" in row:
            assert training.evaluate() == pytest.approx(row["val_loss"], rel=1e-4), row["step"]
            continue
        here = training.schedule.at(row["step"])
        metrics = training.step(row["step"])
        assert metrics["tokens"] == row["tokens"] and list(training.model.windows) == row["ws"]
        total = float(metrics["loss"]) * (row["tokens"] // 2 * sum(here.mtp))
        assert total == pytest.approx(row["train_loss_sum_scaled"], rel=1e-4), row["step"]
        assert training.model.yarn.scale == pytest.approx(row["attn_scale"], rel=1e-9)
        assert training.model.tied != row["split"]
        for name, norm in row["norms"].items():
            # The vectors hold the live bf16 banks, which truncation makes 0.3 % shorter than their masters.
            mine = training.model.get_parameter(name.removesuffix(".weight")).double().norm().item()
            # Parts per million of noise in the weights move the norms of the few-element parameters by 3e-3
            # (their gradients are near zero and Adam's first steps follow the sign); the large ones stay.
            rel = 5e-4 if name.startswith(LARGE) or row["step"] < 3 else 2e-2
            assert mine == pytest.approx(norm, rel=rel, abs=1e-6), (row["step"], name)


SMALL = Size(
    replace(TINY_SHAPE, vocab_multiple=16, bigram_vocab_size=320),
    Schedule(
        (
            Stage(128, 48, (1, 2), 1.0, (1.0, 0.5), (1.0, 0.0)),
            Stage(192, 64, (1, 3), 1.5),
            Stage(192, 64, (2, 4), 1.7),
            Stage(192, 64, (2, 5)),
        ),
        10,
        2,
        momentum_warmup=4,
        momentum_cooldown=2,
        final_window=6,
    ),
    validation_tokens=512,
    validation_batch=128,
)


def write_data(folder: Path, documents: int = 300) -> tuple[list[Path], list[Path]]:
    generator = torch.Generator().manual_seed(0)
    paths = [folder / name for name in ("a_train.bin", "b_train.bin", "c_val.bin")]
    for path in paths:
        parts = []
        for _ in range(documents):
            length = int(torch.randint(10, 90, (), generator=generator))
            start = int(torch.randint(1, 60, (), generator=generator))
            parts += [torch.zeros(1), (start + torch.arange(length) * 7).remainder(63) + 1]
        write_shard(path, torch.cat(parts).int())
    return paths[:2], paths[2:]


def small(paths, rank: int = 0, world_size: int = 1, **fields) -> Training:
    settings = Settings(steps=12, vocab_size=64, bos=0, **{"micro_batches": 2, "adam_lr": 0.008, **fields})
    return Training(settings, "cpu", rank, world_size, size=SMALL, paths=paths)


def weights(training: Training) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in training.model.named_parameters()}


@pytest.mark.parametrize("fusion", ["step", "none"])
def test_resuming_at_any_step_is_exact(tmp_path, fusion):
    paths = write_data(tmp_path)
    whole = small(paths, fusion=fusion)
    states, before = {}, whole.evaluate()
    start = weights(whole)
    for i in range(12):
        whole.step(i)
        states[i + 1] = copy.deepcopy(whole.state_dict())
    assert whole.evaluate() < before
    end = weights(whole)
    # Adam has its turn in odd steps, so gradients wait after an odd number of steps; 7 unties.
    for done in (1, 4, 7, 8, 9, 11):
        assert bool(states[done]["pending"]) == (done % 2 == 1)
        part = small(paths, fusion=fusion)
        part.load_state_dict(states[done])
        for i in range(done, 12):
            part.step(i)
        for name, weight in weights(part).items():
            assert torch.equal(weight, end[name]), (done, name)
    # The smear gate's own gate starts shut; every other parameter has moved.
    assert all(name == "smear_gate" or not torch.equal(w, start[name]) for name, w in end.items())
    assert not whole.model.tied and not torch.equal(whole.model.embed, whole.model.lm_head.T)


def test_accumulated_gradients_are_the_mean_over_micro_batches(tmp_path):
    training, other = (small(write_data(tmp_path), micro_batches=4) for _ in range(2))
    here = training.schedule.at(0)
    for _ in range(4):
        batch = other.loader.next_batch()
        assert len(batch.inputs) == 32
        other.loss(batch, here.mtp, here.stage.max_seq_len).backward()
    with leanstep.update(full=True) as u:
        training.step(0)
    for name, q in other.model.named_parameters():
        torch.testing.assert_close(u.gradients[name].full, q.grad / 4, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fusion", ["step", "none"])
def test_prove_sees_every_parameter_of_an_update(tmp_path, fusion):
    training = small(write_data(tmp_path), fusion=fusion)
    names = dict(training.model.named_parameters())
    with leanstep.update() as u:
        for i in range(4):
            training.step(i)
    assert not u.notes and len(u.updates) == 4
    for update in u.updates:
        assert set(update.gradients) == set(update.changes) == set(names)
    # Adam has its turn in odd steps; the banks move in all.
    assert {name for name, change in u.updates[0].changes.items() if change.norm} == {"attn_bank", "mlp_bank"}
    still = {name for name, change in u.updates[3].changes.items() if not change.norm}
    assert still <= {"smear_gate"}


SWITCHES = {
    "transpose_kernels": {"transpose_kernels": False},
    **{f"fusion {way}": {"fusion": way} for way in ("momentum", "write", "none")},
    "tall_polar": {"fusion": "momentum", "tall_polar": False},
}


@pytest.mark.parametrize("bank_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_switches_of_the_optimizer_make_the_same_updates(switch, bank_dtype):
    ends = []
    for fields in ({}, switch):
        model = make(train.GPT, replace(TINY_SHAPE, bank_dtype=bank_dtype), 512)
        optimizer = train.Optimizer(model, Settings(**fields))
        generator = torch.Generator().manual_seed(1)
        for i in range(6):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step(SMALL.schedule.at(i))
        end = {name: p.detach() for name, p in model.named_parameters()}
        if bank_dtype == torch.bfloat16:
            for name, share in optimizer.shares.items():
                end[name] = to_master(share.detach(), optimizer.muon.state[share]["residual"])
        ends.append(end)
    for name, weight in ends[0].items():
        assert (ends[1][name] - weight).norm() <= 2e-5 * weight.norm(), name


# Ranks


def train_ranks(rank, world_size, folder):
    """A run, and the same resumed after steps 5 (gradients wait) and 6."""
    paths = [sorted(Path(folder).glob(f"*{kind}.bin")) for kind in ("train", "val")]
    whole, *resumed = (small(paths, rank, world_size, micro_batches=4) for _ in range(3))
    # The bigram table is exchanged by rows in the first stage, and as a whole once more of it is read.
    exchanges = mock.Mock(wraps=whole.optimizer.exchange_rows)
    losses = []
    with mock.patch.object(whole.optimizer, "exchange_rows", exchanges):
        for i in range(12):
            losses.append(float(whole.step(i)["loss"]))
            for done, part in zip((5, 6), resumed, strict=True):
                if i + 1 == done:
                    state = copy.deepcopy(whole.state_dict())
                    part.load_state_dict(state)
                if i >= done:
                    part.step(i)
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    ends = [{n: w.numpy() for n, w in weights(t).items()} for t in (whole, *resumed)]
    return (mean / world_size).tolist(), whole.evaluate(), ends, exchanges.call_count, state


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_match_one_with_the_same_global_batch(tmp_path, run_ranks, count):
    paths = write_data(tmp_path)
    single = small(paths, micro_batches=4)
    losses = [float(single.step(i)["loss"]) for i in range(12)]
    ranks = run_ranks(count, train_ranks, str(tmp_path))
    # The state of the ranks after step 6 loads on one.
    alone = small(paths, micro_batches=4)
    alone.load_state_dict(ranks[0][-1])
    for i in range(6, 12):
        alone.step(i)
    loaded = {name: weight.numpy() for name, weight in weights(alone).items()}
    for rank_losses, val_loss, ends, num_exchanges, _ in ranks:
        assert rank_losses == pytest.approx(losses, rel=1e-4)
        assert val_loss == pytest.approx(single.evaluate(), rel=1e-4)
        assert 0 < num_exchanges < 6
        whole, *resumed = ends
        for name, weight in weights(single).items():
            # Fifty parts per million of the gradient's sum in another order, through twelve updates.
            bound = 2e-3 * weight.abs().max().item() + 1e-6
            for end in (whole, loaded):
                assert np.abs(end[name] - weight.numpy()).max() <= bound, name
            assert all(np.array_equal(whole[name], other[name]) for other in resumed), name
            assert np.array_equal(whole[name], ranks[0][2][0][name]), name


# The command


def test_a_run_stopped_and_resumed_ends_with_the_same_bits(tmp_path):
    write_data(tmp_path)
    options = ["--preset", "smoke", "--data", str(tmp_path), "--vocab-size", "64", "--bos", "0"]
    options += ["--eval-every", "7", "--save-every", "3"]
    stop_and_resume(train.main, options, 20, (7, 12), tmp_path)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="size: expected tiny, smoke, record-74, got 'huge'"):
        Settings(size="huge")
    with pytest.raises(ValueError, match=r"data: expected \*train\*.bin and \*val\*.bin shards"):
        Training(Settings(data=str(tmp_path)))
    with pytest.raises(ValueError, match="tall_polar: expected fusion=momentum, write or none"):
        Settings(tall_polar=False)
    paths = write_data(tmp_path, documents=20)
    with pytest.raises(ValueError, match="micro_batches: expected a multiple of the 2 ranks, got 1"):
        small(paths, 0, 2, micro_batches=1)
    with pytest.raises(ValueError, match="micro_batches: expected each to have a multiple of 16 tokens"):
        small(paths, micro_batches=3)
    with pytest.raises(ValueError, match="steps: expected at least 4"):
        Training(Settings(steps=3), paths=paths)
    with pytest.raises(ValueError, match="vocab_size: expected more than the largest token 63, got 60"):
        Training(Settings(steps=12, vocab_size=60, bos=0), size=SMALL, paths=paths).step(0)


def test_another_length_keeps_the_shape():
    short = Schedule().of_length(149)
    shown = (short.num_steps, short.extension, short.momentum_warmup, short.momentum_cooldown)
    assert shown == (149, 4, 30, 5)
    assert short.at(0).lr_mul == 1.0 and short.at(148).lr_mul == pytest.approx(0.15)
    assert short.untie_step % 2 == 1
    for steps in (4, 5, 7, 100):
        positions = [Schedule().of_length(steps).at(i) for i in range(steps)]
        assert len({here.stage for here in positions}) == 4
        assert all(0 < here.lr_mul <= 1.73 for here in positions)
