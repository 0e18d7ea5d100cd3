"""`leanstep plan`: published figures, agreement with measured peaks, one JSON object, one-line errors."""

from __future__ import annotations

import json

import pytest
import torch
from rehearse.rehearsed import stub_or_skip

from leanstep.cli import run
from leanstep.commands import plan_workloads
from leanstep.commands.plan import METHODS, parse_devices
from leanstep.commands.plan_workloads import HeadShape, head_step
from leanstep.commands.rehearse import head_jobs, longest_batch, rehearse_jobs
from leanstep.measure.peaks import measure_peak
from leanstep.rehearse.cuda_allocator import replay
from leanstep.rehearse.devices import device_named

GIB = 2**30
SMALL = ["--tokens", "512", "--vocab", "640", "--hidden", "32", "--dtype", "fp32", "--chunk", "256"]
A100 = device_named("a100")


@pytest.fixture(autouse=True, scope="module")
def fake_device():
    stub_or_skip()


def plan_json(capsys, *arguments: str) -> dict:
    assert run(["plan", *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def peaks(jobs: list[dict]) -> list[int]:
    """Peaks beyond the cuBLAS workspace."""
    found = []
    for job in rehearse_jobs(jobs, A100):
        workspace = any(s.category == "library" for s in job.at_peak(replay(job.events, job.storages)))
        found.append(replay(job.events, job.storages).allocated - workspace * A100.workspace_bytes)
    return found


def test_published_figures_of_both_methods():
    jobs = [("gathered-loss", 0.25), ("gathered-loss", 1.0), ("plain", 1.0), ("linear", 0.025)]
    quarter, whole, plain, linear = rehearse_jobs(head_jobs(205_280, 76_032, 2_560, "fp32", 1024, jobs), A100)
    # slime's issue 1951: one buffer is the 58.14 GiB that could not be had; its pull 2076 keeps 43.6 GiB.
    peak = replay(whole.events, whole.storages)
    assert max(s.nbytes for s in whole.at_peak(peak)) == 62_431_395_840 == 205_280 * 76_032 * 4
    assert peak.allocated / GIB == pytest.approx(174.4, abs=0.1)
    assert replay(quarter.events, quarter.storages).allocated / GIB == pytest.approx(43.6, abs=0.05)
    assert replay(plain.events, plain.storages).allocated / GIB == pytest.approx(293.4, abs=0.5)
    assert replay(linear.events, linear.storages).allocated < 6 * GIB


@pytest.mark.parametrize("kept", [1.0, 0.25])
def test_plain_torch_peaks_equal_the_cpu_allocators(kept, monkeypatch):
    T, V, D, chunk = 512, 3000, 96, 128
    methods = ("plain", "gathered-step")
    predicted = peaks(head_jobs(T, V, D, "fp32", chunk, [(m, kept) for m in methods]))
    monkeypatch.setattr(plan_workloads, "DEVICE", "cpu")
    N = round(kept * T)
    inputs = {
        "hidden": torch.randn(T, D),
        "weight": torch.randn(V, D) * 0.1,
        "tokens": torch.randint(0, V, (N,)),
        "rows": torch.randperm(T)[:N].sort().values,
        "all_tokens": torch.randint(0, V, (T,)),
    }
    for method, peak in zip(methods, predicted, strict=True):
        shape = HeadShape(method, T, N, V, D, "fp32", chunk)

        def step(shape=shape):
            return dict(enumerate(head_step(shape, inputs)))

        measured = measure_peak(step, inputs).peak_bytes
        used = ("hidden", "weight", "tokens", "rows") + (("all_tokens",) if method == "plain" else ())
        held = sum(inputs[name].nbytes for name in used)
        assert peak == pytest.approx(held + measured, rel=0.01), method


def test_leansteps_peak_is_inputs_gradients_one_tile_and_statistics():
    T, V, D, chunk = 4096, 3000, 256, 512
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        peak, no_grad = peaks(head_jobs(T, V, D, dtype, chunk, [("linear", 1.0), ("no-grad", 1.0)]))
        inputs = (T + V) * D * size + 2 * T * 8
        # The weight's gradient is summed in fp32 and then rounded; two tiles, rows of vectors.
        least = inputs + T * D * size + V * D * 4 + chunk * V * size
        most = inputs + T * D * size + V * D * (4 + size) + 2 * chunk * V * 4 + 16 * T * 4 + chunk * D * 8
        assert least <= peak <= most, dtype
        assert inputs + chunk * V * size <= no_grad < peak


def test_json_is_one_object_and_the_table_goes_to_standard_output_without_it(capsys):
    result = plan_json(capsys, "logprob", *SMALL)
    assert {r["method"] for r in result["rows"]} == set(METHODS)
    assert {r["response_frac"] for r in result["rows"]} == {1.0, 0.5, 0.25, 0.1}
    assert result["predicted"] and result["rehearsed_on"] == "h100"
    for row in result["rows"]:
        assert row["input_bytes"] < row["simulated_bytes"] <= row["reserved_bytes"]
        assert all(verdict["fits"] for verdict in row["devices"].values()) and "step_ms" not in row
    assert run(["plan", "logprob", *SMALL, "--device", "a100"]) == 0
    shown = capsys.readouterr().out
    assert "longest micro-batch" in shown and "predicted" in shown and "ms" in shown


def test_tensor_parallel_ranks_share_the_vocabulary(capsys):
    whole, half = (plan_json(capsys, "logprob", *SMALL, "--tp", ranks)["rows"] for ranks in ("1", "2"))
    for a, b in zip(whole, half, strict=True):
        assert b["tflop"] == pytest.approx(a["tflop"] / 2)
        assert b["simulated_bytes"] < a["simulated_bytes"]


def test_own_device_and_what_is_missing(capsys):
    result = plan_json(
        capsys,
        *("logprob", "--tokens", "4096", "--vocab", "5000", "--hidden", "32", "--dtype", "fp32"),
        *("--response-frac", "1", "--device-gb", "0.3", "--reserve-gb", "0.1"),
    )
    assert list(result["capacities"]) == ["0.3 GiB"] == list(result["longest"])
    verdict = next(r for r in result["rows"] if r["method"] == "plain")["devices"]["0.3 GiB"]
    assert not verdict["fits"] and "too many" in verdict["why"] and "[4096, 5000] float32 x" in verdict["why"]
    assert list(parse_devices("h200,rtx4090", None, 0.0)) == ["rtx4090", "h200"]


def test_muon_state_per_world_size(capsys):
    result = plan_json(
        capsys, "muon", "--layers", "2", "--dim", "64", "--vocab", "512", "--world", "1,4", "--dtype", "bf16"
    )
    rows = {(r["optimizer"], r["world"], r["sharding"]): r["parts"] for r in result["rows"]}
    assert len(rows) == 8
    elements, tables = 2 * (4 * 64 * 64 + 2 * 256 * 64), 2 * 512 * 64
    lines = 2 * (4 * 64 + 2 * 256)
    alone = rows["normuon", 1, "replicated"]
    # Per matrix element fp32 momentum and 16 low bits, a variance per line; for Adam two moments, low bits.
    # Storages are multiples of 512 bytes.
    assert alone["state"] == pytest.approx(elements * 6 + lines * 4 + tables * 10, rel=0.02)
    assert alone["weights"] == alone["gradients"] == 2 * (elements + tables)
    # Two moments; the weights have fp32 masters.
    adamw = rows["adamw", 1, "replicated"]
    assert adamw["state"] == pytest.approx((elements + tables) * 8, rel=0.02)
    assert adamw["weights"] == pytest.approx((elements + tables) * 6, rel=0.02)
    assert rows["adamw", 4, "ZeRO-1"]["state"] == pytest.approx((elements + tables) * 2, rel=0.02)
    for optimizer in ("adamw", "normuon"):
        whole, shard = rows[optimizer, 1, "replicated"], rows[optimizer, 4, "FSDP2"]
        for part in ("weights", "gradients", "state"):
            assert shard[part] == pytest.approx(whole[part] / 4, rel=0.1), (optimizer, part)
    # The global shapes that DTensor looks at are nobody's memory.
    assert rows["adamw", 4, "FSDP2"]["scratch"] < adamw["weights"] / 2
    # Whole matrices are dealt out by FLOPs: the fullest rank may hold more than its share.
    assert rows["normuon", 4, "ZeRO-1"]["state"] < 0.5 * alone["state"]


def test_lens_objective_needs_less_than_its_eager_form(capsys):
    rows = plan_json(
        capsys, "lens", "--samples", "4", "--variants", "4", "--tokens", "512", "--width", "256"
    )["rows"]
    fused, eager = ({r["method"]: r["simulated_bytes"] for r in rows}[m] for m in ("fused", "eager"))
    assert rows[0]["input_bytes"] < fused < eager


@pytest.mark.parametrize(
    ("name", "settings", "logits"),
    [
        ("distill", "tokens=1024,hidden=64,teacher=96,vocab=50560", 1024 * 50560),
        ("dpo", "pairs=2,tokens=256,hidden=64,vocab=50560", 4 * 255 * 50560),
        ("masked-head", "tokens=1024,hidden=64,vocab=50560", 1024 * 50560),
    ],
)
def test_objectives_plain_and_fast_side_by_side(name, settings, logits, capsys):
    found = plan_json(capsys, name, "--set", settings, "--device", "h100")
    assert (
        found["plan"] == name and found["vocab"] == 50560 and found["dtype"] == "bf16" and found["predicted"]
    )
    plain, fast = found["rows"]
    assert (plain["method"], fast["method"]) == ("reference", "leanstep")
    # Plain code has fp32 logits of all positions, and their gradient beside them.
    assert plain["largest_buffer_bytes"] == 4 * logits and plain["simulated_bytes"] > 8 * logits
    assert fast["simulated_bytes"] < plain["simulated_bytes"] / 2 and fast["tflop"] < plain["tflop"]
    assert plain["input_bytes"] == fast["input_bytes"] >= 2 * 64 * 50560
    assert fast["step_ms"] > 0 and fast["devices"]["h100"]["fits"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_longest_batch_fits_and_no_longer_one_does(dtype):
    vocab, hidden, chunk = 1271, 512, 128
    short, rows = 8 * chunk, []
    (job,) = rehearse_jobs(head_jobs(short, vocab, hidden, dtype, chunk, [("linear", 1.0)]), A100)
    for capacity in (64 * 2**20, 96 * 2**20):
        rows.append(longest_batch(job, short, chunk, capacity))
        assert rows[-1] > 8 * chunk and rows[-1] % chunk == 0
    asked = [r + more for r in rows for more in (0, 4 * chunk)]
    jobs = [job for r in asked for job in head_jobs(r, vocab, hidden, dtype, chunk, [("linear", 1.0)])]
    verdicts = [
        job.fits(capacity)
        for job, capacity in zip(rehearse_jobs(jobs, A100), [64 * 2**20] * 2 + [96 * 2**20] * 2, strict=True)
    ]
    assert verdicts == [True, False, True, False]
    assert longest_batch(job, short, chunk, 12 * 2**20) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["logprob", "--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["logprob", "--response-frac", "1,2"], "--response-frac: expected fractions between 0 and 1, got 2"),
        (["logprob", "--response-frac", "half"], "--response-frac: expected numbers"),
        (["logprob", "--dtype", "int8"], "--dtype: no dtype 'int8'"),
        (["logprob", "--chunk", "-1"], "--chunk: expected at least 1, got -1"),
        (["logprob", "--devices", "tpu"], "--devices: no device 'tpu'"),
        (["logprob", "--device-gb", "0"], "--device-gb: expected more than 0"),
        (["logprob", "--reserve-gb", "-1"], "--reserve-gb: expected 0 or more"),
        (["logprob", "--simulate", "some"], "--simulate: expected leanstep, all or none"),
        (["muon", "--world", "0"], "--world: expected at least 1, got 0"),
        (["muon", "--world", "two"], "--world: expected whole numbers"),
        (["muon", "--dtype", "fp16"], "--dtype: no dtype 'fp16'"),
        (["lens", "--width", "9000", "--tokens", "100"], "--width: expected at most"),
        (["logprob", "--json", "/nowhere/x.json"], "--json: the folder /nowhere does not exist"),
        (["distill", "--set", "rows=3"], "--set: distill has no parameter 'rows'; it has tokens, hidden"),
        (["dpo", "--set", "pairs"], "--set: expected name=value pairs, got 'pairs'"),
        (["lens", "--device", "tpu"], "--device: no device 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_two(arguments, message, capsys):
    assert run(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
