"""Tensors as wide as the vocabulary: rows without a gradient, kept logits, logits without gradients."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from leanstep.diagnose.advice import APPLY, TRANSFORMERS, Advice
from leanstep.diagnose.findings import Finding, Hit, Rule, Work, callers_of, listed, plural
from leanstep.diagnose.step import Saved, Step, grouped, shape_text
from leanstep.tape.events import FORWARD
from leanstep.tape.lines import Line
from leanstep.units import size

HEAD_ADVICE = (
    Advice(
        "Call leanstep.integrations.trl.apply_leanstep(trainer) before train(), or prefix the trainer's "
        "class with Lean (LeanSFTTrainer, LeanDPOTrainer, LeanGRPOTrainer, LeanKTOTrainer). Without Triton "
        "TRL also scores the prompt's rows; with leanstep they never reach the head.",
        "integrations.trl.apply_leanstep(trainer)",
        package="trl/",
        leanstep="leanstep.integrations.trl.apply_leanstep",
    ),
    Advice(
        "Use LeanTrainer of leanstep.integrations.transformers instead of Trainer, or call its "
        "apply_leanstep(model) once. Rows with label -100 then never reach the head, and only one tile of "
        "logits is held.",
        "LeanTrainer or apply_leanstep(model)",
        leanstep="leanstep.integrations.transformers.LeanTrainer",
        trainer=True,
        model_in=TRANSFORMERS,
    ),
    Advice(
        "Call leanstep.integrations.transformers.apply_leanstep(model) once, before the loop: model(..., "
        "labels=...) then returns the same loss, rows with label -100 never reach the head, and only one "
        "tile of logits is held.",
        "apply_leanstep(model) before the loop",
        leanstep=APPLY,
        model_in=TRANSFORMERS,
        has_labels=True,
    ),
    Advice(
        "Call leanstep.model_logprobs(model, input_ids, mask, attention_mask=...) instead of "
        "model(...).logits, log_softmax and gather: log-probs (and entropy) [B, T - 1] of the tokens that "
        "the mask selects. Other rows never reach the head, and only one tile of logits is held. Old and "
        "reference log-probs: the same call under no_grad.",
        "leanstep.model_logprobs(model, ids, mask)",
        leanstep="leanstep.model_logprobs",
        model_in=TRANSFORMERS,
    ),
    Advice(
        "Call leanstep.masked_token_logprobs(hidden, head, tokens, mask) on the head's input: log-probs (and "
        "entropy) [B, T - 1] of the tokens that the mask selects. Other rows never reach the head, and only "
        "one tile of logits is held.",
        "masked_token_logprobs(hidden, head, …)",
        leanstep="leanstep.masked_token_logprobs",
        model_in="",
        is_rl=True,
    ),
    Advice(
        "Call leanstep.heads.linear_cross_entropy(hidden, head, labels) on the head's input: it returns "
        "the same loss, rows with label -100 never reach the head, and only one tile of logits is held.",
        "linear_cross_entropy(hidden, head, …)",
        leanstep="leanstep.heads.linear_cross_entropy",
        code=("cross_entropy(",),
        model_in="",
    ),
)
# Without gradients there is no loss to replace.
SCORING_ADVICE = tuple(a for a in HEAD_ADVICE if not (a.package or a.has_labels or a.code != ("",)))
NO_GRADIENT = Advice(
    "Check the loss first: equal rewards within a group give zero advantages, and a mask that selects "
    "nothing gives a zero loss. Skip such a batch before the forward pass, or vary the rewards.",
    "the loss has no gradient (advantages are all zero)",
    what="Every row of the head gets a gradient of exactly zero: the loss has no gradient (advantages are "
    "all zero).",
    when=lambda f: f.count == f.evidence["rows"],
)


def dead_rows(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find rows of the head whose output gradient is exactly zero: computed, stored and unused."""
    for line, entries in grouped(step.heads.heads.items(), lambda item: item[0]).items():
        heads = [head for _, head in entries]
        rows, dead = sum(head.rows for head in heads), sum(head.dead for head in heads)
        if dead < limits["rows"] or dead < limits["share"] * rows:
            continue
        head = heads[0]
        callers = Counter({site.caller: head.dead for site, head in entries if site.caller is not None})
        evidence = {"rows": rows, "dead": dead, "width": head.width, "inner": head.inner}
        per_row = head.element_bytes + _saved_bytes_per_element(step)
        # The backward recomputes the tiles and frees them again.
        in_tiles = any(head.in_tiles for head in heads)
        products, held = (8, 0.0) if in_tiles else (6, dead * head.width * per_row)
        work = Work(flops=products * dead * head.inner * head.width, held_bytes=held)
        yield Hit(line, dead, callers, FORWARD, evidence, work)


def _saved_bytes_per_element(step: Step) -> float:
    """Return the bytes saved per logit: all [N, V] tensors of the step divided by the rows of the head."""
    rows = sum(head.rows for head in step.heads.heads.values())
    saved = sum(entry.tensor.num_bytes for entry in step.wide)
    return saved / max(rows * step.heads.width, 1)


def _dead(f: Finding) -> str:
    e = f.evidence
    varies = (
        ""
        if len(set(f.counts)) == 1
        else f" The number varies between steps ({min(f.counts)} to {max(f.counts)})."
    )
    return (
        f"{f.count:,} of {e['rows']:,} rows of the head ({e['inner']:,} to {e['width']:,}) get a gradient "
        f"of exactly zero on {len(f.counts)} of {len(f.counts)} steps.{varies}"
    )


DEAD_ROWS = Rule(
    "dead-rows",
    dead_rows,
    limits={"rows": 16, "share": 0.10},
    fires_when="rows of the head's output gradient are exactly zero: ≥ 16 and ≥ 10 %",
    what=_dead,
    amount=lambda f: f"{f.count:,} of {f.evidence['rows']:,}",
    why="Their logits are computed, stored and differentiated, but contribute nothing.",
    fix="Select the rows before the head: linear_logprobs(hidden, weight, targets, rows=...), or "
    "hidden[rows] with precomputed integer indices.",
    short_fix="linear_logprobs(..., rows=...)",
    leanstep="leanstep.heads.linear_logprobs",
    removes="rows",
    edit="head",
    smallest=True,
    advice=(NO_GRADIENT, *HEAD_ADVICE),
    cost=lambda findings: f"{100 * findings[0].count / findings[0].evidence['rows']:.0f} % of the head",
)


class Kept(NamedTuple):
    """What a line keeps of the head's width: all of it, and the most between two runs of the backward."""

    saved: list[Saved]
    most: list[Saved]

    @property
    def num_bytes(self) -> int:
        return sum(entry.tensor.num_bytes for entry in self.most)

    @property
    def rows(self) -> int:
        return sum(entry.tensor.numel() // max(entry.tensor.shape[-1], 1) for entry in self.most)

    @property
    def shapes(self) -> dict[str, int]:
        return dict(Counter(shape_text(entry.tensor) for entry in self.saved).most_common(3))


def _kept(step: Step) -> dict[Line, Kept]:
    """Return what each line keeps."""
    lines = {}
    for line, saved in grouped(step.wide, lambda entry: entry.site).items():
        windows: dict[int, list[Saved]] = defaultdict(list)
        for entry in saved:
            windows[entry.window].append(entry)
        most = max(windows.values(), key=lambda entries: sum(e.tensor.num_bytes for e in entries))
        lines[line] = Kept(saved, most)
    return lines


def retained_chunks(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find loops over chunks of the vocabulary-wide tensor that save every chunk for the backward."""
    for line, on_line in _kept(step).items():
        count, num_bytes = len(on_line.most), on_line.num_bytes
        if count >= limits["chunks"] and num_bytes >= limits["bytes"] and on_line.rows >= limits["rows"]:
            evidence = {"chunks": count, "bytes": num_bytes, "shapes": on_line.shapes}
            callers = callers_of(entry.site for entry in on_line.saved)
            yield Hit(line, count, callers, FORWARD, evidence, Work(held_bytes=num_bytes))


def full_vocab(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find vocabulary-wide tensors that are saved for the backward."""
    wide = {line: k for line, k in _kept(step).items() if k.rows >= limits["rows"] * len(k.most)}
    saved_bytes = sum(on_line.num_bytes for on_line in wide.values())
    if saved_bytes < limits["bytes"]:
        return
    # Logits and gradients that coexist with the saved tensors disappear with them.
    peak = max(step.peak_wide_bytes, saved_bytes)
    for line, on_line in wide.items():
        evidence = {
            "shapes": on_line.shapes,
            "bytes": on_line.num_bytes,
            "all_saved_bytes": step.peak_saved_bytes,
            "peak_bytes": peak,
        }
        callers = callers_of(entry.site for entry in on_line.saved)
        work = Work(held_bytes=peak * on_line.num_bytes / saved_bytes)
        yield Hit(line, len(on_line.saved), callers, FORWARD, evidence, work)


FULL_VOCAB = Rule(
    "full-vocab",
    full_vocab,
    limits={"bytes": 32 * 1024 * 1024, "rows": 64},
    fires_when="`[*, V]` tensors saved for the backward, ≥ 32 MiB",
    what=lambda f: (
        f"Saved for the backward: {listed(f.evidence['shapes'])}, {size(f.evidence['bytes'])} of "
        f"{size(f.evidence['all_saved_bytes'])} that the step saves."
    ),
    amount=lambda f: plural(f.count, "tensor"),
    why="Vocabulary-wide tensors set the step's memory peak, and one number per row is all that the loss "
    "needs.",
    fix="leanstep.heads.linear_logprobs computes log-probs and entropy from the hidden states and "
    "holds one tile of logits.",
    short_fix="heads.linear_logprobs (one tile)",
    leanstep="leanstep.heads.linear_logprobs",
    removes="wide tensors",
    edit="head",
    compiled="saved",
    advice=HEAD_ADVICE,
    traces=True,
)
RETAINED_CHUNKS = Rule(
    "retained-chunks",
    retained_chunks,
    limits={"chunks": 4, "bytes": 8 * 1024 * 1024, "rows": 64},
    fires_when="a chunk loop inside autograd saves every chunk",
    what=lambda f: (
        f"{plural(f.count, 'chunk')} of the head's width are saved for the backward "
        f"({listed(f.evidence['shapes'])}), {size(f.evidence['bytes'])} in total."
    ),
    amount=lambda f: plural(f.count, "chunk"),
    why="Chunking saves nothing here, because autograd keeps every chunk. Recompute it in the backward.",
    fix="leanstep.heads.linear_logprobs recomputes one tile at a time; or run backward() per chunk, "
    "or checkpoint it.",
    short_fix="heads.linear_logprobs (recomputes)",
    leanstep="leanstep.heads.linear_logprobs",
    removes="wide tensors",
    compiled="saved",
    advice=HEAD_ADVICE,
    instead_of=FULL_VOCAB.name,
    traces=True,
)


def no_grad_vocab(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find vocabulary-wide tensors written without gradients: old and reference log-probs, an entropy."""
    width = step.heads.width
    wide = [entry for entry in step.heads.unsaved if entry.tensor.numel() // width >= limits["rows"]]
    # Each line reads what the previous one wrote: together they process one tensor.
    if sum(entry.tensor.num_bytes for entry in wide) < limits["bytes"]:
        return
    for line, entries in grouped(wide, lambda entry: entry.site).items():
        num_bytes = sum(entry.tensor.num_bytes for entry in entries)
        shapes = Counter(shape_text(entry.tensor) for entry in entries)
        evidence = {"shapes": dict(shapes.most_common(3)), "bytes": num_bytes}
        # Each is freed before the next one is allocated.
        work = Work(moved_bytes=2 * num_bytes, held_bytes=num_bytes / len(entries))
        yield Hit(line, len(entries), callers_of(entry.site for entry in entries), FORWARD, evidence, work)


NO_GRAD_VOCAB = Rule(
    "no-grad-vocab",
    no_grad_vocab,
    limits={"bytes": 32 * 1024 * 1024, "rows": 64},
    fires_when=(
        "`[*, V]` tensors of ≥ 64 rows written without gradients, ≥ 32 MiB: old and reference log-probs, an "
        "entropy"
    ),
    what=lambda f: (
        f"Written without gradients: {listed(f.evidence['shapes'])}, {size(f.evidence['bytes'])} per step."
    ),
    amount=lambda f: plural(f.count, "tensor"),
    why="Old and reference log-probs and the entropy need one number per row, but the logits of all "
    "rows, including the prompt's, are written and read in full.",
    fix="leanstep.heads.linear_logprobs(hidden, weight, targets, rows=...) under no_grad returns "
    "log-probs and entropy of the selected rows, and holds one tile of logits.",
    short_fix="linear_logprobs(..., rows=...)",
    leanstep="leanstep.heads.linear_logprobs",
    edit="head",
    advice=SCORING_ADVICE,
)
