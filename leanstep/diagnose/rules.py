"""The rules: their texts, and the verdict over all recorded steps.

A finding must hold on every recorded step. Its count is the median over the steps. For dead rows it is the
minimum, the only count that is waste on every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leanstep.diagnose import advice, growth_checks, habit_checks, rule_checks
from leanstep.diagnose.step_records import Finding, Hit, Limits, StepRecord
from leanstep.tape.lines import Line
from leanstep.units import about, size

Hits = dict[str, dict[Line, Hit]]


@dataclass(frozen=True)
class Rule:
    """A rule's texts. `what`, `fix` and `amount` are filled in from a finding's evidence."""

    id: str
    find: Callable[[StepRecord, Mapping[str, float]], list[Hit]]
    amount: Callable[[Finding], str]
    what: Callable[[Finding], str]
    why: str
    fix: str
    short_fix: str
    leanstep: str | None = None
    # Replaces `find` in rules that need all steps at once.
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
        ""
        if f.confidence == "high"
        else " The value depends on no parameter, so the host may already have it."
    )
    return f"The host reads a value from the device{loop}: {_listed(f.evidence['kinds'])}.{source}"


def _storm(f: Finding) -> str:
    e = f.evidence
    return (
        f"The line dispatches {e['forward_ops']:,} tiny ops ({_listed(e['repeats'])}) and its backward "
        f"{e['backward_ops']:,} more, on average {size(e['mean_bytes'])} each."
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
            f"The graphs of {e['graphs']:,} earlier steps are still alive: a stored loss holds the graph "
            "that computed it."
        )
    return (
        f"Tensors that this line allocated in {e['steps']:,} earlier steps are still alive: "
        f"{size(e['bytes_per_step'])} per step, {size(e['bytes'])} so far."
    )


def _grown_step(f: Finding) -> str:
    e = f.evidence
    if e["cpu_seconds"] is not None:
        first, last = e["cpu_seconds"]
        return (
            f"From the first third of {e['steps']} steps to the last, the CPU time per step grows from "
            f"{about(first)} to {about(last)}, with the same ops: the growth is in Python code."
        )
    shown = {"ops": "{:,} ops".format, "flops": _gflop, "written_bytes": lambda n: f"{size(n)} written"}
    grown = ", ".join(f"{shown[n](e['first'][n])} → {shown[n](e['last'][n])}" for n in e["grows"])
    return (
        f"From the first third of {e['steps']} steps to the last, each step does more: {grown}. "
        "This line grows most."
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
            "On a GPU each read waits until the device has finished all queued work, and the "
            "queue runs empty.",
            "Keep the value on the device (torch.where, masked arithmetic, precomputed integer row indices) "
            "and read it once after the step, or every k-th step. leanstep.heads.plan_rows turns boolean "
            "masks into integer row indices.",
            "keep on the device; read once per step",
            "leanstep.heads.plan_rows",
        ),
        Rule(
            "op-storm",
            rule_checks.op_storm,
            lambda f: f"{f.count:,} tiny ops",
            _storm,
            "Each op costs microseconds of dispatch (and a launch on a GPU), however little it computes.",
            "Replace the loop by tensor ops over all items at once. leanstep.lens does this for a "
            "controller, leanstep.heads for per-token log-probs.",
            "one tensor op over all items",
        ),
        Rule(
            "dead-rows",
            rule_checks.dead_rows,
            lambda f: f"{f.count:,} of {f.evidence['rows']:,}",
            _dead,
            "Their logits are computed, stored and differentiated, but contribute nothing.",
            "Select the rows before the head: linear_logprobs(hidden, weight, targets, rows=...), or "
            "hidden[rows] with precomputed integer indices.",
            "linear_logprobs(..., rows=...)",
            "leanstep.heads.linear_logprobs",
        ),
        Rule(
            "zero-fill",
            rule_checks.zero_fill,
            lambda f: f"{f.count:,} fills",
            lambda f: (
                f"The backward of this line writes {f.count:,} whole buffers "
                f"({_listed(f.evidence['ops'])}), {size(f.evidence['bytes'])} in total, each for a gradient "
                "at most a quarter of its size."
            ),
            "For each indexed piece, autograd fills a full-size buffer with zeros and then adds all buffers "
            "up.",
            "Take all pieces with one op: unbind, split, or a loss over the whole tensor. For parameter "
            "banks use the accessor of recipes.speedrun, which writes every slice of the gradient once.",
            "unbind/split once; one loss for all",
            "recipes.speedrun",
        ),
        Rule(
            "transposed-copy",
            rule_checks.transposed_copy,
            lambda f: _plural(f.count, "copy", "copies"),
            lambda f: (
                f"{_listed(f.evidence['kinds'])} across memory layouts, {size(f.evidence['bytes'])} per "
                "step: it reads along one axis and writes along the other."
            ),
            "A strided pass is several times slower than a contiguous one, and a matmul accepts either "
            "layout at no cost.",
            "Pass the transposed view to the matmul, and store state in the layout in which it is used. The "
            "transpose-copy and transpose-add kernels of leanstep.muon and recipes.speedrun do the remaining "
            "transposes in tiles.",
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
            "The result already exists.",
            "Cast once, keep the result in a variable and reuse it.",
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
            "Widening and then narrowing changes no bit.",
            "Use the original tensor.",
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
            "Vocabulary-wide tensors set the step's memory peak, and one number per row is all that the loss "
            "needs.",
            "leanstep.heads.linear_logprobs computes log-probs and entropy from the hidden states and "
            "holds one tile of logits.",
            "heads.linear_logprobs (one tile)",
            "leanstep.heads.linear_logprobs",
        ),
        Rule(
            "retained-chunks",
            rule_checks.retained_chunks,
            lambda f: _plural(f.count, "chunk"),
            lambda f: (
                f"{_plural(f.count, 'chunk')} of the head's width are saved for the backward "
                f"({_listed(f.evidence['shapes'])}), {size(f.evidence['bytes'])} in total."
            ),
            "Chunking saves nothing here, because autograd keeps every chunk. Recompute it in the backward.",
            "leanstep.heads.linear_logprobs recomputes one tile at a time; or run backward() per chunk, "
            "or checkpoint it.",
            "heads.linear_logprobs (recomputes)",
            "leanstep.heads.linear_logprobs",
        ),
        Rule(
            "no-grad-vocab",
            rule_checks.no_grad_vocab,
            lambda f: _plural(f.count, "tensor"),
            lambda f: (
                f"Written without gradients: {_listed(f.evidence['shapes'])}, {size(f.evidence['bytes'])} "
                "per step."
            ),
            "Old and reference log-probs and the entropy need one number per row, but the logits of all "
            "rows, including the prompt's, are written and read in full.",
            "leanstep.heads.linear_logprobs(hidden, weight, targets, rows=...) under no_grad returns "
            "log-probs and entropy of the selected rows, and holds one tile of logits.",
            "linear_logprobs(..., rows=...)",
            "leanstep.heads.linear_logprobs",
        ),
        Rule(
            "no-kv-cache",
            rule_checks.no_kv_cache,
            lambda f: _plural(f.count, "call"),
            lambda f: (
                f"Generation without a KV cache: {_plural(f.count, 'call')} over {f.evidence['positions']:,} "
                f"positions, {f.evidence['computed_again']:,} of which the previous call had already "
                "computed."
            ),
            "Each new token runs the model over the whole sequence. With a cache it runs over one position.",
            "Keep keys and values between calls: use_cache=True in transformers (checkpointing in training "
            "mode switches it off: model.eval() or gradient_checkpointing_disable() for the rollout), "
            "past_key_values in your own loop.",
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
            "The model sees neither the prompt nor the previous tokens, so the generated text is "
            "meaningless. In transformers, checkpointing in training mode switches off the cache that "
            "generate() needs.",
            "model.eval() or gradient_checkpointing_disable() for the rollout, model.train() after it.",
            "model.eval() for the rollout",
        ),
        Rule(
            "unbatched-optimizer",
            rule_checks.unbatched_optimizer,
            lambda f: f"{f.count:,} ops",
            _unbatched,
            "When each parameter gets its own ops, small updates are pure overhead.",
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
            "Compute in float32 on this CPU (keep the weights as they are and cast once). leanstep chooses "
            "its compute dtype the same way.",
            "compute in float32 on this CPU",
        ),
        Rule(
            "alloc-churn",
            rule_checks.alloc_churn,
            lambda f: f"{f.count:,} buffers",
            lambda f: (
                f"Under no_grad the line allocates {f.count:,} buffers of a megabyte or more, "
                f"{size(f.evidence['bytes'])} per step, and frees them."
            ),
            "Each one costs an unnecessary memory write and an allocation.",
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
            "Use requires_grad_(False) or torch.no_grad(), or add the parameters to an optimizer.",
            "requires_grad_(False), or optimise it",
        ),
        Rule(
            "attention-matrix",
            habit_checks.attention_matrix,
            lambda f: _plural(f.count, "matrix", "matrices"),
            lambda f: (
                f"Hand-written attention: a softmax over queries × keys ({_listed(f.evidence['shapes'])}), "
                f"{size(f.evidence['bytes'])} saved for the backward."
            ),
            "Scores, softmax and their gradients are written and read in full. A fused kernel holds one "
            "tile.",
            "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...), or a flex_attention "
            'mask; attn_implementation="sdpa" in transformers, need_weights=False in nn.MultiheadAttention.',
            "F.scaled_dot_product_attention",
        ),
        Rule(
            "gelu-by-hand",
            habit_checks.gelu_by_hand,
            lambda f: f"{f.count:,} ops",
            lambda f: (
                f"An activation function built from {f.count // f.evidence['calls']} elementwise ops "
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
                f"{size(f.evidence['bytes'])} written, although the parameters are narrower."
            ),
            "Usually the data has NumPy's default dtype, and every op that uses it is widened. GPUs "
            "compute float64 at a fraction of their float32 rate.",
            "Cast the input once: torch.from_numpy(x.astype(numpy.float32)), or .float(). Where "
            "float64 is intended, add # leanstep: ignore[float64].",
            "cast the input to float32",
        ),
        Rule(
            "weight-clone",
            habit_checks.weight_clone,
            lambda f: _plural(f.count, "copy", "copies"),
            lambda f: f"{_plural(f.count, 'parameter')} copied, {size(f.evidence['bytes'])} per step.",
            "Every step writes a copy of the weights.",
            "Copy into preallocated buffers (torch._foreach_copy_), keep the difference instead of two "
            "copies, or copy every k-th step. A reference policy needs one copy for the whole run.",
            "one buffer, _foreach_copy_",
        ),
        Rule(
            "indexed-weight",
            habit_checks.indexed_weight,
            lambda f: _plural(f.count, "look-up"),
            lambda f: (
                f"Rows of a parameter are read with weight[ids]: {_listed(f.evidence['shapes'])}, "
                f"{size(f.evidence['bytes'])} per step."
            ),
            "The backward of indexing is an accumulating index_put, which sorts the ids on a GPU; "
            "the backward of an embedding is one kernel.",
            "torch.nn.functional.embedding(ids, weight): the same rows, a cheaper backward.",
            "F.embedding(ids, weight)",
        ),
        Rule(
            "retain-graph",
            habit_checks.retain_graph,
            lambda f: _plural(f.count, "call"),
            lambda f: (
                "backward(retain_graph=True) without a later backward in the step: all saved tensors stay "
                "alive until the loss is freed."
                if f.evidence["needless"]
                else "backward(retain_graph=True): the shared part of the graph is kept and traversed again."
            ),
            "Saved tensors outlive the backward, and each further backward repeats the shared part.",
            "Remove retain_graph. With several losses, add them and call backward once.",
            "remove it; add losses, one backward",
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
            "Memory use grows with every step until it runs out.",
            "Store numbers: loss.item(), or loss.detach() where the host must not wait; no_grad() for losses "
            "that are only logged. Clear a cache or limit its size, and store a copy of a small slice "
            "(x[0].clone()): a view holds the whole tensor.",
            "loss.detach(); limit cache sizes",
            find_over_steps=growth_checks.growing_memory,
        ),
        Rule(
            "growing-step",
            _no_hits,
            lambda f: f"grows over {f.evidence['steps']} steps",
            _grown_step,
            "Each step takes longer than the previous one, without limit.",
            "Look for state that a step inherits from the previous one: a running sum of losses whose "
            "backward traverses all earlier graphs (add loss.detach()), or a list or tensor that each step "
            "extends and iterates over. Where sequences or batches grow on purpose, add "
            "# leanstep: ignore[growing-step].",
            "carry less state between steps",
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
            "fewer launches, each with more work.",
            "torch.compile, CUDA graphs",
        ),
        Rule(
            "blocking-copy",
            rule_checks.blocking_copy,
            lambda f: _plural(f.count, "copy", "copies"),
            lambda f: (
                f"The host copies {size(f.evidence['bytes'])} to the device and waits for the copy "
                f"({_listed(f.evidence['calls'])})."
            ),
            "Nothing is launched meanwhile, and the device runs out of work.",
            "pin_memory=True in the DataLoader and .to(device, non_blocking=True); create constants on the "
            "device.",
            "pin_memory, non_blocking=True",
        ),
        Rule(
            "step-gap",
            rule_checks.step_gap,
            lambda f: _plural(f.count, "gap"),
            lambda f: (
                f"The device is idle for {f.evidence['share']:.0%} of the step while the next batch is "
                f"prepared ({_listed(f.evidence['by'])})."
            ),
            "The loader is slower than the step, or does not prefetch.",
            "num_workers, prefetch_factor and persistent_workers of the DataLoader, cheaper preparation, "
            "pin_memory.",
            "more workers, prefetching",
        ),
    )
}


def judge(step: StepRecord, limits: Limits, rules: Sequence[str] | None = None) -> Hits:
    """Return the findings of every rule for one step."""
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
    """Return the findings that hold on every one of `steps`, in the order of the rules table.

    Where several updates follow a rollout, a finding that appears only on steps with a rollout must hold on
    all of these.
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
    """Return the lines that a rule names on every step with a rollout, and on none of the others."""
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
