"""Reads that make the host wait for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from leanstep.diagnose.advice import TRANSFORMERS, TRL, Advice
from leanstep.diagnose.findings import Finding, Hit, Rule, Work, callers_of, listed, plural
from leanstep.diagnose.origins import OF_THE_MODEL
from leanstep.diagnose.step import Step, grouped
from leanstep.tape.events import COPY
from leanstep.units import size


def host_sync(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find lines where the host reads a device value."""
    for line, reads in grouped(step.reads, lambda read: read.site).items():
        if len(reads) < limits["reads"]:
            continue
        origins = Counter(read.origin for read in reads)
        phases = Counter(read.phase for read in reads)
        kinds = Counter(read.kind for read in reads)
        evidence = {"kinds": dict(kinds), "reads": len(reads), "of_the_model": origins[OF_THE_MODEL]}
        confidence = "high" if origins[OF_THE_MODEL] else "medium"
        callers = callers_of(read.site for read in reads)
        phase = phases.most_common(1)[0][0]
        waited = sum(read.seconds for read in reads)
        work = Work(reads=len(reads), seconds=waited or None)
        yield Hit(line, len(reads), callers, phase, evidence, work, confidence)


def _reads(f: Finding) -> str:
    loop = " in a loop" if f.in_loop else ""
    source = (
        ""
        if f.confidence == "high"
        else " The value depends on no parameter, so the host may already have it."
    )
    return f"The host reads a value from the device{loop}: {listed(f.evidence['kinds'])}.{source}"


READ_ADVICE = (
    Advice(
        "The trainer reads the loss on every step to keep NaN out of its logs: "
        "TrainingArguments(logging_nan_inf_filter=False) leaves the value on the device.",
        "logging_nan_inf_filter=False",
        package=f"{TRANSFORMERS}trainer",
        code=("isnan(", "isinf("),
    ),
    Advice(
        "generate() checks after every token whether all sequences have ended. The trainer's use_vllm=True "
        "generates with a server instead.",
        "generate with a server (use_vllm)",
        package=TRANSFORMERS,
        code=("unfinished_sequences",),
        trainer=True,
    ),
    Advice(
        "generate() checks after every token whether all sequences have ended. That is part of generate(); "
        "fewer calls with more sequences each share the reads.",
        "part of generate(): one per token",
        package=TRANSFORMERS,
        code=("unfinished_sequences",),
    ),
    Advice(
        "transformers checks whether the attention mask masks anything. Leave attention_mask out where "
        "nothing is padded; with padding the read is part of the library.",
        "no attention_mask where nothing is padded",
        package=f"{TRANSFORMERS}masking_utils",
    ),
    Advice(
        "Tokens must be on the host to become text. batch_decode() copies them once per call, so the only "
        "saving left is to call it for more sequences at once.",
        "needed: text is decoded on the host",
        package=f"{TRANSFORMERS}tokenization",
        code=("batch_decode(",),
    ),
    Advice(
        "Tokens are copied to the host for decoding: decode all sequences with one batch_decode().",
        "one batch_decode() for all sequences",
        package=f"{TRANSFORMERS}tokenization",
    ),
    Advice(
        "The trainer reads it, mostly for logging. A larger logging_steps reads less often where the code "
        "respects it, and a callback can drop unused metrics.",
        "the trainer's read: log less often",
        package=f"{TRANSFORMERS}trainer",
    ),
    Advice(
        "The trainer reads it, mostly for logging. A larger logging_steps reads less often where the code "
        "respects it.",
        "the trainer's read: log less often",
        package=TRL,
    ),
    Advice(
        "The library reads it in its own code; from the calling line, only fewer calls help.",
        "the library's own read: fewer calls",
        package=TRANSFORMERS,
    ),
    Advice(
        "The loop checks after every token whether all sequences have ended. Check every k-th token instead: "
        "a few extra tokens are generated and dropped, and the device does not wait.",
        "check every k-th token",
        code=("finished.all(", "done.all(", "ended.all(", "eos).all("),
        is_rl=True,
    ),
    Advice(
        "Every parameter and buffer is copied to the host one at a time. Where memory allows, keep the "
        "model on the device, or copy into pinned memory: tensor.to(device, non_blocking=True).",
        "keep it on the device, or pinned memory",
        code=(".cpu()", '.to("cpu")', ".to('cpu')"),
    ),
)

HOST_SYNC = Rule(
    "host-sync",
    host_sync,
    limits={"reads": 1},
    fires_when=(
        "the host reads a device value: `.item()`, `if tensor`, a boolean index, `tolist`, `nonzero`, a print"
    ),
    what=_reads,
    amount=lambda f: plural(f.count, "read"),
    why="On a GPU each read waits until the device has finished all queued work, and the queue runs empty.",
    fix="Keep the value on the device (torch.where, masked arithmetic, precomputed integer row indices) "
    "and read it once after the step, or every k-th step. leanstep.heads.plan_rows turns boolean "
    "masks into integer row indices.",
    short_fix="keep on the device; read once per step",
    leanstep="leanstep.heads.plan_rows",
    removes="reads",
    advice=READ_ADVICE,
    traces=True,
)


def blocking_copy(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find copies to the device for which the host waits."""
    for line, copies in grouped(step.of_kind(COPY), lambda event: event.site).items():
        if len(copies) >= limits["copies"]:
            evidence = {
                "copies": len(copies),
                "bytes": sum(event.value or 0 for event in copies),
                "calls": dict(Counter(event.name for event in copies).most_common(3)),
            }
            work = Work(seconds=sum(event.took_ns for event in copies) / 1e9)
            callers = callers_of(event.site for event in copies)
            yield Hit(line, len(copies), callers, evidence=evidence, work=work)


BLOCKING_COPY = Rule(
    "blocking-copy",
    blocking_copy,
    limits={"copies": 1},
    fires_when="in a trace: the host waits for a copy to the device",
    what=lambda f: (
        f"The host copies {size(f.evidence['bytes'])} to the device and waits for the copy "
        f"({listed(f.evidence['calls'])})."
    ),
    amount=lambda f: plural(f.count, "copy", "copies"),
    why="Nothing is launched meanwhile, and the device runs out of work.",
    fix="pin_memory=True in the DataLoader and .to(device, non_blocking=True); create constants on the "
    "device.",
    short_fix="pin_memory, non_blocking=True",
    needs="trace",
)
