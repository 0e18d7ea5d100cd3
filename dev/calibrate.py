"""The time model of `leanstep rehearse` against kernels measured on real devices.

    python dev/calibrate.py                  error of the committed constants, and with one trace left out
    python dev/calibrate.py --fit            fit again on all tables and print the constants
    python dev/calibrate.py --worst 20       the rows that are furthest off
    python dev/calibrate.py --markdown       an error table by kind of kernel
    python dev/calibrate.py --extract T.json.gz   the table of one trace of torch's profiler

Rows of a table are kernels with their shapes (dev/traces). The fit is a coordinate search over a dozen
constants a vendor; each fold fits on the other traces of that vendor and is judged on the one left out.
A fold's starting point is one set of constants for both vendors, fitted on all the other traces.
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "dev")]

from trace_kernels import COLUMNS, extract  # noqa: E402

from leanstep.rehearse.devices import DEVICES, Device  # noqa: E402
from leanstep.rehearse.events import Kernel  # noqa: E402
from leanstep.rehearse.kernel_costs import GEMM, Shape, kernels  # noqa: E402
from leanstep.rehearse.time_model import RATES, Rates, seconds  # noqa: E402

DTYPES = {
    "float": (4, "float32"),
    "c10::BFloat16": (2, "bfloat16"),
    "c10::Half": (2, "float16"),
    "double": (8, "float64"),
    "long int": (8, "int64"),
    "long": (8, "int64"),
    "int": (4, "int32"),
    "bool": (1, "bool"),
    "unsigned char": (1, "uint8"),
    "c10::Float8_e4m3fn": (1, "float8_e4m3fn"),
    "c10::Float8_e5m2": (1, "float8_e5m2"),
}
# Where a fold starts, and what it keeps when its traces say nothing. Latencies and starts are of the order
# that any discrete GPU has; shares are round numbers.
START = Rates(
    start_us=2.5,
    stream=0.8,
    issue=1.4,
    wait_us=0.6,
    product=0.9,
    ramp=12.0,
    product_start_us=4.0,
    single=0.8,
    conv=0.3,
    attention=0.5,
)
# Never in the tables: kept at the starting point in every fit. Convolutions on NVIDIA: the tables have one
# row, a patch convolution that ran once, for which the library chose a slow way; 0.6 is assumed instead.
FIXED = {"single"}
ASSUMED = {"nvidia": {"conv": 0.6}}
GRID = [0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 0.97, 1.03, 1.07, 1.15, 1.25, 1.4, 1.7, 2.0]


class Row(NamedTuple):
    trace: str
    device: Device
    kind: str
    op: str
    shapes: str
    kernels: tuple[Kernel, ...]
    count: int
    measured_us: float


# What a trace calls a device, the longer marks first.
MARKS = {
    "MI300": "mi300x",
    "H100 PCIe": "h100-pcie",
    "H100": "h100",
    "H200": "h200",
    "GB200": "gb200",
    "B200": "b200",
    "A100-SXM4-40GB": "a100-40",
    "A100-PCIE-40GB": "a100-40",
    "A100-PG509": "a100-40",
    "A100": "a100",
    "V100": "v100",
    "RTX 4090": "4090",
    "RTX 3090": "3090",
    "A10G": "a10g",
    "Tesla T4": "t4",
}


def device_of(name: str) -> Device | None:
    key = next((key for mark, key in MARKS.items() if mark in name), None)
    return DEVICES[key] if key is not None else None


def contiguous(size: Iterable[int], width: int, dtype: str) -> Shape:
    size = tuple(size)
    return Shape(size, tuple(math.prod(size[i + 1 :]) for i in range(len(size))), width, dtype)


def shapes_of(dims: list, dtypes: list, strides: list) -> list[Shape]:
    """Tensors of a row's arguments; what the tables write as a scalar or nothing is none."""
    tensors = []
    for i, dim in enumerate(dims):
        dtype = dtypes[i] if i < len(dtypes) else ""
        if dtype == "TensorList":
            # The tables do not give the dtype of a list's tensors; in these traces it is the model's.
            for j, size in enumerate(dim):
                stride = tuple(strides[i][j]) if strides[i] else ()
                tensors.append(
                    Shape(tuple(size), stride, 2, "bfloat16")
                    if len(stride) == len(size)
                    else contiguous(size, 2, "bfloat16")
                )
        elif dtype in DTYPES:
            width, name = DTYPES[dtype]
            stride = tuple(strides[i]) if i < len(strides) else ()
            if len(stride) == len(dim):
                tensors.append(Shape(tuple(dim), stride, width, name))
            else:
                tensors.append(contiguous(dim, width, name))
    return tensors


def outputs_of(name: str, ins: list[Shape]) -> list[Shape]:
    """What the operator writes, as far as its arguments tell."""
    first = ins[0]
    if name in GEMM or "attention" in name or "convolution" in name:
        return []
    if name in ("sum", "mean", "argmax", "all", "any"):
        # Tables have no `dim`: a mean over the last dimension of a 3-d tensor, a full sum otherwise.
        rows = math.prod(first.size[:-1]) if name == "mean" and len(first.size) == 3 else 1
        return [contiguous((rows,), first.width, first.dtype)]
    if name == "cat":
        return [contiguous((sum(t.numel for t in ins),), first.width, first.dtype)]
    if name in ("index_select", "index", "embedding"):
        rows = next((t.numel for t in ins[1:] if t.dtype.startswith("int")), 1)
        return [contiguous((rows, math.prod(first.size[1:])), first.width, first.dtype)]
    if name in ("native_layer_norm", "_fused_rms_norm"):
        # One statistic a row. Where no weight tells the row, the test that was traced normalises all but
        # the batch (layer norm) or all but batch and channels (rms norm): its backward rows show it.
        num_kept = len(first.size) - 1 if len(first.size) != 4 else 1 if name == "native_layer_norm" else 2
        return [first, contiguous(first.size[:num_kept], 4, "float32")]
    if "_norm" in name or "softmax" in name:
        return [first]
    size = first.size
    for t in ins[1:]:
        wide = max(len(size), len(t.size))
        a, b = (1,) * (wide - len(size)) + size, (1,) * (wide - len(t.size)) + t.size
        if all(x == y or 1 in (x, y) for x, y in zip(a, b, strict=True)):
            size = tuple(max(x, y) for x, y in zip(a, b, strict=True))
    same = next((t for t in ins if t.size == size), None)
    if name in ("eq", "ne", "lt", "gt", "le", "ge"):
        return [contiguous(size, 1, "bool")]
    if same is not None:
        order = sorted(range(len(size)), key=lambda i: (-same.stride[i], i))
        stride, step = [0] * len(size), 1
        for i in reversed(order):  # a new tensor keeps the order of its operand, without its gaps
            stride[i], step = step, step * size[i]
        return [same if name.endswith("_") else Shape(size, tuple(stride), same.width, same.dtype)]
    return [contiguous(size, first.width, first.dtype)]


def kernels_of(row: dict[str, str], ins: list[Shape]) -> list[Kernel]:
    name = row["op"].removeprefix("aten::")
    tf32 = "tf32" in row["kernels"] or "1688" in row["kernels"]
    info = {"tf32": tf32, "conv_tf32": tf32, "traced": True}
    if name == "copy_":
        if "HtoD" in row["kernels"] or "DtoH" in row["kernels"] or len(ins) < 2:
            return []  # over the bus, or from a tensor whose type the table does not know
        return kernels("copy_", [ins[1]], [ins[0]], info)
    if "attention" in name:
        # The decoder's trace checks that its mask is all ones and then asks for a causal kernel.
        return kernels(name, ins, [], {"layout": "bthd", "causal": "Qwen" in row["trace"]})
    if name.endswith("_convolution"):
        x, w = ins[0], ins[1]
        # No output size in the tables: patches when the filter is large; a stride of 2 where the network
        # doubles its channels (the backward rows of the same trace show it) and in its first layer.
        stride = w.size[-1] if w.size[-1] >= 14 else 2 if w.size[0] == 2 * w.size[1] or w.size[-1] == 7 else 1
        size = (x.size[0], w.size[0], *(n // stride for n in x.size[2:]))
        return kernels(name, ins, [], {**info, "out_size": size})
    if name.endswith("_") or name in ("mse_loss_backward",):
        outs = [ins[0] if name.endswith("_") else ins[-1]]
        reads = [] if name in ("fill_", "normal_", "zero_", "uniform_") else ins
        return kernels(name, reads, outs, info)
    if name == "mul" and len(ins) > 1 and ins[-1].size == ins[0].size and '"double"' in row["dtypes"]:
        return kernels(name, ins[:1], ins[-1:], info)  # mul(x, number, out=y)
    outs = outputs_of(name, ins)
    if name == "max_pool2d_with_indices":
        size = (*ins[0].size[:2], *(n // 2 for n in ins[0].size[2:]))
        outs = [contiguous(size, ins[0].width, ins[0].dtype), contiguous(size, 8, "int64")]
    return kernels(name, ins, outs, info)


def read(paths: Sequence[Path]) -> list[Row]:
    """Rows that the model can be asked about: ATen calls with shapes, on a device we know.

    A queued kernel of ROCm begins in its trace where the one before it ends, so that its duration holds the 3
    us of its own dispatch; or it begins after those 3 us. CUDA's never holds them. On AMD the gap is counted.
    """
    rows = []
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                device = device_of(row["device"])
                known = row["op"].startswith("aten::") and row["dims"] not in ("", "null")
                if device is None or not known or row["op"].endswith("_local_scalar_dense"):
                    continue
                dims, dtypes, strides = (json.loads(row[c]) for c in ("dims", "dtypes", "strides"))
                ins = shapes_of(dims, dtypes, strides)
                asked = kernels_of(row, ins) if ins else []
                if asked:
                    rows.append(
                        Row(
                            path.stem,
                            device,
                            "copy" if row["op"] == "aten::copy_" else asked[0].kind,
                            row["op"].removeprefix("aten::"),
                            row["dims"],
                            tuple(asked),
                            int(row["count"]),
                            float(row["queued_us" if device.vendor == "amd" else "median_us"]),
                        )
                    )
    return rows


def predicted_us(row: Row, rates: Rates) -> float:
    return 1e6 * sum(seconds(kernel, row.device, rates) for kernel in row.kernels)


def loss(rows: Sequence[Row], rates: Rates) -> float:
    """Mean of the log ratio's size and square, bounded: single odd rows do not steer."""
    total = weight = 0.0
    for row in rows:
        w = 1.0 + 0.5 * math.log1p(row.measured_us * row.count / 100)
        away = min(1.2, abs(math.log(predicted_us(row, rates) / row.measured_us)))
        total += w * (0.3 * away + away * away)
        weight += w
    return total / max(weight, 1e-9)


def fit(rows: Sequence[Row], start: Rates = START, rounds: int = 6) -> Rates:
    """Coordinate search: each constant over a grid of factors, until nothing gets better.

    A small pull towards the starting point keeps constants there if the rows say little about them.
    """
    home = asdict(start)
    # A constant that is assumed for a vendor takes nothing from its rows, not for the other vendor either.
    rows = [row for row in rows if row.kind not in ASSUMED.get(row.device.vendor, {})]

    def price(rates: Rates) -> float:
        pull = sum(abs(math.log(value / home[name])) for name, value in asdict(rates).items())
        return loss(rows, rates) + 0.004 * pull

    best, least = start, price(start)
    for _ in range(rounds):
        before = least
        for name in home:
            if name in FIXED:
                continue
            for factor in GRID:
                value = getattr(best, name) * factor
                if name in ("stream", "product") and value > 1.1:
                    continue
                tried = replace(best, **{name: value})
                cost = price(tried)
                if cost < least - 1e-6:
                    best, least = tried, cost
        if before - least < 1e-4:
            break
    return best


class Error(NamedTuple):
    """Of a class: rows, median of predicted / measured, factors that 50% and 90% of its rows stay within."""

    rows: int
    ratio: float
    median: float
    p90: float


def error_of(ratios: Sequence[float]) -> Error:
    away = sorted(abs(math.log(r)) for r in ratios)
    p90 = away[min(len(away) - 1, int(0.9 * len(away)))]
    return Error(len(away), statistics.median(ratios), math.exp(statistics.median(away)), math.exp(p90))


def held_out(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """(row, predicted / measured) with constants that were fitted without the row's trace."""
    judged = []
    for trace in dict.fromkeys(row.trace for row in rows):
        mine = [row for row in rows if row.trace == trace]
        others = [r for r in rows if r.trace != trace and r.device.vendor == mine[0].device.vendor]
        # Both vendors' other traces first: what this vendor's say nothing about comes from there.
        home = fit([r for r in rows if r.trace != trace])
        rates = fit(others, home) if others else home
        rates = replace(rates, **ASSUMED.get(mine[0].device.vendor, {}))
        judged += [(row, predicted_us(row, rates) / row.measured_us) for row in mine]
    return judged


def by_class(judged: Sequence[tuple[Row, float]]) -> dict[tuple[str, str], Error]:
    groups = collections.defaultdict(list)
    for row, ratio in judged:
        groups[row.device.vendor, row.kind].append(ratio)
        groups[row.device.vendor, "all"].append(ratio)
    return {key: error_of(ratios) for key, ratios in sorted(groups.items())}


def table(errors: dict[tuple[str, str], Error], markdown: bool) -> str:
    form = "| {} | {} | {} | {} | {} | {} |" if markdown else "{:8s} {:12s} {:>5} {:>8} {:>8} {:>8}"
    lines = [form.format("vendor", "class", "rows", "ratio", "median", "p90")]
    if markdown:
        lines.append("|---|---|---|---|---|---|")
    for (vendor, kind), e in errors.items():
        lines.append(form.format(vendor, kind, e.rows, f"{e.ratio:.2f}", f"{e.median:.2f}", f"{e.p90:.2f}"))
    return "\n".join(lines)


def traces_total(judged: Sequence[tuple[Row, float]]) -> dict[str, float]:
    """Whole traces: predicted / measured time of all their kernels."""
    predicted, measured = collections.defaultdict(float), collections.defaultdict(float)
    for row, ratio in judged:
        measured[row.trace] += row.measured_us * row.count
        predicted[row.trace] += ratio * row.measured_us * row.count
    return {trace: predicted[trace] / measured[trace] for trace in measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=sorted((ROOT / "dev/traces").glob("*.csv")))
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--worst", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--extract", type=Path, metavar="TRACE")
    options = parser.parse_args()
    if options.extract:
        writer = csv.DictWriter(sys.stdout, COLUMNS)
        writer.writeheader()
        writer.writerows(extract(options.extract))
        return
    rows = read(options.paths)
    if options.fit:
        home = fit(rows)
        print("both:", ", ".join(f"{name}={value:.3g}" for name, value in asdict(home).items()))
        for vendor in sorted({row.device.vendor for row in rows}):
            rates = fit([row for row in rows if row.device.vendor == vendor], home)
            rates = replace(rates, **ASSUMED.get(vendor, {}))
            print(f'"{vendor}": Rates(')
            for name, value in asdict(rates).items():
                print(f"    {name}={value:.3g},")
            print("),")
        return
    fitted = [(row, predicted_us(row, RATES[row.device.vendor]) / row.measured_us) for row in rows]
    judged = held_out(rows)
    for title, pairs in (("committed constants", fitted), ("leave one trace out", judged)):
        print(f"{title}: factor predicted / measured, and what 50% and 90% of the rows stay within")
        print(table(by_class(pairs), options.markdown))
        print(", ".join(f"{trace[:28]} {ratio:.2f}" for trace, ratio in traces_total(pairs).items()), "\n")
    worst = sorted(judged, key=lambda pair: -abs(math.log(pair[1])))
    for row, ratio in worst[: options.worst]:
        print(
            f"{ratio:6.2f} {row.measured_us:9.1f} us x{row.count:4d} {row.kind:10s} {row.op:26s}"
            f" {row.shapes[:60]} {row.trace[:12]}"
        )


if __name__ == "__main__":
    main()
