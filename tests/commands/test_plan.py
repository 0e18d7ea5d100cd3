"""`leanstep plan`: the published figures, agreement with measured peaks, one JSON object, one-line errors."""

from __future__ import annotations

import json

import pytest
import torch

from leanstep.cli import run
from leanstep.commands.plan_workloads import (
    HeadShape,
    _head_step,
    judge,
    parse_devices,
    plan_optimizer,
    simulate_head,
    simulate_scratch,
)
from leanstep.logprob.engine.peak_memory import METHODS, plan_memory
from leanstep.measure.peaks import measure_peak

GIB = 2**30
SMALL = ["--tokens", "512", "--vocab", "640", "--hidden", "32", "--dtype", "fp32", "--chunk", "256"]


def plan_json(capsys, *arguments: str) -> dict:
    assert run(["plan", *arguments, "--json", "-"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out)


def test_published_figures_of_both_methods(capsys):
    result = plan_json(
        capsys, "logprob", "--tokens", "205280", "--vocab", "76032", "--hidden", "2560", "--dtype", "fp32",
        "--chunk", "1024", "--response-frac", "1,0.25", "--simulate", "none",
    )  # fmt: skip
    rows = {(r["method"], r["response_frac"]): r for r in result["rows"]}
    gathered = rows["gathered-loss", 1.0]
    assert gathered["largest_buffer_bytes"] == 62_431_395_840
    assert not gathered["devices"]["h200"]["fits"]
    assert "58.14 GiB" in gathered["devices"]["h200"]["why"]
    quarter = rows["gathered-loss", 0.25]
    assert quarter["formula_bytes"] / GIB == pytest.approx(43.6, abs=0.05)
    assert quarter["devices"]["h200"]["fits"] and quarter["devices"]["h100"]["fits"]
    assert rows["linear", 1.0]["formula_bytes"] < 6 * GIB
    assert all(v["fits"] for v in rows["linear", 1.0]["devices"].values())
    assert result["longest"]["h100"] > 205280


def test_simulated_figures_of_the_real_code_at_full_size():
    # A few kept rows keep this short; the hidden-level peak does not depend on them.
    shape = HeadShape(205280, 5132, 76032, 2560, torch.float32, 1024)
    linear = simulate_head("linear", shape)
    assert linear.input_bytes + linear.peak_bytes < 6 * GIB
    formula = plan_memory(205280, 76032, 2560, 0.025, dtype=torch.float32, chunk=1024, kernels=True)
    assert linear.peak_bytes == pytest.approx(formula.extra_bytes, rel=0.1)
    gathered = simulate_head("gathered-loss", shape)
    assert (gathered.input_bytes + gathered.peak_bytes) / GIB == pytest.approx(4.361, abs=0.005)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "gathered-loss"])
@pytest.mark.parametrize("kept", [1.0, 0.25])
def test_formula_simulation_and_measurement_agree(method, kept):
    T, V, D, chunk = 512, 3000, 96, 128
    shape = HeadShape(T, round(kept * T), V, D, torch.float32, chunk)
    simulated = simulate_head(method, shape)
    rows = torch.randperm(T)[: shape.kept].sort().values
    inputs = {
        "hidden": torch.randn(T, D),
        "weight": torch.randn(V, D) * 0.1,
        "tokens": torch.randint(0, V, (shape.kept,)),
        "rows": rows,
        "old_logp": torch.full((shape.kept,), -8.0),
        "all_tokens": torch.randint(0, V, (T,)),
    }
    measured = measure_peak(lambda: _head_step(method, shape, inputs), inputs)
    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.1)
    formula = plan_memory(T, V, D, kept, method=method, dtype=torch.float32, chunk=chunk, kernels=True)
    total = formula.input_bytes + measured.peak_bytes
    if method in ("policy", "frozen"):
        # At these sizes the work tiles (policy) and the exponentials of a chunk (frozen) outweigh the
        # formula's terms; the simulation is the figure to trust.
        assert formula.total_bytes <= 1.05 * total
    else:
        assert formula.total_bytes == pytest.approx(total, rel=0.1)


def test_json_is_one_object_and_the_table_goes_to_standard_error(capsys):
    assert run(["plan", "logprob", *SMALL, "--json", "-"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert {r["method"] for r in result["rows"]} == set(METHODS)
    assert {r["response_frac"] for r in result["rows"]} == {1.0, 0.5, 0.25, 0.1}
    simulated = [r for r in result["rows"] if r["simulated_bytes"] is not None]
    assert {r["method"] for r in simulated} == {"plain", "gathered-loss", "linear"}
    assert run(["plan", "logprob", *SMALL, "--simulate", "none"]) == 0
    assert "longest micro-batch" in capsys.readouterr().out


def test_tensor_parallel_ranks_share_the_vocabulary(capsys):
    whole, half = (
        plan_json(capsys, "logprob", *SMALL, "--simulate", "none", "--tp", ranks)["rows"]
        for ranks in ("1", "2")
    )
    for a, b in zip(whole, half, strict=True):
        assert b["tflop"] == pytest.approx(a["tflop"] / 2)
        assert b["formula_bytes"] < a["formula_bytes"]


def test_own_device_and_what_is_missing(capsys):
    result = plan_json(
        capsys, "logprob", *SMALL, "--simulate", "none", "--device-gb", "0.01", "--reserve-gb", "0.005"
    )
    assert list(result["capacities"]) == ["0.01 GiB"]
    verdict = next(r for r in result["rows"] if r["method"] == "plain")["devices"]["0.01 GiB"]
    assert not verdict["fits"] and "too many" in verdict["why"]
    assert list(parse_devices("h200,rtx4090", None, 0.0)) == ["rtx4090", "h200"]
    assert judge(5, {"d": 5}, "x")["d"]["fits"] and not judge(6, {"d": 5}, "x")["d"]["fits"]


def test_muon_state_per_world_size(capsys):
    result = plan_json(
        capsys, "muon", "--layers", "2", "--dim", "64", "--vocab", "512", "--world", "1,4", "--dtype", "bf16"
    )
    rows = {(r["optimizer"], r["world"], r["sharding"]): r["parts"] for r in result["rows"]}
    elements, tables = 2 * (4 * 64 * 64 + 2 * 256 * 64), 2 * 512 * 64
    lines = 2 * (4 * 64 + 2 * 256)
    alone = rows["normuon", 1, "replicated"]
    # Per matrix element fp32 momentum and 16 low bits, a variance per line; for Adam two moments, low bits.
    assert alone["state"] == elements * 6 + lines * 4 + tables * 10
    assert rows["adamw", 1, "replicated"]["state"] == (elements + tables) * 12
    assert rows["normuon", 4, "ZeRO-1"]["state"] == alone["state"] // 4
    assert rows["normuon", 4, "ZeRO-2"]["gradients"] == alone["gradients"] // 4
    assert result["scratch_simulated_bytes"] == alone["scratch"] > 0


def test_planned_muon_state_is_what_the_optimizer_keeps():
    from leanstep.muon import NorMuon

    matrices = [torch.nn.Parameter(torch.randn(s).bfloat16()) for s in [(64, 64)] * 4 + [(256, 64)] * 2]
    tables = [torch.nn.Parameter(torch.randn(512, 64).bfloat16()) for _ in range(2)]
    groups = [{"params": matrices, "algorithm": "normuon"}, {"params": tables, "algorithm": "adam"}]
    optimizer = NorMuon(groups, lr=0.02)
    for p in matrices + tables:
        p.grad = torch.randn_like(p)
    optimizer.step()
    held = sum(
        t.numel() * t.element_size()
        for state in optimizer.state.values()
        for name, t in state.items()
        if isinstance(t, torch.Tensor) and name != "step"
    )
    parts = plan_optimizer("normuon", "replicated", 1, 1, 64, 256, 512, torch.bfloat16, None)
    assert parts["state"] == held
    assert simulate_scratch(64, 256, torch.float32) > 0


def test_lens_objective_formula_follows_the_simulation(capsys):
    result = plan_json(
        capsys, "lens", "--samples", "4", "--variants", "4", "--tokens", "512", "--width", "256"
    )
    for row in result["rows"]:
        assert row["simulated_bytes"] == pytest.approx(row["formula_bytes"], rel=0.15)


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
    ],
)
def test_bad_input_is_one_line_and_exit_two(arguments, message, capsys):
    assert run(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_workload_of_the_gathered_loss_counts_its_logits_as_input():
    peak = simulate_head("gathered-loss", HeadShape(100, 40, 50, 8, torch.float32, 16))
    assert peak.input_bytes == 40 * 50 * 4


@pytest.mark.parametrize("simulated", [True, False])
def test_the_longest_batch_fits_by_the_figure_that_judges_it(simulated: bool):
    import torch

    from leanstep.commands.plan_workloads import HeadShape, longest_batch, simulate_head
    from leanstep.logprob.engine.peak_memory import plan_memory

    vocab, hidden, chunk, capacity = 1271, 512, 128, 16 * 2**20

    def total(rows: int) -> int:
        if simulated:
            peak = simulate_head("linear", HeadShape(rows, rows, vocab, hidden, torch.bfloat16, chunk))
            return peak.input_bytes + peak.peak_bytes
        options = {"dtype": torch.bfloat16, "chunk": chunk, "kernels": True}
        return plan_memory(rows, vocab, hidden, 1.0, **options).total_bytes

    rows = longest_batch(capacity, vocab, hidden, torch.bfloat16, chunk, simulated)
    assert rows > 8 * chunk
    assert total(rows) <= capacity < total(rows + 2 * chunk)
    assert longest_batch(2**20, vocab, hidden, torch.bfloat16, chunk, simulated) == 0
