"""Format numbers with units."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """1.23 s, 45.6 ms, 7.89 µs."""
    if value is None:
        return "-"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def about(value: float) -> str:
    """12 s, 1.2 ms, 45 µs: an estimate in seconds, with two significant figures."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{_two_figures(value / factor)} {unit}"
    return f"{_two_figures(value * 1e6)} µs"


def about_range(low: float, high: float) -> str:
    """1.2–45 ms: a range of estimates in seconds, in one unit."""
    factor, unit = (1e-3, "ms") if high >= 1e-3 else (1e-6, "µs")
    return f"{_two_figures(low / factor)}–{_two_figures(high / factor)} {unit}"


def _two_figures(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def ms(value: float) -> str:
    """1,234 ms, 12.3 ms, 456 µs: predicted milliseconds, for comparison with others."""
    if value >= 100:
        return f"{value:,.0f} ms"
    return f"{value:.1f} ms" if value >= 1 else f"{value * 1e3:.0f} µs"


def duration(value: float) -> str:
    """141 s, 27 min 41 s: a waiting time."""
    minutes, rest = divmod(round(value), 60)
    return f"{round(value)} s" if value < 180 else f"{minutes} min {rest} s"


def size(num_bytes: float | None) -> str:
    """58.1 GiB, 3.4 MiB."""
    if num_bytes is None:
        return "-"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def gib(num_bytes: float) -> str:
    """58.14 GiB, 3.4 MiB: with enough digits to compare with a device's memory."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def steps(count: int, iterations: int | None = None) -> str:
    """12 steps, 1 step, 12 steps in 3 iterations."""
    text = f"{count} step{'s' * (count != 1)}"
    return f"{text} in {iterations} iteration{'s' * (iterations != 1)}" if iterations else text


def ratio(value: float | None) -> str:
    """3.2×, 0.97×, 412×."""
    if value is None:
        return "-"
    return f"{value:.0f}×" if value >= 100 else f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


def small(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


def memory_change(value: float) -> tuple[str, str]:
    """Describe a memory ratio: ("4.2×", "less peak memory"), ("1.3×", "more ..."), ("≈", "the same ...")."""
    if 0.93 <= value <= 1.07:
        return "≈", "the same peak memory"
    return (ratio(value), "less peak memory") if value > 1 else (ratio(1 / value), "more peak memory")
