"""The LM head on a GPU that is not there: `python tools/rehearse_head.py` predicts every row of
results/rehearsed/head.json; `--rows NAME,...` some of them, `--print` without writing.

A row is one step (forward and backward) of a door or of a peer at a size, rehearsed by `leanstep.rehearse` in
a process of its own, beside the bare products of the same shapes. `ms` comes from the rehearsal's time model,
`flat_ms` from the plain roofline that the figures were first stated with: 700 TFLOP/s, 2.85 TB/s, 2 us a
kernel. `extra_bytes` is the peak beyond inputs and returned gradients.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

RESULT = Path(__file__).parents[1] / "results" / "rehearsed" / "head.json"
FLAT_FLOPS, FLAT_BYTES, FLAT_KERNEL_S = 700e12, 2.85e12, 2e-6


class Row(NamedTuple):
    """What runs (`what`: a function of this file, or an implementation of logprob-linear), at which size.

    tokens T, of which every `one_in`-th is scored; `products`: how many bare ones it is compared with.
    """

    what: str
    tokens: int
    vocab: int
    hidden: int
    products: int
    one_in: int = 4


SMALL, LARGE = (205_280, 76_032, 2_560), (205_280, 151_936, 4_096)
ROWS = {
    "head 76k": Row("head", *SMALL, 4),
    "head 152k": Row("head", *LARGE, 4),
    "head 152k, 1,024 rows": Row("head", 4_096, *LARGE[1:], 4),
    "head 76k, all rows": Row("head", 51_320, *SMALL[1:], 4, 1),
    "head 50,257": Row("head", 32_768, 50_257, 768, 4, 1),
    "temperature": Row("temperature", *SMALL, 4),
    "temperatures": Row("temperatures", *SMALL, 4),
    "softcap": Row("softcap", *SMALL, 4),
    "bias": Row("bias", *SMALL, 4),
    "fp32 weight under autocast 152k": Row("autocast", *LARGE, 4),
    "frozen head": Row("frozen", *SMALL, 3),
    "frozen head, entropy gradient": Row("frozen_entropy", *SMALL, 3),
    "policy loss": Row("policy", *SMALL, 3),
    "policy loss 152k": Row("policy", *LARGE, 3),
    "logits 8,192 x 152k": Row("logits", 8_192, 151_936, 0, 0, 1),
    "verl": Row("verl-fused-rows", *SMALL, 4),
    "liger": Row("liger-chunked", *SMALL, 4),
    "trl": Row("trl-chunked-rows", *SMALL, 4),
    "torch linear_cross_entropy": Row("torch-linear-ce", *SMALL, 4),
    "verl 152k": Row("verl-fused-rows", *LARGE, 4),
}


def run_steps(name: str) -> None:
    """Inside a rehearsal: this row, again and again."""
    import torch

    import leanstep.logprob as lp

    row = ROWS[name]
    what, selected = row.what, row.tokens // row.one_in
    targets = torch.randint(0, row.vocab, (selected,), device="cuda")
    upstream = torch.empty(2, selected, device="cuda")
    if what == "logits":
        logits = torch.empty(row.tokens, row.vocab, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    else:
        master = torch.float32 if what == "autocast" else torch.bfloat16
        hidden = torch.empty(row.tokens, row.hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.empty(row.vocab, row.hidden, dtype=master, device="cuda", requires_grad=True)
        weight.requires_grad_(not what.startswith("frozen"))
        bias = torch.empty(row.vocab, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        rows = torch.arange(selected, device="cuda") * row.one_in if row.one_in > 1 else None
    temperatures = torch.ones(selected, device="cuda")
    options: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.7},
        "temperatures": {"temperature": temperatures},
        "softcap": {"transform": lp.Transform(softcap=30.0)},
    }
    entropy = "none" if what == "frozen" else "grad"
    batch = lp.PolicyBatch(*upstream, mask=temperatures, ref_logp=temperatures)
    objective = lp.PolicyObjective(clip_high=0.28, kl_coef=0.04, entropy_coef=0.01)
    while True:
        if what == "logits":
            out = lp.token_logprobs(logits, targets, entropy="grad")
        elif what == "policy":
            lp.linear_policy_loss(
                hidden, weight, targets, batch, rows=rows, objective=objective
            ).loss.backward()
            hidden.grad = weight.grad = None
            continue
        else:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=what == "autocast"):
                head = lp.LMHead(weight, bias) if what == "bias" else weight
                out = lp.linear_logprobs(
                    hidden, head, targets, rows=rows, entropy=entropy, **options.get(what, {})
                )
        values = [out.logp] if entropy == "none" else [out.logp, out.entropy]
        torch.autograd.backward(values, list(upstream[: len(values)]))
        for leaf in (logits,) if what == "logits" else (hidden, weight, bias):
            leaf.grad = None


def predict(name: str) -> dict[str, Any]:
    """Rehearse one row."""
    from leanstep.rehearse.devices import device_named
    from leanstep.rehearse.events import HostWait, Kernel, Launch, Request
    from leanstep.rehearse.stage import rehearse
    from leanstep.rehearse.time_model import seconds
    from leanstep.rehearse.what_if import last_step

    row, device = ROWS[name], device_named("h100")
    if "-" in row.what:
        settings = {"tokens": row.tokens, "vocab": row.vocab, "hidden": row.hidden, "dtype": "bf16"}
        settings["response_frac"] = 1 / row.one_in
        request = Request(
            "logprob-linear", case=True, device="h100", steps=2, settings=settings, implementation=row.what
        )
    else:
        request = Request(__file__, ("--run", name), device="h100", steps=2)
    recording = rehearse(request, quiet=True)
    if recording.refused is not None:
        return {"refused": recording.refused.reason}
    timing = last_step(recording, device)
    assert timing is not None
    last = recording.steps[-1]
    events = recording.events[last.first : last.last]
    kernels = [k for e in events if isinstance(e, Launch) for k in e.kernels]
    waits = sum(isinstance(e, HostWait) for e in events)
    products = [k for k in kernels if k.kind == "gemm"]
    rows, width = row.tokens // row.one_in, 2
    shapes = [(rows, row.vocab, row.hidden), (rows, row.hidden, row.vocab), (row.vocab, row.hidden, rows)]
    shapes = (shapes + shapes[:1])[: row.products]

    def bare(m: int, n: int, k: int) -> Kernel:
        return Kernel("gemm", width * (m * k + k * n + m * n), 2.0 * m * n * k, "bfloat16", (1, m, n, k))

    limit = [bare(*shape) for shape in shapes]
    given = row.tokens * row.hidden * width + row.vocab * row.hidden * (
        4 if row.what == "autocast" else width
    )
    if row.what == "logits":
        given, limit = row.tokens * row.vocab * width, []
    returned = given - (row.vocab * row.hidden * width if row.what.startswith("frozen") else 0)

    def flat(some: list[Kernel]) -> float:
        parts = ((k.flops / FLAT_FLOPS, k.nbytes / FLAT_BYTES, k.launches * FLAT_KERNEL_S) for k in some)
        return 1e3 * sum(map(max, parts))

    bare_ms, flat_bare = 1e3 * sum(seconds(k, device) for k in limit), flat(limit)
    return {
        **row._asdict(),
        "ms": round(1e3 * timing.step_s, 2),
        "bare_ms": round(bare_ms, 2),
        "ratio": round(1e3 * timing.step_s / bare_ms, 3) if limit else None,
        "flat_ms": round(flat(kernels), 2),
        "flat_ratio": round(flat(kernels) / flat_bare, 3) if limit else None,
        "extra_bytes": recording.peak_bytes - given - returned,
        "kernels": len(kernels),
        "passes_over_tiles": sum(
            k.name.endswith(("statistics_kernel", "exponentials_kernel")) for k in kernels
        ),
        "host_waits": waits,
        "misaligned_products": sum(k.alignment < 16 for k in products),
        "fp32_products": sum(k.dtype in ("float32", "tf32") for k in products),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", help="names, separated by semicolons")
    parser.add_argument("--print", action="store_true", help="do not write the file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_steps(arguments.run)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    for name in arguments.rows.split(";") if arguments.rows else ROWS:
        result["rows"][name] = found = predict(name)
        print(name, json.dumps({k: v for k, v in found.items() if k not in Row._fields}), flush=True)
    if not arguments.print:
        result = {
            "device": "h100",
            "predicted": True,
            "rows": {name: result["rows"][name] for name in ROWS if name in result["rows"]},
        }
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
