"""Loss over training time as a plain SVG file: readable in a README, in a browser and in a diff."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 52
COLOURS = {"normuon": "#0b6e4f", "adamw": "#b5532a"}
LABELS = {"normuon": "NorMuon + Adam", "adamw": "AdamW, tuned"}


def nice_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from low to high, about that many."""
    span = max(high - low, 1e-9)
    raw = span / about
    magnitude = 10 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def race_svg(body: Mapping[str, Any]) -> str:
    """Both curves of a race file, its target, and when each arrives there."""
    race = body["race"]
    # Processor time with one thread is the quiet machine's time; with several it counts each of them.
    clock = "cpu_s" if body["threads"] == 1 else "time_s"
    curves: Mapping[str, Mapping[str, Sequence[float]]] = race["curves"]
    target = race["target"]
    # The first evaluation is before the first step and would squeeze the rest.
    shown = {
        name: [p for p in zip(c[clock], c["val_loss"], strict=True) if p[0] > 0] for name, c in curves.items()
    }
    right = max(t for points in shown.values() for t, _ in points) * 1.02
    losses = [loss for points in shown.values() for _, loss in points]
    low, high = min(losses), sorted(losses)[int(len(losses) * 0.97)]
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def x(seconds: float) -> float:
        return LEFT + seconds / right * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - min(loss, high)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    title = escape(_title(race[clock]["ratio"]))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="16" font-weight="bold">{title}</text>',
        f'<text x="{LEFT}" y="42" fill="#555">{escape(_subtitle(body))}</text>',
    ]
    for tick in nice_ticks(0, right):
        parts.append(_line(x(tick), TOP, x(tick), HEIGHT - BOTTOM, "#eeeeee"))
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    for tick in nice_ticks(low, high):
        parts.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "#eeeeee"))
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    parts.append(
        _text(
            (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 12,
            "training time, seconds" + (" of one core" if clock == "cpu_s" else ""),
            "middle",
        )
    )
    parts.append(_text(LEFT - 48, TOP - 8, "validation loss", "start"))
    parts.append(_line(LEFT, y(target), WIDTH - RIGHT, y(target), "#888888", dash="4 4"))
    parts.append(_text(LEFT + 6, y(target) + 16, f"target {target:.3f}", "start"))
    for index, (name, points) in enumerate(shown.items()):
        colour = COLOURS.get(name, "#333333")
        path = " ".join(f"{x(t):.1f},{y(loss):.1f}" for t, loss in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        arrival = next(((t, loss) for t, loss in points if loss <= target), None)
        if arrival:
            parts.append(
                f'<circle cx="{x(arrival[0]):.1f}" cy="{y(arrival[1]):.1f}" r="4.5" fill="{colour}"/>'
            )
            parts.append(_text(x(arrival[0]), y(arrival[1]) - 10, f"{arrival[0]:.0f} s", "end", colour))
        parts.append(_line(WIDTH - 190, TOP + 14 + 20 * index, WIDTH - 166, TOP + 14 + 20 * index, colour, 3))
        parts.append(_text(WIDTH - 158, TOP + 18 + 20 * index, LABELS.get(name, name), "start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(ratio: float | None) -> str:
    if ratio is None:
        return "AdamW did not reach the target"
    return f"AdamW needs {ratio:.2f} times as long to the same loss"


def _subtitle(body: Mapping[str, Any]) -> str:
    options = body["race"]["adamw_options"]
    return (
        f"gpt {body.get('preset', '')}: same model, data and batches; AdamW lr {options['lr']:g}; "
        f"torch {body['torch']}, threads: {body['threads']}"
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, dash: str | None = None
) -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{style}/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
