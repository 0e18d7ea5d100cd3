"""`leanstep plan logprob|muon|lens`: the peak of a step that is not at hand, and which devices hold it.

Two figures beside each other: a closed formula, and the real code run on tensors that hold no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from leanstep.commands import BadInput
from leanstep.commands.plan_workloads import GIB, device_table, judge, parse_devices
from leanstep.commands.terminal import HtmlOption, JsonOption, check_writable, console, write_json

DeviceOption = Annotated[
    str | None, typer.Option("--devices", help="Only these: h100,h200,a100-40,a100-80,rtx4090,b200.")
]
DeviceSizeOption = Annotated[
    float | None, typer.Option("--device-gb", help="A device of your own with this many GiB.")
]
OnDeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Rehearse the CUDA code for this device (h100, ...) instead of formulas."),
]
ReserveOption = Annotated[
    float, typer.Option("--reserve-gb", help="GiB that the rest (model, optimizer, context) already holds.")
]
SimulateOption = Annotated[
    str, typer.Option(help="Run the real code on fake tensors for: leanstep (default), all or none.")
]

Row = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], str]]]


@dataclass(frozen=True)
class PlanRun:
    """One plan under way: the devices it is judged by and where its results go."""

    kind: str
    capacities: dict[str, int]
    reserve_gb: float
    json: str | None
    html: str | None
    out: Console

    @classmethod
    def begin(
        cls,
        kind: str,
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
        capacities = parse_devices(devices, device_gb, reserve_gb)
        check_writable(json, "--json")
        check_writable(html, "--html")
        return cls(kind, capacities, reserve_gb, json, html, console(json))

    def judge(self, total_bytes: int, parts: dict[str, int]) -> dict[str, Row]:
        """Per device: whether the total fits and, if not, which part takes most."""
        name, part = max(parts.items(), key=lambda item: item[1])
        return judge(total_bytes, self.capacities, f"{name} {part / GIB:.2f} GiB")

    def finish(self, result: Row, title: str, columns: Columns) -> bool:
        """Write the result and print its rows; false when standard output carries only the JSON object."""
        from leanstep.measure.timing import environment

        reserve = round(self.reserve_gb * GIB)
        head = {"plan": self.kind, "capacities": self.capacities, "reserve_bytes": reserve}
        result = {**environment(), **head, **result}
        write_json(result, self.json)
        if self.html:
            from leanstep.report.page import add_section

            add_section(self.html, "plan", result)
        if self.json == "-":
            return False
        self.out.print(device_table(title, result["rows"], columns, self.capacities))
        return True


plan_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Predicted peak memory for shapes and devices not at hand: what fits, what does not, and why.\n\n"
    "Example: leanstep plan logprob --tokens 205280 --vocab 76032 --hidden 2560",
)

DTYPES = ("fp32", "bf16", "fp16", "fp64")


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
    _at_least_one(tokens=tokens, vocab=vocab, hidden=hidden, chunk=chunk, tp=tp)
    fractions = _fractions(response_frac)
    if dtype not in DTYPES:
        raise BadInput(f"--dtype: no dtype {dtype!r}; it takes {', '.join(DTYPES)}")
    if device is not None:
        shape = {"tokens": tokens, "vocab": -(-vocab // tp), "hidden": hidden, "dtype": dtype}
        settings = [{**shape, "response_frac": fraction} for fraction in fractions]
        methods = ("reference", "gather-after", "leanstep")
        _on_device("logprob", "logprob-linear", methods, settings, device, json, html)
        return
    run = PlanRun.begin("logprob", simulate, devices, device_gb, reserve_gb, json, html)

    from leanstep.commands.plan_workloads import HeadShape, longest_batch, simulate_head
    from leanstep.commands.terminal import DTYPES as TORCH_DTYPES
    from leanstep.commands.terminal import progress_bar
    from leanstep.logprob.engine.peak_memory import DESCRIPTIONS, METHODS, Method, plan_memory

    torch_dtype = TORCH_DTYPES[dtype]
    columns = -(-vocab // tp)
    wanted = {"none": (), "all": METHODS, "leanstep": ("plain", "gathered-loss", "linear")}[simulate]
    jobs: list[tuple[Method, float]] = []
    for each in METHODS:
        # Plain code computes every row, whatever is kept.
        for fraction in fractions if each != "plain" else fractions[:1]:
            jobs.append((each, fraction))
    rows = []
    with progress_bar(run.out, "plan logprob") as report:
        for done, (method, fraction) in enumerate(jobs):
            report(f"{method} at {fraction:g}", done / len(jobs))
            options: Any = {"method": method, "dtype": torch_dtype, "chunk": chunk, "kernels": True}
            formula = plan_memory(tokens, columns, hidden, fraction, **options)
            simulated = None
            if method in wanted:
                shape = HeadShape(tokens, formula.kept_rows, columns, hidden, torch_dtype, chunk)
                simulated = simulate_head(method, shape)
            total = formula.total_bytes
            if simulated is not None:
                total = simulated.input_bytes + simulated.peak_bytes
            rows.append(
                {
                    "method": method,
                    "description": DESCRIPTIONS[method],
                    "response_frac": fraction,
                    "kept_rows": formula.kept_rows,
                    "input_bytes": formula.input_bytes,
                    "formula_bytes": formula.total_bytes,
                    "simulated_bytes": None if simulated is None else total,
                    "largest_buffer_bytes": _largest_buffer(formula, simulated),
                    "parts": formula.parts,
                    "tflop": formula.flops / 1e12,
                    "devices": run.judge(total, formula.parts),
                }
            )
    result = {
        "tokens": tokens,
        "vocab": vocab,
        "tensor_parallel": tp,
        "hidden": hidden,
        "dtype": dtype,
        "chunk": chunk,
        "rows": rows,
        "longest": {
            name: longest_batch(capacity, columns, hidden, torch_dtype, chunk, "linear" in wanted)
            for name, capacity in run.capacities.items()
        },
    }
    title = f"T = {tokens:,} rows · V = {columns:,} · D = {hidden:,} · {dtype} · chunks of {chunk}"
    columns_shown = (
        ("method", lambda r: r["method"]),
        ("kept", lambda r: f"{r['response_frac']:g}"),
        ("rows", lambda r: f"{r['kept_rows']:,}"),
        ("largest buffer", lambda r: _gib(r["largest_buffer_bytes"])),
        ("formula", lambda r: _gib(r["formula_bytes"])),
        ("simulated", lambda r: _gib(r["simulated_bytes"])),
        ("TFLOP", lambda r: f"{r['tflop']:.1f}" if r["tflop"] else "-"),
    )
    if not run.finish(result, title, columns_shown):
        return
    out = run.out
    for method in METHODS:
        out.print(f"  {method}: {DESCRIPTIONS[method]}", style="dim", markup=False)
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
    out.print("GiB, inputs included; logits and sums in fp32.", style="dim")


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
    _at_least_one(layers=layers, dim=dim, vocab=vocab)
    hidden = round(dim * mlp_ratio)
    if hidden < 1:
        raise BadInput(f"--mlp-ratio: expected a positive ratio, got {mlp_ratio}")
    if dtype not in ("fp32", "bf16"):
        raise BadInput(f"--dtype: no dtype {dtype!r}; it takes fp32, bf16")
    worlds = _integers(world, "--world")
    if device is not None:
        shape = {"num_square": 4 * layers, "num_wide": 2 * layers, "dim": dim, "ratio": round(mlp_ratio)}
        settings = [{**shape, "dtype": dtype}]
        _on_device("muon", "muon-step", ("reference", "leanstep"), settings, device, json, html)
        return
    run = PlanRun.begin("muon", simulate, devices, device_gb, reserve_gb, json, html)

    from leanstep.commands.plan_workloads import SHARDINGS, plan_optimizer, simulate_scratch
    from leanstep.commands.terminal import DTYPES as TORCH_DTYPES

    torch_dtype = TORCH_DTYPES[dtype]
    scratch = None if simulate == "none" else simulate_scratch(dim, hidden, torch_dtype)
    rows = []
    for size in worlds:
        for optimizer in ("adamw", "normuon"):
            for sharding in SHARDINGS if size > 1 else SHARDINGS[:1]:
                parts = plan_optimizer(
                    optimizer, sharding, size, layers, dim, hidden, vocab, torch_dtype, scratch
                )
                total = sum(parts.values())
                rows.append(
                    {
                        "optimizer": optimizer,
                        "sharding": sharding,
                        "world": size,
                        "parts": parts,
                        "formula_bytes": total,
                        "devices": run.judge(total, parts),
                    }
                )
    result = {
        "layers": layers,
        "dim": dim,
        "mlp_hidden": hidden,
        "vocab": vocab,
        "dtype": dtype,
        "scratch_simulated_bytes": scratch,
        "rows": rows,
    }
    names = list(rows[0]["parts"])
    columns_shown = (
        ("optimizer", lambda r: r["optimizer"]),
        ("ranks", lambda r: str(r["world"])),
        ("sharding", lambda r: r["sharding"]),
        *((name, lambda r, name=name: _gib(r["parts"][name])) for name in names),
        ("sum", lambda r: _gib(r["formula_bytes"])),
    )
    title = f"{layers} layers · width {dim:,} · MLP {hidden:,} · vocabulary {vocab:,} · {dtype}"
    if run.finish(result, title, columns_shown):
        run.out.print(
            "GiB per rank, without activations. Scratch comes from the real polar code on fake tensors.",
            style="dim",
        )


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
    _at_least_one(samples=samples, variants=variants, tokens=tokens, width=width, pairs=pairs)
    if width > tokens:
        raise BadInput(f"--width: expected at most --tokens {tokens}, got {width}")
    if device is not None:
        shape = {"samples": samples, "variants": variants, "tokens": tokens, "max_pairs": pairs}
        _on_device("lens", "lens-loss", ("eager", "leanstep"), [shape], device, json, html)
        return
    run = PlanRun.begin("lens", simulate, devices, device_gb, reserve_gb, json, html)

    from leanstep.commands.plan_workloads import LENS_METHODS, plan_objective, simulate_objective

    rows = []
    for method in LENS_METHODS:
        parts = plan_objective(method, samples, variants, tokens, width, pairs)
        # Tables and pair tensors are not alive at the same time.
        total, simulated = parts["inputs"] + max(parts["tables"], parts["pair tensors"]), None
        if simulate != "none":
            peak = simulate_objective(method, samples, variants, tokens, width, pairs)
            simulated = peak.input_bytes + peak.peak_bytes
        rows.append(
            {
                "method": method,
                "description": LENS_METHODS[method],
                "parts": parts,
                "formula_bytes": total,
                "simulated_bytes": simulated,
                "devices": run.judge(max(total, simulated or 0), parts),
            }
        )
    result = {
        "samples": samples,
        "variants": variants,
        "tokens": tokens,
        "width": width,
        "pairs": pairs,
        "rows": rows,
    }
    columns_shown = (
        ("method", lambda r: r["method"]),
        ("formula MiB", lambda r: f"{r['formula_bytes'] / 2**20:.1f}"),
        (
            "simulated MiB",
            lambda r: "-" if r["simulated_bytes"] is None else f"{r['simulated_bytes'] / 2**20:.1f}",
        ),
    )
    title = f"{samples} x {variants} contexts · {tokens:,} tokens · {width:,} entries · {pairs} pairs each"
    if run.finish(result, title, columns_shown):
        for row in rows:
            run.out.print(f"  {row['method']}: {row['description']}", style="dim", markup=False)


def _on_device(
    kind: str,
    case: str,
    methods: tuple[str, ...],
    settings: list[Row],
    device: str,
    json: str | None,
    html: str | None,
) -> None:
    from leanstep.commands.rehearse import plan_on_device

    check_writable(json, "--json")
    check_writable(html, "--html")
    plan_on_device(kind, case, methods, settings, device, json, html)


def _largest_buffer(formula: Any, simulated: Any) -> int:
    """One allocation: simulated where possible; the formulas' parts say how many buffers they hold."""
    if simulated is not None:
        inputs = simulated.input_bytes if formula.method == "gathered-loss" else 0
        return max(simulated.largest_bytes, inputs)
    name, value = formula.largest_part
    count = name.rpartition(" x ")[2]
    return value // int(count) if count.isdigit() else value


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise BadInput(f"--{name.replace('_', '-')}: expected at least 1, got {value}")


def _fractions(text: str) -> list[float]:
    try:
        values = [float(item) for item in text.split(",")]
    except ValueError:
        raise BadInput(f"--response-frac: expected numbers separated by commas, got {text!r}") from None
    for value in values:
        if not 0 <= value <= 1:
            raise BadInput(f"--response-frac: expected fractions between 0 and 1, got {value:g}")
    return values


def _integers(text: str, argument: str) -> list[int]:
    try:
        values = [int(item) for item in text.split(",")]
    except ValueError:
        raise BadInput(f"{argument}: expected whole numbers separated by commas, got {text!r}") from None
    for value in values:
        if value < 1:
            raise BadInput(f"{argument}: expected at least 1, got {value}")
    return values
