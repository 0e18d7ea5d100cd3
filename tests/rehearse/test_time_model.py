"""Two clocks with hand-computed times, limits of single kernels, and the calibration's error."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from tool_loader import load_tool

from leanstep.rehearse.devices import DEVICES, device_named, devices_named
from leanstep.rehearse.events import HostWait, Kernel, Launch, Product
from leanstep.rehearse.kernel_costs import Shape, attention_kernel, kernels
from leanstep.rehearse.time_model import BLIND_WIDTHS, RATES, WIDTHS, Clock, HostCosts, seconds, time_steps

calibrate = load_tool("calibrate")
H100, A100, V100 = DEVICES["h100"], DEVICES["a100"], DEVICES["v100"]
COSTS = HostCosts(call_us=10, backward_us=5, view_us=2, launch_us=2, wait_us=12)


def launch(*kernels: Kernel, phase: str = "forward") -> Launch:
    return Launch("op", kernels, None, phase, 0)


def wait() -> HostWait:
    return HostWait("item", None, "forward", 0)


def of_length(us: float) -> Kernel:
    """A kernel that the clock prices at `us`: bytes chosen from the streaming rate."""
    rates = RATES["nvidia"]
    return Kernel("pointwise", (us - rates.start_us) * 1e-6 * H100.hbm * rates.stream)


def played(*events: Launch | HostWait) -> Clock:
    clock = Clock(H100, costs=COSTS)
    for event in events:
        clock.play(event)
    return clock


def test_a_kernel_starts_after_its_launch_and_after_the_one_before():
    clock = played(launch(of_length(50)), launch(of_length(50)))
    assert clock.host == pytest.approx(20e-6)
    assert clock.device == pytest.approx(110e-6)  # 10 to launch, then 50 + 50


def test_a_host_bound_queue_leaves_the_device_idle():
    clock = played(*[launch(of_length(4))] * 10)
    assert clock.host == pytest.approx(100e-6)
    assert clock.device == pytest.approx(104e-6)
    assert clock.idle == pytest.approx((10 + 9 * 6) * 1e-6)


def test_a_sync_sets_the_host_to_the_device_and_costs_its_own():
    clock = played(launch(of_length(100)), wait(), launch(of_length(100)))
    # 10 + 100 = 110, + 12; the next call ends at 132 and its kernel at 232.
    assert clock.host == pytest.approx(132e-6)
    assert clock.device == pytest.approx(232e-6)
    assert clock.waited == pytest.approx(100e-6)


def test_views_and_backward_calls_cost_less():
    clock = played(launch(), launch(of_length(4), phase="backward"))
    assert clock.host == pytest.approx(7e-6)


def test_a_full_queue_holds_the_host():
    clock = played(*[launch(of_length(10_000))] * (Clock.QUEUE + 3))
    # The third kernel must have ended before call number 1,025 returns.
    assert clock.host == pytest.approx(10e-6 + 3 * 10_000e-6)


def test_steps_are_timed_between_their_ends_with_host_and_device_apart():
    one = [launch(of_length(100)), launch(of_length(100)), wait()]
    timings = time_steps(one * 3, [3, 6, 9], H100, COSTS)
    steady = timings[-1]
    # call, two kernels, sync: 10 + 200 + 12
    assert steady.step_s == pytest.approx(222e-6)
    assert steady.device_s == pytest.approx(200e-6)
    assert steady.host_s == pytest.approx(32e-6)
    assert (steady.kernels, steady.calls, steady.waits) == (2, 2, 1)
    assert steady.bound_by == "device"
    assert steady.interval_s[0] < steady.step_s < steady.interval_s[1]


def test_mfu_holds_the_models_products_against_the_peak_of_their_types():
    kernel = Kernel("gemm", 1e6, 989e9, "bfloat16", (1, 4096, 4096, 4096))
    parts = {"forward": 400e9, "backward": 589e9, "recompute": 300e9, "optimizer": 200e9}
    products = [Product(part, "bfloat16", int(flops)) for part, flops in parts.items()]
    products.append(Product("forward", "float32", 67 * 10**9))
    call = replace(launch(kernel), products=tuple(products))
    first, second = time_steps([call, call], [1, 2], H100, COSTS)
    assert first.mfu(H100) == pytest.approx(2e-3 / first.step_s)  # a millisecond at each of the two peaks
    assert second.flops == first.flops
    assert (first.flops.model, first.flops.all) == (1056 * 10**9, 1556 * 10**9)
    assert replace(first, step_s=0).mfu(H100) == 0


def product(m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 1) -> Kernel:
    width = 4 if dtype in ("float32", "tf32") else 2
    name = "float32" if dtype == "tf32" else dtype

    def matrix(*size: int) -> Shape:
        lead = (size[0] * size[1],) if batch > 1 else ()
        return Shape(((batch,) if batch > 1 else ()) + size, (*lead, size[1], 1), width, name)

    call = "bmm" if batch > 1 else "mm"
    info = {"tf32": dtype == "tf32"}
    return kernels(call, [matrix(m, k), matrix(k, n)], [matrix(m, n)], info)[0]


def test_a_large_product_stays_below_the_sustained_rate_and_above_half_of_it():
    for device in (A100, H100, V100):
        kernel = product(8192, 8192, 8192, "float16")
        rate = kernel.flops / seconds(kernel, device)
        assert 0.5 * device.sustained < rate / device.flops("float16") <= 1.0


def test_an_odd_leading_dimension_slows_matrix_units_but_not_true_fp32():
    def ratio(dtype: str) -> float:
        return seconds(product(4096, 50257, 768, dtype), A100) / seconds(
            product(4096, 50304, 768, dtype), A100
        )

    assert ratio("bfloat16") > 2.5
    assert ratio("float32") == pytest.approx(50257 / 50304, rel=0.02)
    by_alignment = [
        seconds(product(4096, 4096, 4096)._replace(alignment=bytes_), H100) for bytes_ in (16, 8, 4, 2)
    ]
    assert by_alignment == sorted(by_alignment) and by_alignment[3] > 2 * by_alignment[1]


def test_long_softmax_rows_that_start_anywhere_go_element_by_element():
    def time(length: int) -> float:
        x = Shape((80_000, length), (length, 1), 2, "bfloat16")
        return seconds(kernels("_softmax", [x], [x])[0], H100)

    assert time(5185) > 1.5 * time(5184)
    assert time(1023) == pytest.approx(time(1024), rel=0.01)  # in a warp's registers: no block, no steps


def test_time_grows_with_every_size():
    base = seconds(product(4096, 4096, 4096), H100)
    sizes = [(16384, 4096, 4096), (4096, 16384, 4096), (4096, 4096, 16384)]
    for grown in (*(product(*size) for size in sizes), product(4096, 4096, 4096, batch=4)):
        assert 3.5 < seconds(grown, H100) / base < 4.5


def row_shape(rows: int, length: int) -> Shape:
    return Shape((rows, length), (length, 1), 4, "float32")


def test_a_softmax_row_that_no_block_can_keep_is_read_again():
    short, long = row_shape(64_000, 1000), row_shape(1000, 64_000)
    times = [seconds(kernels("_softmax", [x], [x])[0], A100) for x in (short, long)]
    assert times[1] > 1.2 * times[0]


def test_narrowing_copies_are_vectorised_and_widening_ones_are_not():
    wide, narrow = Shape((1 << 20,), (1,), 4, "float32"), Shape((1 << 20,), (1,), 2, "bfloat16")
    assert kernels("_to_copy", [wide], [narrow])[0].kind == "pointwise"
    assert kernels("_to_copy", [narrow], [wide])[0].kind == "cast"


def test_masked_fill_copies_its_input_first():
    x = Shape((8, 1024, 1024), (1 << 20, 1024, 1), 2, "bfloat16")
    mask = Shape((1, 1024, 1024), (1 << 20, 1024, 1), 1, "bool")
    assert [k.kind for k in kernels("masked_fill", [x, mask], [x])] == ["pointwise", "broadcast"]
    assert [k.kind for k in kernels("masked_fill_", [x, mask], [x])] == ["broadcast"]


def dense(*size: int, dtype: str = "float32", width: int = 4, order: str = "nchw") -> Shape:
    stride, step = [0] * len(size), 1
    for dim in (1, 3, 2, 0) if order == "nhwc" else reversed(range(len(size))):
        stride[dim], step = step, step * size[dim]
    return Shape(size, tuple(stride), width, dtype)


def test_a_mean_loss_is_the_loop_of_one_warp():
    logits, targets = dense(16384, 32), Shape((16384,), (1,), 8, "int64")
    mean, each = dense(), dense(16384)
    (one_warp,), (gather,) = (kernels("nll_loss_forward", [logits, targets], [out]) for out in (mean, each))
    assert (one_warp.kind, one_warp.sizes) == ("one_warp", (16384,))
    # Published for an A100: 0.6 ms for 16,384 rows.
    assert seconds(one_warp, A100) == pytest.approx(0.6e-3, rel=0.1)
    assert seconds(gather, A100) < 0.1e-3


def convolution(order: str, dtype: str, width: int, filter_size: int = 3) -> list[Kernel]:
    x = dense(8, 64, 32, 32, dtype=dtype, width=width, order=order)
    weight = dense(64, 64, filter_size, filter_size, dtype=dtype, width=width, order=order)
    return kernels("convolution", [x, weight], [x])


def test_only_matrix_units_want_channels_last():
    assert [k.kind for k in convolution("nchw", "float16", 2)] == ["conv", "strided"]
    assert [k.kind for k in convolution("nhwc", "float16", 2)] == ["conv"]
    assert [k.kind for k in convolution("nchw", "float32", 4)] == ["conv"]


def test_small_filters_in_fp32_multiply_less_than_their_flops():
    (three,), (five,) = convolution("nchw", "float32", 4), convolution("nchw", "float32", 4, filter_size=5)
    per_flop = [seconds(kernel, V100) / kernel.flops for kernel in (three, five)]
    assert per_flop[0] < 0.8 * per_flop[1]


def test_batch_norm_of_a_library_is_priced_by_its_bytes():
    half = dense(256, 64, 56, 56, dtype="float16", width=2)
    (kernel,) = kernels("native_batch_norm", [half], [half])
    assert seconds(kernel, A100) == pytest.approx(
        3 * half.nbytes / (A100.hbm * RATES["nvidia"].stream), rel=0.05
    )
    bf16 = half._replace(dtype="bfloat16")
    (own,) = kernels("native_batch_norm", [bf16], [bf16])
    assert seconds(own, A100) > 2 * seconds(kernel, A100)


def test_slower_units_are_fed_by_smaller_tiles():
    """What a large tile loses to loads falls with the rate of the multipliers."""

    def lost(device, dtype: str) -> float:
        kernel = product(8192, 8192, 8192, dtype)
        share = RATES["nvidia"].single if dtype == "float32" else RATES["nvidia"].product * device.sustained
        return seconds(kernel, device) * device.flops(dtype) * share / kernel.flops

    assert lost(A100, "float32") < lost(A100, "bfloat16") < lost(H100, "bfloat16")


def test_causal_attention_costs_less_than_full_and_more_than_half():
    q = Shape((16, 16, 1024, 64), (1 << 20, 1 << 16, 64, 1), 2, "bfloat16")
    name = "_scaled_dot_product_flash_attention"
    full, causal = (seconds(kernels(name, [q, q, q], [], {"causal": c})[0], A100) for c in (False, True))
    assert 0.5 * full < causal < 0.8 * full


def test_kernels_for_hopper_are_as_much_faster_there_as_published():
    """FlashAttention 3 over 2 on H100, head size 128 (arXiv 2407.08608): 1.5 to 1.84, by length and pass."""
    for length in (512, 2048, 16384):
        q = Shape((16384 // length, 16, length, 128), (1, 1, 1, 1), 2, "bfloat16")
        for backward in (False, True):
            second, third = (
                attention_kernel(q, q, backward=backward, share=0.5, variant=variant)
                for variant in ("", "hopper")
            )
            assert 1.45 < seconds(second, H100) / seconds(third, H100) < 1.85
            assert seconds(second, A100) == seconds(third, A100)


def test_devices_are_found_by_key_and_alias_and_have_a_source():
    assert device_named("RTX4090").key == "4090"
    assert [d.key for d in devices_named("h100, a100,h100")] == ["h100", "a100"]
    with pytest.raises(ValueError, match=r"device: expected one of .*h100.*, got 'h1000'"):
        device_named("h1000")
    with pytest.raises(ValueError, match="1 to 4 devices"):
        devices_named("h100,a100,v100,t4,b200")
    for device in DEVICES.values():
        assert device.source and 0.5 <= device.sustained <= 1 and device.vendor in RATES


def test_committed_constants_keep_their_error_on_the_tables():
    rows = calibrate.read(sorted((Path(calibrate.ROOT) / "dev/traces").glob("*.csv")))
    judged = [(r, calibrate.predicted_us(r, RATES[r.device.vendor]) / r.measured_us) for r in rows]
    errors = calibrate.by_class(judged)
    assert errors["nvidia", "all"].rows == 185 and errors["amd", "all"].rows == 317
    assert errors["nvidia", "all"].median <= 1.2 and errors["nvidia", "all"].p90 <= 1.8
    assert errors["amd", "all"].median <= 1.2 and errors["amd", "all"].p90 <= 1.8
    for trace, ratio in calibrate.traces_total(judged).items():
        assert 0.75 < ratio < 1.25, trace


def test_a_table_counts_the_gap_before_a_queued_kernel(tmp_path):
    def call(number: int) -> dict:
        args = {"External id": number, "Input Dims": [[64]], "Input type": ["float"], "Input Strides": [[1]]}
        return {"cat": "cpu_op", "name": "aten::neg", "args": args}

    def kernel(number: int, start: float, end: float) -> dict:
        args = {"External id": number, "stream": 7}
        return {"cat": "kernel", "name": "neg", "ts": start, "dur": end - start, "args": args}

    spans = [(0, 4), (4, 8), (11, 12), (112, 114)]  # first, queued, after its dispatch, on an idle device
    events = [f for i, span in enumerate(spans) for f in (call(i), kernel(i, *span))]
    path = tmp_path / "mi300__tiny.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"deviceProperties": [{"name": "AMD Instinct MI300X"}], "traceEvents": events}, file)
    (row,) = calibrate.extract(path)
    assert (row["trace"], row["op"], row["count"]) == ("mi300__tiny", "aten::neg", 4)
    assert (row["median_us"], row["min_us"], row["max_us"]) == (3.0, 1.0, 4.0)
    assert row["queued_us"] == 4.0  # of 4, 4, 3 + 1 and 2


def test_a_fit_finds_constants_that_made_the_rows():
    """Rows made from known constants: the search comes back to them."""
    rows = calibrate.read(sorted((Path(calibrate.ROOT) / "dev/traces").glob("h100*.csv")))
    truth = replace(calibrate.START, start_us=1.8, stream=0.6, issue=2.0)
    rows = [row._replace(measured_us=calibrate.predicted_us(row, truth)) for row in rows]
    found = calibrate.fit(rows)
    assert found.stream == pytest.approx(truth.stream, rel=0.1)
    assert found.issue == pytest.approx(truth.issue, rel=0.15)
    assert math.exp(calibrate.loss(rows, found)) < 1.05


@pytest.mark.parametrize(
    ("rows", "width", "table", "forward_ms", "backward_ms"),
    # Liger's public table, fp32 on A100. Backward: what is published for both, less forward, the random
    # gradient, and the sum into the old gradient, both at the memory's rate.
    [(16384, 4096, 8192, 0.854, 1.1), (16384, 768, 1024, 0.167, 0.2), (16384, 4096, 1024, 0.787, 0.6)],
)
def test_embedding_takes_what_is_published(rows, width, table, forward_ms, backward_ms):
    def dense(*size: int) -> Shape:
        return Shape(size, (size[-1], 1), 4, "float32")

    indices = Shape((rows,), (1,), 8, "int64")
    forward = kernels("embedding", [dense(table, width), indices], [dense(rows, width)])
    backward = kernels("embedding_dense_backward", [dense(rows, width), indices], [dense(table, width)])
    assert sum(seconds(k, A100) for k in forward) == pytest.approx(forward_ms * 1e-3, rel=0.2)
    assert sum(seconds(k, A100) for k in backward) == pytest.approx(backward_ms * 1e-3, rel=0.4)


def test_a_pool_visits_an_element_once_for_each_window_that_holds_it():
    x, y = (Shape((64, 64, n, n), (64 * n * n, n * n, n, 1), 2, "float16") for n in (32, 16))
    ((apart,), (overlapping,)) = (
        kernels("max_pool2d_with_indices", [x], [y, y._replace(width=8, dtype="int64")], {"windows": windows})
        for windows in (1.0, 2.25)
    )
    assert overlapping.elements == pytest.approx(2.25 * apart.elements)


def steps_of(*events: Launch, device=H100):
    return time_steps(list(events) * 2, [len(events), 2 * len(events)], device, COSTS)[-1]


def width_of(timing) -> float:
    low, high = timing.interval_s
    assert timing.step_s / low == pytest.approx(high / timing.step_s)
    return high / timing.step_s


def test_the_interval_is_that_of_the_steps_class():
    long, short = launch(of_length(5000)), launch(of_length(200))
    product = launch(Kernel("gemm", 1e8, 2e14, "bfloat16", (1, 8192, 8192, 8192)))
    convolution = launch(Kernel("conv", 1e8, 2e12, "bfloat16", (1, 1_048_576, 256, 2304)))
    assert width_of(steps_of(product)) == pytest.approx(BLIND_WIDTHS["h100", "eager"])
    assert width_of(steps_of(product, device=DEVICES["a6000"])) == pytest.approx(WIDTHS["eager"])
    assert width_of(steps_of(long)) == pytest.approx(WIDTHS["kernels"])
    assert width_of(steps_of(short)) == pytest.approx(WIDTHS["short kernels"])
    compiled = steps_of(replace(product, region=1))
    assert width_of(compiled) == pytest.approx(BLIND_WIDTHS["h100", "compiled"])
    assert width_of(steps_of(convolution, convolution)) == pytest.approx(WIDTHS["convolutions"])
    assert width_of(steps_of(product, device=DEVICES["mi300x"])) == pytest.approx(WIDTHS["amd"])
    # The host's 10 us per call bound this one; both uncertainties count.
    host_bound = steps_of(launch(of_length(3)))
    both = math.hypot(math.log(WIDTHS["short kernels"]), math.log(WIDTHS["host"]))
    assert host_bound.bound_by == "host" and width_of(host_bound) == pytest.approx(math.exp(both))
