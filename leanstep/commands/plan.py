"""`leanstep plan logprob|muon|lens|distill|...`: the peak of a step that is not at hand, and where it fits.

A thin layer over the engine of `leanstep rehearse`: the steps of `plan_workloads` run as CUDA code on a
device that is not there, and each is judged by a replay of the caching allocator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from leanstep.commands import BadInput
from leanstep.commands.rehearse import (
    Planned,
    SetOption,
    case_jobs,
    head_jobs,
    longest_batch,
    one_device,
    parse_devices,
    rehearse_jobs,
)
from leanstep.commands.terminal import (
    DTYPES,
    HtmlOption,
    JsonOption,
    check_at_least_one,
    check_writable,
    console,
    parse_fractions,
    parse_integers,
    progress_bar,
    write_json,
)
from leanstep.rehearse.cuda_allocator import Replay, replay
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Storage

GIB = 2**30
# Whose CUDA branch is recorded when no device is named.
RECORDED_ON = "h100"

METHODS = {
    "plain": "project every row, log_softmax, entropy",
    "gathered-loss": "slime pull 2076: gather kept logit rows, chunked cross-entropy; the loss alone",
    "gathered-step": "the same in a training step, with the [T, V] logits it gathers from",
    "logits": "leanstep.token_logprobs(rows=...) on existing [T, V] logits",
    "linear": "leanstep.linear_logprobs: kept hidden rows, tiles, recompute in backward",
    "policy": "leanstep.linear_policy_loss: gradients formed in the forward pass",
    "frozen": "leanstep.linear_logprobs with a frozen head: backward without a GEMM",
    "no-grad": "leanstep.linear_logprobs under no_grad: old and reference log-probs",
}
LENS_METHODS = {
    "fused": "leanstep.lens.lens_loss: closed-form gradient",
    "eager": "the same under autograd, dense rows (what torch.compile sees)",
}
OBJECTIVES = {
    "distill": "Distillation from a wider teacher's head.",
    "dpo": "DPO with a reference head; a quarter of the positions are completions.",
    "masked-head": "Log-probs and entropy over replayed sampling masks.",
}
SHARDINGS = {
    "replicated": "every rank holds everything",
    "ZeRO-1": "state sharded: NorMuon(mesh=...); AdamW on flat buffers",
    "FSDP2": "weights, gradients and state are DTensors, one shard of rows a rank",
}

DeviceOption = Annotated[
    str | None, typer.Option("--devices", help="Judge by these: h100,h200,a100-40,a100-80,rtx4090,b200.")
]
DeviceSizeOption = Annotated[
    float | None, typer.Option("--device-gb", help="A device of your own with this many GiB.")
]
OnDeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Rehearse for this device alone (h100, ...): its branches, and the time."),
]
ReserveOption = Annotated[
    float, typer.Option("--reserve-gb", help="GiB that the rest (model, optimizer, context) already holds.")
]
# Of 0.1, when formulas stood beside the simulation: everything is simulated now.
SimulateOption = Annotated[str, typer.Option(hidden=True)]

Row = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], str]]]


@dataclass(frozen=True)
class PlanRun:
    """One plan under way: the device it is rehearsed on, those it is judged by, where its results go."""

    kind: str
    device: Device
    timed: bool
    capacities: dict[str, int]
    reserve_gb: float
    json: str | None
    html: str | None
    out: Console

    @classmethod
    def begin(
        cls,
        kind: str,
        device: str | None,
        simulate: str,
        devices: str | None,
        device_gb: float | None,
        reserve_gb: float,
        json: str | None,
        html: str | None,
    ) -> PlanRun:
        """Check the shared options before the work starts."""
        if simulate not in ("leanstep", "all", "none"):
            raise BadInput(f"--simulate: expected leanstep, all or none, got {simulate!r}")
        target = one_device(device or RECORDED_ON, "--device")
        judged = device if device is not None and devices is None and device_gb is None else devices
        capacities = parse_devices(judged, device_gb, reserve_gb)
        check_writable(json, "--json")
        check_writable(html, "--html")
        return cls(kind, target, device is not None, capacities, reserve_gb, json, html, console(json))

    def rehearse(self, jobs: list[Row], ranks: int = 1) -> list[Planned]:
        return rehearse_jobs(jobs, self.device, ranks, self.timed)

    def memory(self, job: Planned) -> Row:
        """The peak of a job and, per device, whether it fits and, if not, what takes most of it."""
        peak = replay(job.events, job.storages)
        held = job.at_peak(peak)
        parts: Counter[str] = Counter()
        counts = Counter(_shape_text(storage) for storage in held)
        for storage in held:
            parts[_shape_text(storage)] += storage.nbytes
        shown = {
            f"{name} x {counts[name]}" if counts[name] > 1 else name: n for name, n in parts.most_common(6)
        }
        name, most = next(iter(shown.items()))
        row = {
            "input_bytes": job.input_bytes,
            "simulated_bytes": peak.allocated,
            "reserved_bytes": peak.reserved,
            "largest_buffer_bytes": max(storage.nbytes for storage in held),
            "parts": shown,
            "tflop": job.flops / 1e12,
            "devices": self.judge(job, peak, f"{name} {most / GIB:.2f} GiB"),
        }
        return {**row, "step_ms": job.step_s * 1e3} if self.timed else row

    def judge(self, job: Planned, peak: Replay, largest: str) -> dict[str, Row]:
        verdicts: dict[str, Row] = {}
        for name, capacity in self.capacities.items():
            # An allocator that is short of room gives back what it only caches.
            fits = peak.reserved <= capacity or (peak.allocated <= capacity and job.fits(capacity))
            why = None
            if not fits:
                missing = peak.reserved - capacity
                why = (
                    f"needs {peak.reserved / GIB:.2f} GiB of {capacity / GIB:.2f} free, "
                    f"{missing / GIB:.2f} too many; most of it: {largest}"
                )
            verdicts[name] = {"fits": fits, "why": why}
        return verdicts

    def finish(self, result: Row, title: str, columns: Columns) -> bool:
        """Write the result and print its rows; false when standard output carries only the JSON object."""
        from leanstep.measure.timing import environment

        reserve = round(self.reserve_gb * GIB)
        head = {"plan": self.kind, "predicted": True, "rehearsed_on": self.device.key}
        head |= {"capacities": self.capacities, "reserve_bytes": reserve}
        result = {**environment(), **head, **result}
        write_json(result, self.json)
        if self.html:
            from leanstep.report.page import add_section

            add_section(self.html, "plan", result)
        if self.json == "-":
            return False
        if self.timed:
            columns = [*columns, ("ms", lambda r: f"{r['step_ms']:.1f}")]
        self.out.print(_table(title, result["rows"], columns, self.capacities))
        self.out.print(f"predicted, as CUDA code on {self.device.name}; nothing was measured", style="dim")
        return True


def _shape_text(storage: Storage) -> str:
    return f"{list(storage.shape)} {storage.dtype}" if storage.category != "library" else "cuBLAS workspace"


def _table(title: str, rows: list[Row], columns: Columns, capacities: dict[str, int]) -> Table:
    """The rows with their figures, and yes or no under each device."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, (name, _) in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for name, capacity in capacities.items():
        table.add_column(f"{name}\n{capacity / GIB:.0f}", justify="center", no_wrap=True)
    previous = None
    for row in rows:
        marks = ["yes" if v["fits"] else "[dim]no[/dim]" for v in row["devices"].values()]
        label = columns[0][1](row)
        cells = [label if label != previous else "", *(value(row) for _, value in columns[1:])]
        table.add_row(*cells, *marks)
        previous = label
    return table


plan_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Predicted peak memory for shapes and devices not at hand: what fits, what does not, and why.\n\n"
    "Example: leanstep plan logprob --tokens 205280 --vocab 76032 --hidden 2560",
)


@plan_app.command("logprob")
def plan_logprob(
    tokens: Annotated[
        int, typer.Option(help="Rows of the micro-batch, prompts and padding included.")
    ] = 205280,
    vocab: Annotated[int, typer.Option(help="Vocabulary, over all tensor-parallel ranks.")] = 76032,
    hidden: Annotated[int, typer.Option(help="Width of the hidden states.")] = 2560,
    dtype: Annotated[
        str, typer.Option(help="Of hidden states and weight: fp32, bf16, fp16 or fp64.")
    ] = "bf16",
    chunk: Annotated[int, typer.Option(help="Rows per chunk.")] = 1024,
    response_frac: Annotated[
        str, typer.Option(help="Kept fractions of the rows, 0 .. 1.")
    ] = "1,0.5,0.25,0.1",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks that share the vocabulary.")] = 1,
    simulate: SimulateOption = "leanstep",
    devices: DeviceOption = None,
    device_gb: DeviceSizeOption = None,
    reserve_gb: ReserveOption = 1.0,
    json: JsonOption = None,
    html: HtmlOption = None,
    device: OnDeviceOption = None,
) -> None:
    """Token log-probs and entropy with gradients, every method, per device.

    Example: leanstep plan logprob --tokens 205280 --vocab 76032 --hidden 2560 --dtype fp32
    """
    check_at_least_one(tokens=tokens, vocab=vocab, hidden=hidden, chunk=chunk, tp=tp)
    fractions = parse_fractions(response_frac)
    if dtype not in DTYPES:
        raise BadInput(f"--dtype: no dtype {dtype!r}; it takes {', '.join(DTYPES)}")
    run = PlanRun.begin("logprob", device, simulate, devices, device_gb, reserve_gb, json, html)
    columns = -(-vocab // tp)
    # Plain code computes every row, whatever is kept.
    wanted = [(m, f) for m in METHODS for f in (fractions if m != "plain" else fractions[:1])]
    # A few chunks of rows tell the longest batch; their number is one that no other dimension has.
    few = next(n * chunk for n in range(8, 12) if n * chunk not in (columns, hidden))
    jobs = head_jobs(tokens, columns, hidden, dtype, chunk, wanted)
    jobs += head_jobs(few, columns, hidden, dtype, chunk, [("linear", 1.0)])
    with progress_bar(run.out, "plan logprob") as report:
        report(f"{len(jobs)} steps on a device that is not there", 0.0)
        *planned, short = run.rehearse(jobs)
    rows = [
        {
            **{"method": method, "description": METHODS[method], "response_frac": fraction},
            **{"kept_rows": shape["kept"], **run.memory(job)},
        }
        for (method, fraction), shape, job in zip(wanted, jobs, planned, strict=False)
    ]
    result = {
        "tokens": tokens,
        "vocab": vocab,
        "tensor_parallel": tp,
        "hidden": hidden,
        "dtype": dtype,
        "chunk": chunk,
        "rows": rows,
        "longest": {name: longest_batch(short, few, chunk, room) for name, room in run.capacities.items()},
    }
    title = f"T = {tokens:,} rows · V = {columns:,} · D = {hidden:,} · {dtype} · chunks of {chunk}"
    columns_shown = (
        ("method", lambda r: r["method"]),
        ("kept", lambda r: f"{r['response_frac']:g}"),
        ("rows", lambda r: f"{r['kept_rows']:,}"),
        ("largest buffer", lambda r: _gib(r["largest_buffer_bytes"])),
        ("peak", lambda r: _gib(r["simulated_bytes"])),
        ("reserved", lambda r: _gib(r["reserved_bytes"])),
        ("TFLOP", lambda r: f"{r['tflop']:.1f}" if r["tflop"] else "-"),
    )
    if not run.finish(result, title, columns_shown):
        return
    out = run.out
    for method, description in METHODS.items():
        out.print(f"  {method}: {description}", style="dim", markup=False)
    for row in rows:
        for name, verdict in row["devices"].items():
            if not verdict["fits"] and row["response_frac"] == fractions[0]:
                out.print(
                    f"  {row['method']} at {row['response_frac']:g}, {name}: {verdict['why']}", markup=False
                )
                break
    out.print("longest micro-batch with linear at fraction 1:", style="bold")
    for name, length in result["longest"].items():
        text = f"{length:,} rows" if length else "none: the weight and its gradient alone do not fit"
        out.print(f"  {name}: {text}", markup=False)
    out.print("GiB, inputs and the cuBLAS workspace included; logits and sums in fp32.", style="dim")


@plan_app.command("muon")
def plan_muon(
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 12,
    dim: Annotated[int, typer.Option(help="Model width.")] = 768,
    mlp_ratio: Annotated[float, typer.Option(help="MLP hidden width over model width.")] = 4.0,
    vocab: Annotated[int, typer.Option(help="Rows of the embedding and of the head (both Adam).")] = 50304,
    dtype: Annotated[str, typer.Option(help="Of weights and gradients: fp32 or bf16.")] = "bf16",
    world: Annotated[str, typer.Option(help="Numbers of ranks to plan for.")] = "1,2,4,8",
    simulate: SimulateOption = "leanstep",
    devices: DeviceOption = None,
    device_gb: DeviceSizeOption = None,
    reserve_gb: ReserveOption = 1.0,
    json: JsonOption = None,
    html: HtmlOption = None,
    device: OnDeviceOption = None,
) -> None:
    """Optimizer state and scratch of NorMuon beside AdamW, replicated and sharded over ranks.

    Example: leanstep plan muon --layers 36 --dim 4096 --vocab 151936 --world 1,8,64
    """
    check_at_least_one(layers=layers, dim=dim, vocab=vocab)
    hidden = round(dim * mlp_ratio)
    if hidden < 1:
        raise BadInput(f"--mlp-ratio: expected a positive ratio, got {mlp_ratio}")
    if dtype not in ("fp32", "bf16"):
        raise BadInput(f"--dtype: no dtype {dtype!r}; it takes fp32, bf16")
    worlds = parse_integers(world, "--world")
    run = PlanRun.begin("muon", device, simulate, devices, device_gb, reserve_gb, json, html)
    shape = {"what": "optimizer", "layers": layers, "dim": dim, "hidden": hidden, "vocab": vocab}
    rows = []
    for size in worlds:
        kinds = [(o, s) for o in ("adamw", "normuon") for s in (SHARDINGS if size > 1 else ("replicated",))]
        jobs = [{**shape, "optimizer": o, "sharding": s, "dtype": dtype} for o, s in kinds]
        for (optimizer, sharding), job in zip(kinds, run.rehearse(jobs, size), strict=True):
            found = run.memory(job)
            found["parts"] = job.by_purpose()
            rows.append({"optimizer": optimizer, "sharding": sharding, "world": size, **found})
    result = {
        "layers": layers,
        "dim": dim,
        "mlp_hidden": hidden,
        "vocab": vocab,
        "dtype": dtype,
        "rows": rows,
    }
    columns_shown = (
        ("optimizer", lambda r: r["optimizer"]),
        ("ranks", lambda r: str(r["world"])),
        ("sharding", lambda r: r["sharding"]),
        *((name, lambda r, name=name: _gib(r["parts"][name])) for name in rows[0]["parts"]),
        ("peak", lambda r: _gib(r["simulated_bytes"])),
    )
    title = f"{layers} layers · width {dim:,} · MLP {hidden:,} · vocabulary {vocab:,} · {dtype}"
    if run.finish(result, title, columns_shown):
        for name, description in SHARDINGS.items():
            run.out.print(f"  {name}: {description}", style="dim", markup=False)
        run.out.print("GiB on rank 0 while the optimizer steps, without activations.", style="dim")


@plan_app.command("lens")
def plan_lens(
    samples: Annotated[int, typer.Option(help="Sequences per micro-batch.")] = 8,
    variants: Annotated[int, typer.Option(help="Working contexts per sequence.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens per sequence.")] = 8192,
    width: Annotated[int | None, typer.Option(help="Entries per context (default: tokens / 8).")] = None,
    pairs: Annotated[int, typer.Option(help="Preference pairs per sequence.")] = 6,
    simulate: SimulateOption = "leanstep",
    devices: DeviceOption = None,
    device_gb: DeviceSizeOption = None,
    reserve_gb: ReserveOption = 1.0,
    json: JsonOption = None,
    html: HtmlOption = None,
    device: OnDeviceOption = None,
) -> None:
    """The controller objective: look-up tables and pair tensors.

    Example: leanstep plan lens --samples 32 --variants 12 --tokens 32768
    """
    width = max(tokens // 8, 1) if width is None else width
    check_at_least_one(samples=samples, variants=variants, tokens=tokens, width=width, pairs=pairs)
    if width > tokens:
        raise BadInput(f"--width: expected at most --tokens {tokens}, got {width}")
    run = PlanRun.begin("lens", device, simulate, devices, device_gb, reserve_gb, json, html)
    shape = {"samples": samples, "variants": variants, "tokens": tokens, "width": width, "pairs": pairs}
    planned = run.rehearse([{"what": "objective", "method": m, **shape} for m in LENS_METHODS])
    rows = [
        {"method": method, "description": description, **run.memory(job)}
        for (method, description), job in zip(LENS_METHODS.items(), planned, strict=True)
    ]
    columns_shown = (
        ("method", lambda r: r["method"]),
        ("inputs MiB", lambda r: f"{r['input_bytes'] / 2**20:.1f}"),
        ("peak MiB", lambda r: f"{r['simulated_bytes'] / 2**20:.1f}"),
    )
    title = f"{samples} x {variants} contexts · {tokens:,} tokens · {width:,} entries · {pairs} pairs each"
    if run.finish({**shape, "rows": rows}, title, columns_shown):
        for row in rows:
            run.out.print(f"  {row['method']}: {row['description']}", style="dim", markup=False)


def _plan_objective(name: str) -> Callable[..., None]:
    def plan(
        settings: SetOption = None,
        devices: DeviceOption = None,
        device_gb: DeviceSizeOption = None,
        reserve_gb: ReserveOption = 1.0,
        json: JsonOption = None,
        html: HtmlOption = None,
        device: OnDeviceOption = None,
    ) -> None:
        run = PlanRun.begin(name, device, "leanstep", devices, device_gb, reserve_gb, json, html)
        params, planned = case_jobs(name, settings, run.device, run.timed)
        rows = [{"method": m, "description": note, **run.memory(job)} for m, note, job in planned]
        columns_shown = (
            ("method", lambda r: r["method"]),
            ("largest buffer", lambda r: _gib(r["largest_buffer_bytes"])),
            ("peak", lambda r: _gib(r["simulated_bytes"])),
            ("reserved", lambda r: _gib(r["reserved_bytes"])),
            ("TFLOP", lambda r: f"{r['tflop']:.1f}"),
        )
        title = " · ".join(f"{key} {value}" for key, value in params.items())
        if run.finish({**params, "rows": rows}, title, columns_shown):
            for row in rows:
                run.out.print(f"  {row['method']}: {row['description']}", style="dim", markup=False)

    return plan


for _name, _text in OBJECTIVES.items():
    _example = f"leanstep plan {_name} --set tokens=4096,vocab=151936 --device h100"
    plan_app.command(_name, help=f"{_text}\n\nExample: {_example}")(_plan_objective(_name))


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"
