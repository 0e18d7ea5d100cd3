"""modded-nanogpt's own text with leanstep's pieces in it, on a CPU: traced, and stepped beside upstream's.

    git clone https://github.com/KellerJordan/modded-nanogpt && git -C modded-nanogpt checkout 20dd158
    python dev/modded_nanogpt.py optimizer modded-nanogpt     # ten steps beside upstream's own code
    python dev/modded_nanogpt.py swap modded-nanogpt DIR      # train_gpt.py with leanstep, to rehearse
    python dev/modded_nanogpt.py banks                        # drift of three ways to read a bank
    python dev/modded_nanogpt.py record modded-nanogpt        # both records, rehearsed

`optimizer` executes the part of train_gpt.py that holds polar_express and NorMuonAndAdam. Every
`torch.compile(fullgraph=True)` in it traces with Dynamo; a graph break is an error. Two things differ from a
GPU: the compiler's back end, and shifts of uint32, which a CPU lacks (they are done in int64).
`record` predicts record 74 on eight H100s, upstream's script and leanstep's recipe, without evaluations, and
reads the logs of upstream's runs; it writes results/record-74.json and takes a quarter of an hour.
The checkout is only read and run.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from benchmarks.bank_access import BANK_FORMS, train_from_banks
from leanstep.integrations import modded_nanogpt
from leanstep.measure.drift import paired_shift
from leanstep.muon import NorMuon, to_master
from leanstep.rehearse.cuda_allocator import memory_of
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import HostWait, Recording, Request
from leanstep.rehearse.stage import rehearse
from leanstep.rehearse.time_model import HostCosts, time_steps
from leanstep.rehearse.what_if import step_events

FIRST, LAST = "# Polar Express\n", "# PyTorch nn.Module definitions for the model\n"
SHIFTS = (
    ("(p.to(torch.uint32) << 16) | mantissa.to(torch.uint32)", "_joined(p, mantissa)"),
    ("p_precise = p_precise_raw.view(torch.float32)", "p_precise = p_precise_raw"),
    ("p.copy_((p_precise_raw >> 16).to(torch.uint16))", "_split(p_precise, p, mantissa)"),
    ("        mantissa.copy_(p_precise_raw.to(torch.uint16))\n", ""),
)
IMPORT = "from triton_kernels import XXT, XTX, ba_plus_cAA, "
PIECES = "XXT, XTX, ba_plus_cAA, transpose_add, transpose_copy"


def _joined(high: Tensor, low: Tensor) -> Tensor:
    bits = (high.view(torch.int16).long() << 16) | (low.view(torch.int16).long() & 0xFFFF)
    return bits.to(torch.int32).view(torch.float32)


def _split(value: Tensor, high: Tensor, low: Tensor) -> None:
    bits = value.view(torch.int32)
    high.copy_((bits >> 16).to(torch.int16).view(torch.uint16))
    low.copy_((((bits & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16).view(torch.uint16))


def plain_xxt(A: Tensor, out: Tensor) -> Tensor:
    return out.copy_(A @ A.mT)


def plain_xtx(A: Tensor, out: Tensor) -> Tensor:
    return out.copy_(A.mT @ A)


def plain_quadratic(A: Tensor, alpha: float, beta: float, out: Tensor) -> Tensor:
    return out.copy_(alpha * (A @ A) + beta * A)


PLAIN = {
    "XXT": plain_xxt,
    "XTX": plain_xtx,
    "ba_plus_cAA": plain_quadratic,
    "transpose_add": lambda src, dst: dst.add_(src.T),
    "transpose_copy": lambda src, dst: dst.copy_(src.T),
}
LEANSTEP = {name: getattr(modded_nanogpt, name) for name in PLAIN}


def read_script(checkout: Path) -> str:
    script = checkout / "train_gpt.py"
    if not script.is_file():
        raise SystemExit(f"checkout: expected a modded-nanogpt checkout, {checkout} has no train_gpt.py")
    return script.read_text(encoding="utf-8")


def load_optimizer(
    text: str, pieces: dict[str, Any], *, exact: bool = False, traced: bool = True
) -> dict[str, Any]:
    """Upstream's optimizer with these pieces.

    exact: products in float32, to tell mistakes from rounding. traced: its `torch.compile` lines are kept.
    """
    part = text[text.index(FIRST) : text.index(LAST)]
    for before, after in SHIFTS:
        if before not in part:
            raise SystemExit(f"checkout: expected commit 20dd158; train_gpt.py lacks {before!r}")
        part = part.replace(before, after)
    if exact:
        part = part.replace("X = g.bfloat16()", "X = g.clone()")
    compiled = []

    def trace(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda f: trace(f, **options)
        compiled.append((function.__name__, options))
        return torch.compile(function, backend="aot_eager", **options) if traced else function

    names: dict[str, Any] = {}
    header = (
        "from dataclasses import dataclass\nimport math, os, threading\nimport torch.distributed as dist\n"
    )
    exec(header, names)
    proxy = type(sys)("torch")
    proxy.__dict__.update(torch.__dict__)
    proxy.__dict__["compile"] = trace
    names |= {"torch": proxy, "Tensor": Tensor, "nn": nn, "np": __import__("numpy"), **pieces}
    names |= {"_joined": _joined, "_split": _split, "world_size": 1, "grad_accum_steps": 8}
    exec(compile(part, "train_gpt.py", "exec"), names)
    names["compiled"] = compiled
    return names


def make_params(generator: torch.Generator) -> dict[str, nn.Parameter]:
    def draw(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator).bfloat16() * 0.1)

    params = {
        "attn_bank": draw(4, 16, 16),
        "mlp_bank": draw(2, 2, 48, 16),
        "lm_head": draw(16, 40),
        "embed": draw(40, 16),
        "scalars": nn.Parameter(torch.randn(7, generator=generator)),
    }
    params["attn_bank"].reshape = (4, 16, 16)  # type: ignore[method-assign, assignment]
    params["mlp_bank"].reshape = (4, 48, 16)  # type: ignore[method-assign, assignment]
    params["embed"].data.copy_(params["lm_head"].data.T)
    for label, p in params.items():
        p.label = label  # type: ignore[attr-defined]
    return params


ADAM = {"lr": 0.008, "eps": 1e-10, "weight_decay": 0.005}
MUON = {"lr": 0.023, "momentum": 0.95, "beta2": 0.95, "weight_decay": 1.2}
BETAS = {"lm_head": (0.5, 0.95), "embed": (0.5, 0.95), "scalars": (0.9, 0.99)}


def upstream_optimizer(names: dict[str, Any], params: dict[str, nn.Parameter]) -> Any:
    table = {
        label: {"optim": "adam" if label in BETAS else "normuon", "comms": "sharded"} for label in params
    }
    for label, betas in BETAS.items():
        table[label]["adam_betas"] = list(betas)  # type: ignore[assignment]
    order = list(params)
    return names["NorMuonAndAdam"](
        list(params.items()),
        param_table=table,
        scatter_order=order,
        work_order=order,
        adam_defaults=ADAM,
        normuon_defaults=MUON,
    )


def leanstep_optimizer(params: dict[str, nn.Parameter], compute_dtype: torch.dtype) -> NorMuon:
    groups: list[dict[str, Any]] = [
        {"params": [params["attn_bank"]]},
        {"params": [params["mlp_bank"]], "lr_mul": [1.0, 2.0] * 2},
        *({"params": [params[n]], "algorithm": "adam", "betas": b} for n, b in BETAS.items() if n != "embed"),
    ]
    return NorMuon.preset("modded-nanogpt", groups, compute_dtype=compute_dtype)


def train(kind: str, text: str, steps: int, *, exact: bool, traced: bool) -> dict[str, Tensor]:
    """Weights after `steps` steps with the same gradients; bfloat16 ones with their low bits."""
    generator = torch.Generator().manual_seed(0)
    params = make_params(generator)
    names: dict[str, Any] = {}
    if kind == "preset":
        optimizer: Any = leanstep_optimizer(params, torch.float32 if exact else torch.bfloat16)
    else:
        pieces = PLAIN if kind == "upstream" else LEANSTEP
        names = load_optimizer(text, pieces, exact=exact, traced=traced)
        if kind == "polar_express":
            names[kind] = torch.compile(
                modded_nanogpt.polar_express, backend="aot_eager", dynamic=False, fullgraph=True
            )
        optimizer = upstream_optimizer(names, params)
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if kind == "preset":
            tied, head = params["embed"].grad, params["lm_head"].grad
            assert tied is not None and head is not None
            modded_nanogpt.transpose_add(tied, head)
            params["embed"].grad = None
            optimizer.step()
            modded_nanogpt.transpose_copy(params["lm_head"].data, params["embed"].data)
        else:
            optimizer.step(do_adam=True)
    if kind == "preset":
        low = {n: optimizer.state[p].get("residual") for n, p in params.items()}
        masters = {n: to_master(p.data, low[n], "truncate") for n, p in params.items() if low[n] is not None}
        return {n: masters.get(n, p.data.float()) for n, p in params.items()}
    weights = {label: p.data.float() for label, p in params.items()}
    for label in ("attn_bank", "mlp_bank"):
        p = params[label]
        low = optimizer.param_states[p]["mantissa"]
        weights[label] = _joined(p.data.view(torch.uint16).view(low.shape), low).view(p.shape)
    return weights


def distance(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    return {n: float((mine[n] - theirs[n]).norm() / theirs[n].norm()) for n in theirs}


def compare_optimizers(checkout: Path, steps: int) -> dict[str, dict[str, float]]:
    text, results = read_script(checkout), {}
    torch._dynamo.config.recompile_limit = 64
    for exact in (True, False):
        truth = train("upstream", text, steps, exact=exact, traced=False)
        words = "float32" if exact else "bfloat16"
        # The last two take upstream's place as a whole; polar_express always computes in bfloat16.
        rows = [("upstream", True), ("pieces", False), ("pieces", True), ("preset", False)]
        if not exact:
            rows.insert(3, ("polar_express", True))
        for kind, traced in rows:
            row = distance(train(kind, text, steps, exact=exact, traced=traced), truth)
            results[f"{words}, {kind}{', traced' if traced else ''}"] = row
    for name, row in results.items():
        print(f"{name}: " + ", ".join(f"{n} {v:.1e}" for n, v in row.items()), flush=True)
    names = load_optimizer(text, LEANSTEP)
    full = sorted({name for name, options in names["compiled"] if options.get("fullgraph")})
    print(f"traced with fullgraph=True: {', '.join(full)}")
    return results


def swap_pieces(checkout: Path, folder: Path) -> Path:
    """train_gpt.py with leanstep's pieces, and the kernels it still takes from upstream."""
    text = read_script(checkout)
    line = next((x for x in text.splitlines() if x.startswith(IMPORT)), None)
    if line is None:
        raise SystemExit(f"checkout: expected commit 20dd158; train_gpt.py lacks {IMPORT!r}")
    rest = [
        x for x in line.removeprefix("from triton_kernels import ").split(", ") if x not in PIECES.split(", ")
    ]
    swapped = f"from triton_kernels import {', '.join(rest)}\n"
    swapped += f"from leanstep.integrations.modded_nanogpt import {PIECES}, unbind_bank"
    # Commit 20dd158 has one attention bank, newer ones have qk and vo banks that are joined first.
    banks = {
        "self.attn_bank.unbind(0)": "unbind_bank(self.attn_bank)",
        "torch.cat([qk_all, vo_flat], dim=1).unbind(0)": "unbind_bank(torch.cat([qk_all, vo_flat], dim=1))",
        "self.mlp_bank.flatten(0, 1).unbind(0)": "unbind_bank(self.mlp_bank)",
    }
    lines = [before for before in banks if before in text]
    if len(lines) != 2:
        raise SystemExit(f"checkout: expected a line for attention banks and one for the MLP's, got {lines}")
    text = text.replace(line, swapped)
    for before in lines:
        text = text.replace(before, banks[before])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_gpt.py").write_text(text, encoding="utf-8")
    shutil.copy(checkout / "triton_kernels.py", folder)
    return folder / "train_gpt.py"


def bank_drift(runs: int, steps: int, *, compiled: bool) -> None:
    """Loss of each form against `bank[i]` over paired runs."""
    curves = {
        form: [train_from_banks(form, seed, steps, compiled=compiled) for seed in range(runs)]
        for form in BANK_FORMS
    }
    plain = [curve[-1] for curve in curves["index"]]
    for form, losses in curves.items():
        shift = paired_shift(plain, [curve[-1] for curve in losses])
        same = all(a == b for a, b in zip(losses, curves["index"], strict=True))
        print(
            f"{'compiled' if compiled else 'eager'} {form}: shift {shift['shift']:+.1e}, "
            f"p {shift['p_value']:.2f}, could see {shift['detectable_shift']:.1e}"
            f"{', the same bits in every step' if same else ''}",
            flush=True,
        )


# Stage -> the number after its last step; recorded steps of upstream without and with Adam's turn (places in
# `STEPS` of rehearsals/upstream_74.py); leanstep's steps, of which the first is not counted.
STAGES: dict[str, tuple[int, tuple[int, int], tuple[int, int, int]]] = {
    "stage 1": (483, (2, 1), (1, 2, 3)),
    "stage 2": (967, (4, 5), (483, 484, 485)),
    "stage 3": (1450, (8, 9), (969, 970, 971)),
    "extension": (1490, (11, 12), (1449, 1450, 1451)),
}
FOLDER = Path(__file__).parent / "rehearsals"
DEVICE, HOST_US = "h100", 4.0


def times_of(recording: Recording) -> list[dict[str, float]]:
    """Predicted figures of every step, captured regions fused."""
    played, ends = [], []
    for step in recording.steps:
        played += step_events(recording, step)
        ends.append(len(played))
    rows = []
    timings = time_steps(played, ends, device_named(DEVICE), HostCosts.of(HOST_US))
    for step, time in zip(recording.steps, timings, strict=True):
        waits = [e for e in recording.events[step.first : step.last] if isinstance(e, HostWait)]
        classes = {name: round(1e3 * value, 2) for name, value in time.classes.items() if value > 5e-5}
        rows.append({"ms": round(1e3 * time.step_s, 2), "host_waits": len(waits), **classes})
    return rows


def logged_seconds(checkout: Path) -> dict[str, float]:
    """Seconds of each stage in the logs of upstream's four runs, on average."""
    runs = []
    for log in sorted(checkout.glob("records/track_1_short/*FlattenForward/pr233/*.txt")):
        times = re.findall(r"^step:(\d+)/1490 train_time:(\d+)ms", log.read_text(encoding="utf-8"), re.M)
        runs.append({int(step): int(ms) / 1e3 for step, ms in times})
    seconds, last = {}, 0
    for stage, (end, *_) in STAGES.items():
        seconds[stage] = statistics.mean(run[end] - run.get(last, 0.0) for run in runs)
        last = end
    return seconds


def summed(stages: dict[str, tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """Of each stage the two kinds of steps and their mean, and the seconds of the whole run."""
    rows, total, last = {}, 0.0, 0
    for stage, (plain, adam) in stages.items():
        mean = (plain["ms"] + adam["ms"]) / 2
        rows[stage] = {"ms": round(mean, 2), "without Adam": plain, "with Adam": adam}
        total += mean * (STAGES[stage][0] - last) / 1e3
        last = STAGES[stage][0]
    return {"stages": rows, "seconds": round(total, 1)}


def of_upstream(recording: Recording) -> dict[str, Any]:
    times = times_of(recording)
    return summed({stage: (times[a], times[b]) for stage, (_, (a, b), _) in STAGES.items()})


def of_leanstep(recordings: dict[str, Recording]) -> dict[str, Any]:
    """From one recording for each stage, of three steps; a fourth has an evaluation of two batches in it."""
    stages, peak, evaluation = {}, 0, {}
    device = device_named(DEVICE)
    for stage, recording in recordings.items():
        _, second, third, *others = times_of(recording)
        for row in others:
            evaluation = {"evaluation": row}
        plain, adam = (second, third) if STAGES[stage][2][2] % 2 else (third, second)
        stages[stage] = (plain, adam)
        memory = memory_of(recording, device.memory_bytes, device.context_bytes, points=1)
        peak = max(peak, memory.reserved)
    return {**summed(stages), **evaluation, "peak_gib": round(peak / 2**30, 1)}


def rehearse_ours(stage: str, ranks: int) -> Recording:
    words = [str(step) for step in STAGES[stage][2]] + ["evaluation"] * (stage == "extension")
    request = Request(
        str(FOLDER / "record_74.py"), tuple(words), device=DEVICE, steps=len(words), ranks=ranks
    )
    return checked(rehearse(request, quiet=True), len(words))


def checked(recording: Recording, steps: int) -> Recording:
    if len(recording.steps) < steps:
        raise SystemExit(f"{recording.request.target}: {recording.refused or 'ended early'}")
    return recording


def compare_records(checkout: Path) -> dict[str, Any]:
    request = Request(str(FOLDER / "upstream_74.py"), (str(checkout),), device=DEVICE, steps=14, ranks=8)
    upstream = of_upstream(checked(rehearse(request, quiet=True), 14))
    ours = of_leanstep({stage: rehearse_ours(stage, 8) for stage in STAGES})
    alone = of_leanstep({"stage 3": rehearse_ours("stage 3", 1)})
    return record_table(logged_seconds(checkout), upstream, ours, alone)


def record_table(
    logged: dict[str, float], upstream: dict[str, Any], ours: dict[str, Any], alone: dict[str, Any]
) -> dict[str, Any]:
    counts, last = {}, 0
    for stage, (end, *_) in STAGES.items():
        counts[stage], last = end - last, end
    measured = {stage: round(1e3 * seconds / counts[stage], 2) for stage, seconds in logged.items()}
    return {
        "note": "Predicted for 8 x H100 except `logged`: evaluations are left out. Upstream: modded-nanogpt "
        "20dd158, its own train_gpt.py; its kernels that multiply are priced as products.",
        "command": "python dev/modded_nanogpt.py record CHECKOUT",
        "device": DEVICE,
        "host_us": HOST_US,
        "logged": {"ms": measured, "seconds": round(sum(logged.values()), 1)},
        "upstream": upstream,
        "leanstep": ours,
        "leanstep, one rank": {key: value for key, value in alone.items() if key != "seconds"},
    }


def print_record(table: dict[str, Any]) -> None:
    print("ms per step    logged  upstream  leanstep")
    for stage in STAGES:
        cells = (table["logged"]["ms"][stage], *(table[who]["stages"][stage]["ms"] for who in WHO))
        print(f"{stage:12}" + "".join(f"{cell:10.1f}" for cell in cells))
    totals = (table["logged"]["seconds"], *(table[who]["seconds"] for who in WHO))
    print(f"{'seconds':12}" + "".join(f"{cell:10.1f}" for cell in totals))


WHO = ("upstream", "leanstep")


def main() -> None:
    parser = argparse.ArgumentParser(description="modded-nanogpt's own text with leanstep's pieces")
    parser.add_argument("command", choices=["optimizer", "swap", "banks", "record"])
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, help="10 steps of the optimizer, 60 of a run from banks")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="banks: compile the model")
    options = parser.parse_args()
    if options.command != "banks" and options.checkout is None:
        parser.error("checkout: expected the folder of a modded-nanogpt checkout")
    if options.command == "record":
        table = compare_records(options.checkout)
        results = Path(__file__).parents[1] / "results" / "record-74.json"
        results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print_record(table)
    elif options.command == "optimizer":
        compare_optimizers(options.checkout, options.steps or 10)
    elif options.command == "swap":
        print(swap_pieces(options.checkout, options.folder or Path("swapped")))
    else:
        bank_drift(options.runs, options.steps or 60, compiled=options.compile)


if __name__ == "__main__":
    main()
