"""The rules: their texts, and the verdict over all recorded steps.

A finding must hold on every recorded step. Its count is the median over the steps; of dead rows it is the
minimum, the only number that is waste on every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanstep.diagnose import advice, growth_checks, habit_checks, rule_checks
from leanstep.diagnose.step_records import Finding, Hit, Limits, StepRecord
from leanstep.script.lines import Line
from leanstep.units import about, size

Hits = dict[str, dict[Line, Hit]]


@dataclass(frozen=True)
class Rule:
    """`what`, `fix` and `amount` are filled in from the evidence of a finding."""

    id: str
    find: Callable[[StepRecord, Mapping[str, float]], list[Hit]]
    amount: Callable[[Finding], str]
    what: Callable[[Finding], str]
    why: str
    fix: str
    short_fix: str
    leanstep: str | None = None
    # In place of `find`: what all steps together show.
    find_over_steps: Callable[[Sequence[StepRecord], Mapping[str, float]], list[Hit]] | None = None


def _no_hits(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    return []


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} × {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))


def _plural(count: int, word: str, plural: str | None = None) -> str:
    return f"{count:,} {word if count == 1 else plural or word + 's'}"


def _reads(f: Finding) -> str:
    loop = " in a loop" if f.in_loop else ""
    source = (
        "" if f.confidence == "high" else " The value depends on no parameter: it may be host data already."
    )
    return f"The host reads a value from the device{loop}: {_listed(f.evidence['kinds'])}.{source}"


def _storm(f: Finding) -> str:
    e = f.evidence
    return (
        f"The line dispatches {e['forward_ops']:,} tiny ops ({_listed(e['repeats'])}) and its backward "
        f"{e['backward_ops']:,} more, {size(e['mean_bytes'])} each on average."
    )


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


def _unbatched(f: Finding) -> str:
    e = f.evidence
    repeats = _listed(e["repeats"])
    return f"The optimizer dispatches {e['ops']:,} ops from this line, one tensor at a time: {repeats}."


def _grown_memory(f: Finding) -> str:
    e = f.evidence
    if e["graphs"]:
        return (
            f"The graphs of {e['graphs']:,} earlier steps are still alive: a loss is kept with what it was "
            "computed from."
        )
    return (
        f"What this line made in {e['steps']:,} earlier steps is still alive: "
        f"{size(e['bytes_per_step'])} per step, {size(e['bytes'])} so far."
    )


def _grown_step(f: Finding) -> str:
    e = f.evidence
    if e["cpu_seconds"] is not None:
        first, last = e["cpu_seconds"]
        return (
            f"From the first third of {e['steps']} steps to the last the CPU time of a step grows from "
            f"{about(first)} to {about(last)}, with the same ops: Python code does more and more."
        )
    shown = {"ops": "{:,} ops".format, "flops": _gflop, "written_bytes": lambda n: f"{size(n)} written"}
    grown = ", ".join(f"{shown[n](e['first'][n])} → {shown[n](e['last'][n])}" for n in e["grows"])
    return (
        f"From the first third of {e['steps']} steps to the last a step grows: {grown}. This line grows most."
    )


def _gflop(flops: int) -> str:
    return f"{flops / 1e9:,.3g} GFLOP"


RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "host-sync",
            rule_checks.host_sync,
            lambda f: _plural(f.count, "read"),
            _reads,
            "On a GPU each read waits until the device has finished everything queued before it, and the "
            "queue runs empty.",
            "Keep the value on the device (torch.where, masked arithmetic, integer row indices made once) "
            "and read it once after the step, or every k-th step. leanstep.objectives has pair losses "
            "without reads; leanstep.logprob.plan_rows makes integer row indices in place of boolean masks.",
            "keep on the device; read once per step",
            "leanstep.objectives",
        ),
        Rule(
            "op-storm",
            rule_checks.op_storm,
            lambda f: f"{f.count:,} tiny ops",
            _storm,
            "Each op costs microseconds of dispatch (and a launch on a GPU) however little it computes.",
            "Write the loop as tensor ops over all items at once. leanstep.objectives does it for pair and "
            "ranking losses, leanstep.lens for a controller, leanstep.logprob for per-token log-probs.",
            "one tensor op over all items",
            "leanstep.objectives",
        ),
        Rule(
            "dead-rows",
            rule_checks.dead_rows,
            lambda f: f"{f.count:,} of {f.evidence['rows']:,}",
            _dead,
            "Their logits are computed, stored and differentiated, and contribute nothing.",
            "Choose the rows before the head: linear_logprobs(hidden, weight, targets, rows=...), or "
            "hidden[rows] with integer indices made once.",
            "linear_logprobs(..., rows=...)",
            "leanstep.logprob.linear_logprobs",
        ),
        Rule(
            "zero-fill",
            rule_checks.zero_fill,
            lambda f: f"{f.count:,} fills",
            lambda f: (
                f"The backward of this line writes {f.count:,} whole buffers "
                f"({_listed(f.evidence['ops'])}), {size(f.evidence['bytes'])} together, each for a gradient "
                "at most a quarter of its size."
            ),
            "Indexing a piece makes autograd fill a buffer of the full size with zeros per piece, and add "
            "them up.",
            "Take all pieces with one op: unbind, split, or a loss over the whole tensor; for parameter "
            "banks the access of leanstep.gpt, which writes every slice of the gradient once.",
            "unbind/split once; one loss for all",
            "leanstep.gpt",
        ),
        Rule(
            "transposed-copy",
            rule_checks.transposed_copy,
            lambda f: _plural(f.count, "copy", "copies"),
            lambda f: (
                f"{_listed(f.evidence['kinds'])} across memory layouts, {size(f.evidence['bytes'])} per "
                "step: rows are read where columns are written."
            ),
            "A strided pass is several times slower than a straight one, and a matmul takes either layout "
            "for free.",
            "Pass the transposed view to the matmul, and keep state in the layout of its use. The "
            "transpose-copy and transpose-add kernels of leanstep.muon and leanstep.gpt do what must be "
            "done in tiles.",
            "pass the view; keep one layout",
            "leanstep.muon",
        ),
        Rule(
            "duplicate-cast",
            rule_checks.duplicate_cast,
            lambda f: _plural(f.count, "cast"),
            lambda f: (
                f"The same version of a tensor is cast again: {_listed(f.evidence['casts'])}, "
                f"{size(f.evidence['bytes'])} written."
            ),
            "The result exists already.",
            "Cast once, keep the result in a variable and pass it on.",
            "cast once, pass the result",
        ),
        Rule(
            "dtype-round-trip",
            rule_checks.dtype_round_trip,
            lambda f: _plural(f.count, "trip"),
            lambda f: (
                f"A widened tensor is cast straight back: {_listed(f.evidence['casts'])}, "
                f"{size(f.evidence['bytes'])} written."
            ),
            "Widening and narrowing again changes no bit.",
            "Use the tensor as it was.",
            "drop both casts",
        ),
        Rule(
            "full-vocab",
            rule_checks.full_vocab,
            lambda f: _plural(f.count, "tensor"),
            lambda f: (
                f"Saved for the backward: {_listed(f.evidence['shapes'])}, {size(f.evidence['bytes'])} of "
                f"{size(f.evidence['all_saved_bytes'])} that the step saves."
            ),
            "Vocabulary-wide tensors are the peak of the step, and one number per row is what the loss "
            "needs.",
            "leanstep.logprob.linear_logprobs computes log-probs and entropy from the hidden states and "
            "holds one tile.",
            "logprob.linear_logprobs (one tile)",
            "leanstep.logprob.linear_logprobs",
        ),
        Rule(
            "retained-chunks",
            rule_checks.retained_chunks,
            lambda f: _plural(f.count, "chunk"),
            lambda f: (
                f"{_plural(f.count, 'chunk')} of the head's width are kept for the backward "
                f"({_listed(f.evidence['shapes'])}), {size(f.evidence['bytes'])} together."
            ),
            "Chunking saves nothing here: autograd keeps every chunk; recompute in backward.",
            "leanstep.logprob.linear_logprobs recomputes one tile at a time; or run backward() per chunk, "
            "or checkpoint it.",
            "logprob.linear_logprobs (recomputes)",
            "leanstep.logprob.linear_logprobs",
        ),
        Rule(
            "no-grad-vocab",
            rule_checks.no_grad_vocab,
            lambda f: _plural(f.count, "tensor"),
            lambda f: (
                f"Written without gradients: {_listed(f.evidence['shapes'])}, {size(f.evidence['bytes'])} "
                "per step."
            ),
            "Old and reference log-probs and the entropy need one number per row; the logits of all rows, "
            "the prompt's included, are written and read in full.",
            "leanstep.logprob.linear_logprobs(hidden, weight, targets, rows=...) under no_grad gives "
            "log-probs and entropy of the rows that count, and holds one tile.",
            "linear_logprobs(..., rows=...)",
            "leanstep.logprob.linear_logprobs",
        ),
        Rule(
            "no-kv-cache",
            rule_checks.no_kv_cache,
            lambda f: _plural(f.count, "call"),
            lambda f: (
                f"Generation without a KV cache: {_plural(f.count, 'call')} over {f.evidence['positions']:,} "
                f"positions, {f.evidence['computed_again']:,} of which the call before had computed."
            ),
            "Each new token runs the model over the whole sequence; with a cache it runs over one position.",
            "Keep keys and values between calls: use_cache=True in transformers (checkpointing in training "
            "mode switches it off: model.eval() or gradient_checkpointing_disable() for the rollout), "
            "past_key_values in a loop of your own.",
            "keep keys and values: use_cache=True",
        ),
        Rule(
            "no-context",
            rule_checks.no_context,
            lambda f: _plural(f.count, "call"),
            lambda f: (
                f"Generation without context: {_plural(f.count, 'call')} with one token and a KV cache that "
                "is still empty."
            ),
            "The model sees neither the prompt nor the tokens before: what it generates is not its answer. "
            "In transformers, checkpointing in training mode switches off the cache that generate() needs.",
            "model.eval() or gradient_checkpointing_disable() for the rollout, model.train() after it.",
            "model.eval() for the rollout",
        ),
        Rule(
            "unbatched-optimizer",
            rule_checks.unbatched_optimizer,
            lambda f: f"{f.count:,} ops",
            _unbatched,
            "Small updates are all overhead when each parameter gets its own ops.",
            "fused=True (or foreach=True) for torch's optimizers, torch._foreach_* ops in hand-written "
            "updates, leanstep.muon.NorMuon for Muon: it stacks matrices of one shape and multiplies them "
            "together.",
            "fused=True, _foreach_*, or NorMuon",
            "leanstep.muon.NorMuon",
        ),
        Rule(
            "slow-dtype",
            rule_checks.slow_dtype,
            lambda f: _plural(f.count, "matmul"),
            lambda f: (
                f"{_plural(f.count, 'matmul')} in {f.evidence['dtype']}, measured here at "
                f"{f.evidence['gflops_per_s']} GFLOP/s against {f.evidence['fp32_gflops_per_s']} in "
                "float32."
            ),
            "This CPU has no fast instructions for the dtype.",
            "Compute in float32 on this CPU (keep the weights as they are and cast once); leanstep picks "
            "the dtype that way.",
            "compute in float32 on this CPU",
        ),
        Rule(
            "alloc-churn",
            rule_checks.alloc_churn,
            lambda f: f"{f.count:,} buffers",
            lambda f: (
                f"Under no_grad the line makes {f.count:,} fresh buffers of a megabyte or more, "
                f"{size(f.evidence['bytes'])} per step, and drops them."
            ),
            "Every buffer is memory written once more than needed, and work for the allocator.",
            "Work in place (mul_, add_, lerp_, addcmul_) or with out=; fused=True for torch's optimizers.",
            "in place: lerp_, addcmul_, out=",
        ),
        Rule(
            "unused-grad",
            rule_checks.unused_grad,
            lambda f: _plural(f.count, "leaf", "leaves"),
            lambda f: (
                f"{_plural(f.count, 'leaf', 'leaves')} first used here get a gradient "
                f"({size(f.evidence['gradient_bytes'])}) that no optimizer holds."
            ),
            "The backward computes and stores a gradient that is never read.",
            "requires_grad_(False) or torch.no_grad() around it, or add the parameters to an optimizer.",
            "requires_grad_(False), or optimise it",
        ),
        Rule(
            "attention-matrix",
            habit_checks.attention_matrix,
            lambda f: _plural(f.count, "matrix", "matrices"),
            lambda f: (
                f"Attention by hand: a softmax over queries × keys ({_listed(f.evidence['shapes'])}), "
                f"{size(f.evidence['bytes'])} kept for the backward."
            ),
            "Scores, softmax and their gradients are written and read in full; a fused kernel keeps a tile.",
            "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...), or a flex_attention "
            'mask; attn_implementation="sdpa" in transformers, need_weights=False in nn.MultiheadAttention.',
            "F.scaled_dot_product_attention",
        ),
        Rule(
            "gelu-by-hand",
            habit_checks.gelu_by_hand,
            lambda f: f"{f.count:,} ops",
            lambda f: (
                f"An activation out of {f.count // f.evidence['calls']} elementwise ops "
                f"({_listed(f.evidence['ops'])}), {size(f.evidence['bytes'])} moved in the forward alone."
            ),
            "Each op reads and writes the whole activation, and saves some of it for the backward.",
            'torch.nn.functional.gelu(x, approximate="tanh") (or "none" for erf): one op, one saved tensor.',
            'F.gelu(x, approximate="tanh")',
        ),
        Rule(
            "float64",
            habit_checks.float64,
            lambda f: _plural(f.count, "op"),
            lambda f: (
                f"{_plural(f.count, 'op')} in float64 ({_listed(f.evidence['ops'])}), "
                f"{size(f.evidence['bytes'])} written, while parameters are narrower."
            ),
            "NumPy's default dtype comes in with the data, and every op that it meets is widened; GPUs "
            "compute it at a fraction of their float32 rate.",
            "Cast once where it comes in: torch.from_numpy(x.astype(numpy.float32)), or .float(). Where "
            "float64 is wanted, say so: # leanstep: ignore[float64].",
            "cast to float32 where it comes in",
        ),
        Rule(
            "weight-clone",
            habit_checks.weight_clone,
            lambda f: _plural(f.count, "copy", "copies"),
            lambda f: f"{_plural(f.count, 'parameter')} copied, {size(f.evidence['bytes'])} per step.",
            "A copy of the weights is written in every step.",
            "Copy into buffers made once (torch._foreach_copy_), keep the difference instead of two copies, "
            "or copy every k-th step; a reference policy needs one copy for the whole run.",
            "one buffer, _foreach_copy_",
        ),
        Rule(
            "indexed-weight",
            habit_checks.indexed_weight,
            lambda f: _plural(f.count, "look-up"),
            lambda f: (
                f"Rows of a parameter by weight[ids]: {_listed(f.evidence['shapes'])}, "
                f"{size(f.evidence['bytes'])} per step."
            ),
            "The backward of indexing is a general index_put with sums, which sorts the ids on a GPU; "
            "that of an embedding is one kernel.",
            "torch.nn.functional.embedding(ids, weight): the same rows, a cheaper backward.",
            "F.embedding(ids, weight)",
        ),
        Rule(
            "retain-graph",
            habit_checks.retain_graph,
            lambda f: _plural(f.count, "call"),
            lambda f: (
                "backward(retain_graph=True) and no later backward in the step: everything saved stays "
                "until the loss is dropped."
                if f.evidence["needless"]
                else "backward(retain_graph=True): the shared part of the graph is kept and walked again."
            ),
            "Saved tensors outlive the backward, and each further backward repeats the shared part.",
            "Leave retain_graph out; several losses: add them and go backward once.",
            "drop it; add losses, one backward",
        ),
        Rule(
            "growing-memory",
            _no_hits,
            lambda f: (
                f"{f.evidence['graphs']:,} graphs"
                if f.evidence["graphs"]
                else f"{size(f.evidence['bytes_per_step'])} per step"
            ),
            _grown_memory,
            "Memory grows with every step until it is full.",
            "Keep numbers: loss.item(), or loss.detach() where the host must not wait; no_grad() for losses "
            "that are only looked at. Empty a cache or bound its size, and keep a copy of a small slice "
            "(x[0].clone()): a view holds the whole tensor.",
            "loss.detach(); bound what is kept",
            find_over_steps=growth_checks.growing_memory,
        ),
        Rule(
            "growing-step",
            _no_hits,
            lambda f: f"grows over {f.evidence['steps']} steps",
            _grown_step,
            "Each step takes longer than the one before, without an end.",
            "Look for what a step takes over from the one before: a running sum of losses whose backward "
            "walks through all earlier graphs (add loss.detach()), a list or a tensor that is lengthened and "
            "gone through in every step. Where sequences or batches grow on purpose, all is well: "
            "# leanstep: ignore[growing-step].",
            "take over less from step to step",
            find_over_steps=growth_checks.growing_step,
        ),
        Rule(
            "launch-bound",
            rule_checks.launch_bound,
            lambda f: f"{f.count:,} launches",
            lambda f: (
                f"The device is idle for {f.evidence['share']:.0%} of the step between {f.count:,} launches "
                f"of the {f.phase} ({_listed(f.evidence['by'])})."
            ),
            "The device finishes each kernel before the host has launched the next one.",
            'torch.compile, CUDA graphs (mode="reduce-overhead"), larger batches, fused=True optimizers: '
            "fewer launches, each with more to do.",
            "torch.compile, CUDA graphs",
        ),
        Rule(
            "blocking-copy",
            rule_checks.blocking_copy,
            lambda f: _plural(f.count, "copy", "copies"),
            lambda f: (
                f"The host copies {size(f.evidence['bytes'])} to the device and waits until it is there "
                f"({_listed(f.evidence['calls'])})."
            ),
            "Nothing is launched meanwhile, and the device runs dry.",
            "pin_memory=True in the DataLoader and .to(device, non_blocking=True); make constants on the "
            "device.",
            "pin_memory, non_blocking=True",
        ),
        Rule(
            "step-gap",
            rule_checks.step_gap,
            lambda f: _plural(f.count, "gap"),
            lambda f: (
                f"The device is idle for {f.evidence['share']:.0%} of the step while the next batch is made "
                f"({_listed(f.evidence['by'])})."
            ),
            "The loader is slower than the step, or works only when it is asked.",
            "num_workers, prefetch_factor and persistent_workers of the DataLoader, cheaper preparation, "
            "pin_memory.",
            "more workers, prefetching",
        ),
    )
}


def judge(step: StepRecord, limits: Limits, rules: Sequence[str] | None = None) -> Hits:
    """What every rule says about one step."""
    if step.hits is not None:
        return step.hits
    hits = {
        name: {hit.line: hit for hit in rule.find(step, limits[name])}
        for name, rule in RULES.items()
        if rules is None or name in rules
    }
    for line in hits.get("retained-chunks", ()):
        hits.get("full-vocab", {}).pop(line, None)
    for by_line in hits.values():
        for hit in by_line.values():
            hit.compiled = hit.line in step.compiled
    return hits


def find(
    steps: Sequence[StepRecord], limits: Limits | None = None, rules: Sequence[str] | None = None
) -> list[Finding]:
    """The findings that hold on every one of `steps`, in the order of the rules table.

    Where several updates follow a rollout, what only the steps with a rollout show must hold on all of these.
    """
    if not steps:
        return []
    limits = limits or Limits()
    verdicts = [judge(step, limits, rules) for step in steps]
    findings = []
    for name, rule in RULES.items():
        if rules is not None and name not in rules:
            continue
        if rule.find_over_steps is not None:
            findings.extend(_finding(rule, [hit]) for hit in rule.find_over_steps(steps, limits[name]))
            continue
        everywhere = [line for line in verdicts[0][name] if all(line in hits[name] for hits in verdicts)]
        findings.extend(_finding(rule, [hits[name][line] for hits in verdicts]) for line in everywhere)
        for line in _of_rollouts(steps, verdicts, name):
            hits = [v[name][line] for v, step in zip(verdicts, steps, strict=True) if step.has_rollout]
            findings.append(_finding(rule, hits, per_rollout=True))
    advice.fit(findings, steps)
    return findings


def _of_rollouts(steps: Sequence[StepRecord], verdicts: Sequence[Hits], name: str) -> list[Line]:
    """Lines that a rule names on every step with a rollout, and on none of the others."""
    with_rollout = [hits for hits, step in zip(verdicts, steps, strict=True) if step.has_rollout]
    others = [hits for hits, step in zip(verdicts, steps, strict=True) if not step.has_rollout]
    if not with_rollout or not others:
        return []
    return [
        line
        for line in with_rollout[0][name]
        if all(line in hits[name] for hits in with_rollout) and not any(line in h[name] for h in others)
    ]


def _finding(rule: Rule, hits: list[Hit], per_rollout: bool = False) -> Finding:
    counts = [hit.count for hit in hits]
    count = min(counts) if rule.id == "dead-rows" else sorted(counts)[(len(counts) - 1) // 2]
    typical: Any = next(hit for hit in hits if hit.count == count)
    callers: Counter[Line] = Counter(typical.callers)
    confidence = "high" if any(hit.confidence == "high" for hit in hits) else "medium"
    finding = Finding(
        rule=rule.id, line=typical.line, count=count, counts=counts, callers=callers, phase=typical.phase,
        evidence=dict(typical.evidence), work=typical.work, confidence=confidence,
        compiled=any(hit.compiled for hit in hits),
        what="", why=rule.why, fix=rule.fix, short_fix=rule.short_fix, leanstep=rule.leanstep, amount="",
        in_loop=rule.id == "host-sync" and count >= 2, per_rollout=per_rollout,
    )  # fmt: skip
    finding.what, finding.amount = rule.what(finding), rule.amount(finding)
    return finding
