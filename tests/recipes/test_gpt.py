"""The gpt recipe: twelve steps of the record's own trainer, exact resuming, two ranks like one."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from leanstep.gpt import GPT, GPTConfig, write_shard
from leanstep.gpt import model as gpt_model
from leanstep.muon import sharded
from leanstep.recipes import Cadence, current_world, gpt, run
from leanstep.recipes.gpt import Data, GPTTraining
from leanstep.recipes.schedules import Schedule, Stage

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
TRACE = Path(__file__).parents[1] / "vectors/speedrun/trainer_trace.json"


def fill(salt, shape, scale, shift=0.0):
    """The deterministic pseudo-random tensors of the vectors' README."""
    count = int(np.prod(shape))
    x = np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B9 * (salt + 1) & 0xFFFFFFFF)
    mask = np.uint64(0xFFFFFFFF)
    x &= mask
    for shift_by, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        x ^= x >> np.uint64(shift_by)
        x = (x * np.uint64(multiplier)) & mask
    values = shift + scale * (2 * (x.astype(np.float64) + 0.5) / 2**32 - 1)
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def decode(array):
    return torch.from_numpy(np.frombuffer(base64.b64decode(array["b64"]), dtype=array["dtype"]).copy())


def trace_training(folder, trace):
    c = trace["config"]
    stages = tuple(
        Stage(
            s["batch_tokens"],
            s["seq"],
            tuple(s["windows"]),
            s["lr_mul"],
            tuple(s["mtp"][0]),
            tuple(s["mtp"][1]),
        )
        for s in c["stages"]
    )
    schedule = Schedule(stages, c["scheduled"], c["extension"], cooldown_fraction=c["cooldown_frac"])
    paths = []
    for i, shard in enumerate([*trace["train_shards"], trace["val_shard"]]):
        paths.append(folder / f"shard_{i}.bin")
        write_shard(paths[-1], decode(shard).to(torch.int32))
    config = GPTConfig.preset(
        "vectors",
        bigram_vocab_size=c["bigram_vocab_size"],
        window_block=c["block"],
        bank_dtype="bfloat16",
    )
    training = GPTTraining(
        config,
        schedule,
        Data(tuple(paths[:-1]), (paths[-1],), bos=99, vocab_size=c["vocab_size"]),
        validation_tokens=c["val_tokens_per_micro"] * c["val_micros"],
        validation_batch=c["val_tokens_per_micro"],
        micro_batches=c["micro_batches"],
        optimizer_options={"residual": "truncate"},
    )
    model = training.model
    with torch.no_grad():
        for name, rule in trace["params"].items():
            if "salt" in rule:
                value = fill(rule["salt"], rule["shape"], rule["scale"])
                if name == "mlp_bank":
                    value[:, 1] *= 0.2
                model.get_parameter(name.removesuffix(".weight")).copy_(value)
        model.embed.copy_(model.lm_head.T)
    return training


def test_twelve_steps_follow_the_records_own_trainer(tmp_path):
    trace = json.loads(TRACE.read_text())
    training = trace_training(tmp_path, trace)
    assert training.schedule.untie_step == 7
    for row in trace["rows"]:
        if "val_loss" in row:
            assert training.evaluate()["val_loss"] == pytest.approx(row["val_loss"], rel=1e-4), row["step"]
            continue
        here = training.schedule.at(row["step"])
        metrics = training.step(row["step"])
        assert metrics["tokens"] == row["tokens"] and list(training.model.windows) == row["ws"]
        local = row["tokens"] // 2 * sum(here.mtp_weights)
        assert float(metrics["loss"]) * local == pytest.approx(row["train_loss_sum_scaled"], rel=1e-4), row[
            "step"
        ]
        assert training.model.rotary.attention_scale == pytest.approx(row["attn_scale"], rel=1e-9)
        assert training.model.tied != row["split"]
        for name, norm in row["norms"].items():
            # The vectors hold the live bf16 banks, which truncation makes 0.3 % shorter than their masters.
            mine = training.model.get_parameter(name.removesuffix(".weight")).double().norm().item()
            # Parts per million of noise in the weights move the norms of the few-element parameters by 3e-3
            # (their gradients are near zero and Adam's first steps follow the sign); the large ones stay.
            rel = 5e-4 if name.startswith(LARGE) or row["step"] < 3 else 2e-2
            assert mine == pytest.approx(norm, rel=rel, abs=1e-6), (row["step"], name)


def small_training(world=None, steps=12, optimizer="normuon", micro_batches=2, data=None, seed=0):
    stages = (
        Stage(128, 48, (1, 2), 1.0, (1.0, 0.5), (1.0, 0.0)),
        Stage(192, 64, (1, 3), 1.5),
        Stage(192, 64, (2, 4), 1.7),
        Stage(192, 64, (2, 5)),
    )
    schedule = Schedule(stages, steps - 2, 2, momentum_warmup=4, momentum_cooldown=2, final_window=6)
    config = GPTConfig.preset("tiny", vocab_size=64, vocab_multiple=16, bigram_vocab_size=320)
    return GPTTraining(
        config, schedule, data, seed=seed, world=world, micro_batches=micro_batches, optimizer=optimizer,
        validation_tokens=512, validation_batch=128, cadence=Cadence(log=2, evaluate=4, save=3),
    )  # fmt: skip


def write_data(folder, documents=300):
    generator = torch.Generator().manual_seed(0)
    paths = []
    for name in ("a_train.bin", "b_train.bin", "c_val.bin"):
        parts = []
        for _ in range(documents):
            length = int(torch.randint(10, 90, (), generator=generator))
            start = int(torch.randint(1, 60, (), generator=generator))
            parts += [
                torch.zeros(1, dtype=torch.int32),
                (start + torch.arange(length) * 7).remainder(63).int() + 1,
            ]
        write_shard(folder / name, torch.cat(parts))
        paths.append(folder / name)
    return Data(tuple(paths[:2]), (paths[2],), bos=0, vocab_size=64)


def weights(training):
    return {name: p.detach().clone() for name, p in training.model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["normuon", "adamw"])
def test_resuming_at_any_step_is_exact(tmp_path, optimizer):
    data = write_data(tmp_path)
    whole = small_training(data=data, optimizer=optimizer)
    start = weights(whole)
    outcome = run(whole, tmp_path / "whole", say=lambda line: None)
    assert outcome.evaluations[-1]["val_loss"] < outcome.evaluations[0]["val_loss"]
    for stop in (1, 4, 8, 9, None):
        part = small_training(data=data, optimizer=optimizer)
        run(part, tmp_path / "parts", resume=True, stop_after=stop, say=lambda line: None)
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(part)[name]), name
        # The smear gate's own gate starts shut; every other parameter has moved.
        assert not torch.equal(weight, start[name]) or name == "smear_gate", name
    assert not whole.model.tied and not torch.equal(whole.model.embed, whole.model.lm_head.T)


def test_how_the_model_runs_is_chosen_and_no_part_of_a_runs_identity():
    trainings = {way: gpt.build("smoke", run=way) for way in ("auto", "plain", "compiled")}
    assert [training.model.run for training in trainings.values()] == list(trainings)
    assert trainings["auto"].settings == trainings["plain"].settings == trainings["compiled"].settings
    with pytest.raises(ValueError, match="run: expected auto or plain or compiled, got 'fast'"):
        gpt.build("smoke", run="fast")
    with pytest.raises(ValueError, match=r"run: expected auto with model\.flat_forward=false, got plain"):
        gpt.build("smoke", run="plain", model={"flat_forward": False})


# Dynamo's own: it makes instances of autograd functions and looks for gradients of its inputs.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_run_resumes_a_plain_one_with_few_graphs(tmp_path, monkeypatch):
    graphs, data = [], write_data(tmp_path)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    states = torch.compile(GPT._states, backend=backend, fullgraph=True, dynamic=False)
    monkeypatch.setattr(gpt_model, "_compiled_states", lambda: states)
    whole, first, second = (small_training(data=data) for _ in range(3))
    run(whole, tmp_path / "whole", say=lambda line: None)
    run(first, tmp_path / "parts", stop_after=6, say=lambda line: None)
    second.model.run = "compiled"
    run(second, tmp_path / "parts", resume=True, say=lambda line: None)
    torch._dynamo.reset()
    for name, weight in weights(whole).items():
        error = (weight.double() - weights(second)[name]).norm()
        assert error <= 1e-3 * weight.double().norm() + 1e-5, name
    # Stage 2, stages 3 and 4 together (their long windows cover the longest document), and two evaluations.
    assert len(graphs) == 4


def test_tied_weights_stay_equal_until_they_part(tmp_path):
    training = small_training(data=write_data(tmp_path))
    for i in range(training.num_steps):
        training.step(i)
        equal = torch.equal(training.model.embed, training.model.lm_head.T)
        # The untying step still updates the tied pair; the next Adam step is the first apart.
        assert equal == (i < training.schedule.untie_step + 2), i


def test_evaluation_leaves_no_trace(tmp_path):
    training = small_training(data=write_data(tmp_path))
    for i in range(training.num_steps):
        training.step(i)
    before, schedule = weights(training), training.model.schedule_state()
    assert training.evaluate() == training.evaluate()
    assert training.model.schedule_state() == schedule
    assert all(torch.equal(before[n], p) for n, p in weights(training).items())


def test_seeds_differ_in_weights_and_in_data(tmp_path):
    data = write_data(tmp_path)
    one, other = small_training(data=data, seed=0), small_training(data=data, seed=1)
    assert not torch.equal(one.model.mlp_bank, other.model.mlp_bank)
    assert not torch.equal(one.loader.next_batch().inputs, other.loader.next_batch().inputs)


OPTIMIZERS = ("normuon", "adamw")


def train_ranks(rank, world_size, folder):
    shards = [tuple(sorted(Path(folder).glob(f"*{kind}.bin"))) for kind in ("train", "val")]
    results = {}
    for optimizer in OPTIMIZERS:
        data = Data(*shards, bos=0, vocab_size=64)
        training = small_training(world=current_world(), data=data, optimizer=optimizer)
        losses = [
            float(training.world.mean(training.step(i)["loss"].double())) for i in range(training.num_steps)
        ]
        final = {name: weight.numpy() for name, weight in weights(training).items()}
        results[optimizer] = losses, training.evaluate()["val_loss"], final
    return results


def test_two_ranks_match_one_with_the_same_global_batch(tmp_path, run_ranks):
    data = write_data(tmp_path)
    ranks = run_ranks(2, train_ranks, str(tmp_path))
    for optimizer in OPTIMIZERS:
        single = small_training(data=data, optimizer=optimizer)
        losses = [float(single.step(i)["loss"]) for i in range(single.num_steps)]
        for rank_losses, val_loss, rank_weights in (results[optimizer] for results in ranks):
            assert rank_losses == pytest.approx(losses, rel=1e-4)
            assert val_loss == pytest.approx(single.evaluate()["val_loss"], rel=1e-4)
            for name, weight in weights(single).items():
                # Fifty parts per million of the gradient's sum in another order, through twelve updates.
                bound = 2e-3 * weight.abs().max().item() + 1e-6
                assert np.abs(rank_weights[name] - weight.numpy()).max() <= bound, (optimizer, name)
        for name in ranks[0][optimizer][2]:
            assert np.array_equal(ranks[0][optimizer][2][name], ranks[1][optimizer][2][name]), name


def train_by_rows(rank, world_size, folder):
    """Tables in pieces, four micro-batches: by rows, resumed while gradients wait, and as whole tables."""
    sharded.MIN_CUT_ELEMENTS = 1
    shards = [tuple(sorted(Path(folder).glob(f"*{kind}.bin"))) for kind in ("train", "val")]
    data = Data(*shards, bos=0, vocab_size=64)

    def make():
        return small_training(world=current_world(), data=data, micro_batches=4)

    exchanges = mock.Mock(wraps=torch.distributed.all_to_all_single)
    with mock.patch.object(torch.distributed, "all_to_all_single", exchanges):
        # Adam has its turn in odd steps: gradients wait after step 4, none after step 5.
        by_rows, resumed = make(), {4: make(), 5: make()}
        for i in range(by_rows.num_steps):
            by_rows.step(i)
            for start, training in resumed.items():
                if i == start:
                    training.load_state_dict(copy.deepcopy(by_rows.state_dict()))
                if start < i <= 7:
                    training.step(i)
            if i == 7:
                trainings = (by_rows, *resumed.values())
                middle = [{n: w.numpy() for n, w in weights(t).items()} for t in trainings]
        count = exchanges.call_count
        whole = make()
        whole.optimizer.note_batch = lambda inputs, cu_seqlens: None
        for i in range(whole.num_steps):
            whole.step(i)
    ends = [{n: w.numpy() for n, w in weights(t).items()} for t in (by_rows, whole)]
    return ends, middle, (count, exchanges.call_count)


def test_rows_of_tables_are_exchanged_like_whole_tables(tmp_path, run_ranks):
    write_data(tmp_path)
    for ends, (went_on, *resumed), (count, all_counts) in run_ranks(2, train_by_rows, str(tmp_path)):
        assert count == all_counts > 0
        for name, weight in went_on.items():
            assert all(np.array_equal(weight, other[name]) for other in resumed), name
        for name, weight in ends[0].items():
            bound = 2e-3 * np.abs(ends[1][name]).max() + 1e-6
            assert np.abs(weight - ends[1][name]).max() <= bound, name


def test_accumulated_gradients_are_the_mean_over_micro_batches(tmp_path):
    training = small_training(data=write_data(tmp_path), micro_batches=4)
    expected = {name: torch.zeros_like(p) for name, p in training.model.named_parameters()}
    position = training.loader.state_dict()
    for _ in range(4):
        batch = training.loader.next_batch()
        assert batch.inputs.numel() == 32
        mtp = training.schedule.at(0).mtp_weights
        training.model(batch.inputs, batch.targets, batch.cu_seqlens, mtp=mtp).backward()
        for name, parameter in training.model.named_parameters():
            if parameter.grad is not None:
                expected[name] += parameter.grad / 4
                parameter.grad = None
    training.loader.load_state_dict(position)
    seen = {}
    training.optimizer.step = lambda here: seen.update(
        {name: p.grad.clone() for name, p in training.model.named_parameters() if p.grad is not None}
    )
    training.step(0)
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="preset: no 'huge'"):
        gpt.build("huge")
    with pytest.raises(ValueError, match="data: this preset needs a folder"):
        gpt.build("record-74")
    with pytest.raises(ValueError, match="found 0 and 0"):
        gpt.build("record-74", data=tmp_path)
    data = write_data(tmp_path, documents=20)
    with pytest.raises(ValueError, match="optimizer: expected normuon or adamw, got 'sgd'"):
        small_training(data=data, optimizer="sgd")
    with pytest.raises(ValueError, match="micro_batches: expected a multiple of the 1 ranks, got 0"):
        small_training(data=data, micro_batches=0)
    with pytest.raises(ValueError, match="tokens: expected a multiple of 16 x 3"):
        small_training(data=data, micro_batches=3)
