"""Context-specific advice: what a user can change from their own line, in their kind of script.

Each entry names what is available there: a trainer class where a trainer runs the step, a function where the
user writes the loop. `fit` puts the first matching entry into a finding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from leanstep.diagnose.step_records import Finding, StepRecord
from leanstep.tape.lines import Line, short_path

HEAD_RULES = ("dead-rows", "full-vocab", "retained-chunks")
ALL_HEAD_RULES = (*HEAD_RULES, "no-grad-vocab")
TRANSFORMERS, TRL = "transformers/", "trl/"
# Replaces a loss that transformers computes from labels.
APPLY = "leanstep.integrations.transformers.apply_leanstep"
# The user's line that starts a trainer's loop.
_TRAINER_CALL = re.compile(r"\.train\(")


@dataclass(frozen=True)
class Surroundings:
    """The kind of script that the findings are in.

    trainer: a Trainer runs the step. model_in: the package whose code multiplies by the head, "" for the
    user's own. has_labels: transformers computes the loss. is_rl: the script generates its training data.
    """

    trainer: bool = False
    model_in: str = ""
    has_labels: bool = False
    is_rl: bool = False


def surroundings(steps: Sequence[StepRecord], findings: Sequence[Finding]) -> Surroundings:
    heads = [site for step in steps for site, head in step.heads.items() if head.width == step.head_width]
    lines = [site.line for site in heads] + [f.line for f in findings if f.rule in ALL_HEAD_RULES]
    callers = [site.caller for site in heads if site.caller is not None]
    callers += [caller for finding in findings for caller in finding.callers]
    packages = [package for package in (TRANSFORMERS, TRL) if any(_is_in(line, package) for line in lines)]
    return Surroundings(
        trainer=any(_TRAINER_CALL.search(caller.statement) for caller in callers),
        model_in=packages[0] if packages else "",
        has_labels=any(_is_in(line, f"{TRANSFORMERS}loss/") for line in lines),
        is_rl=any(step.has_rollout for step in steps),
    )


def _is_in(line: Line, package: str) -> bool:
    return line.library and short_path(line.file).startswith(package)


@dataclass(frozen=True)
class Advice:
    """Advice for findings of `rules` in files that start with `package`, on lines that contain one of `code`.

    trainer, model_in, has_labels, is_rl: the required kind of script; None matches any.
    """

    rules: tuple[str, ...]
    fix: str
    short_fix: str
    package: str = ""
    code: tuple[str, ...] = ("",)
    leanstep: str | None = None
    trainer: bool | None = None
    model_in: str | None = None
    has_labels: bool | None = None
    is_rl: bool | None = None

    def fits(self, finding: Finding, around: Surroundings) -> bool:
        wanted = ("trainer", "model_in", "has_labels", "is_rl")
        if any(getattr(self, name) not in (None, getattr(around, name)) for name in wanted):
            return False
        if self.package and not _is_in(finding.line, self.package):
            return False
        lines = [finding.line, *finding.callers]
        return finding.rule in self.rules and any(
            word in near.statement or word in short_path(near.file) for near in lines for word in self.code
        )


# All rows are dead: (what, fix, short fix).
NO_GRADIENT = (
    "Every row of the head gets a gradient of exactly zero: the loss has no gradient (advantages are all "
    "zero).",
    "Check the loss first: equal rewards within a group give zero advantages, and a mask that selects "
    "nothing gives a zero loss. Skip such a batch before the forward pass, or vary the rewards.",
    "the loss has no gradient (advantages are all zero)",
)
ADVICE = (
    Advice(
        HEAD_RULES,
        "Call leanstep.integrations.trl.apply_leanstep(trainer) before train(), or prefix the trainer's "
        "class with Lean (LeanSFTTrainer, LeanDPOTrainer, LeanGRPOTrainer, LeanKTOTrainer). Without Triton "
        "TRL also scores the prompt's rows; with leanstep they never reach the head.",
        "integrations.trl.apply_leanstep(trainer)",
        package="trl/",
        leanstep="leanstep.integrations.trl.apply_leanstep",
    ),
    Advice(
        ALL_HEAD_RULES,
        "Use LeanTrainer of leanstep.integrations.transformers instead of Trainer, or call its "
        "apply_leanstep(model) once. Rows with label -100 then never reach the head, and only one tile of "
        "logits is held.",
        "LeanTrainer or apply_leanstep(model)",
        leanstep="leanstep.integrations.transformers.LeanTrainer",
        trainer=True,
        model_in=TRANSFORMERS,
    ),
    Advice(
        HEAD_RULES,
        "Call leanstep.integrations.transformers.apply_leanstep(model) once, before the loop: model(..., "
        "labels=...) then returns the same loss, rows with label -100 never reach the head, and only one "
        "tile of logits is held.",
        "apply_leanstep(model) before the loop",
        leanstep=APPLY,
        model_in=TRANSFORMERS,
        has_labels=True,
    ),
    Advice(
        ALL_HEAD_RULES,
        "Call leanstep.model_logprobs(model, input_ids, mask, attention_mask=...) instead of "
        "model(...).logits, log_softmax and gather: log-probs (and entropy) [B, T - 1] of the tokens that "
        "the mask selects. Other rows never reach the head, and only one tile of logits is held. Old and "
        "reference log-probs: the same call under no_grad.",
        "leanstep.model_logprobs(model, ids, mask)",
        leanstep="leanstep.model_logprobs",
        model_in=TRANSFORMERS,
    ),
    Advice(
        ALL_HEAD_RULES,
        "Call leanstep.masked_token_logprobs(hidden, head, tokens, mask) on the head's input: log-probs (and "
        "entropy) [B, T - 1] of the tokens that the mask selects. Other rows never reach the head, and only "
        "one tile of logits is held.",
        "masked_token_logprobs(hidden, head, …)",
        leanstep="leanstep.masked_token_logprobs",
        model_in="",
        is_rl=True,
    ),
    Advice(
        HEAD_RULES,
        "Call leanstep.heads.linear_cross_entropy(hidden, head, labels) on the head's input: it returns "
        "the same loss, rows with label -100 never reach the head, and only one tile of logits is held.",
        "linear_cross_entropy(hidden, head, …)",
        leanstep="leanstep.heads.linear_cross_entropy",
        code=("cross_entropy(",),
        model_in="",
    ),
    Advice(
        ("host-sync",),
        "The trainer reads the loss on every step to keep NaN out of its logs: "
        "TrainingArguments(logging_nan_inf_filter=False) leaves the value on the device.",
        "logging_nan_inf_filter=False",
        package=f"{TRANSFORMERS}trainer",
        code=("isnan(", "isinf("),
    ),
    Advice(
        ("host-sync",),
        "generate() checks after every token whether all sequences have ended. The trainer's use_vllm=True "
        "generates with a server instead.",
        "generate with a server (use_vllm)",
        package=TRANSFORMERS,
        code=("unfinished_sequences",),
        trainer=True,
    ),
    Advice(
        ("host-sync",),
        "generate() checks after every token whether all sequences have ended. That is part of generate(); "
        "fewer calls with more sequences each share the reads.",
        "part of generate(): one per token",
        package=TRANSFORMERS,
        code=("unfinished_sequences",),
    ),
    Advice(
        ("host-sync",),
        "transformers checks whether the attention mask masks anything. Leave attention_mask out where "
        "nothing is padded; with padding the read is part of the library.",
        "no attention_mask where nothing is padded",
        package=f"{TRANSFORMERS}masking_utils",
    ),
    Advice(
        ("host-sync",),
        "Tokens must be on the host to become text. batch_decode() copies them once per call, so the only "
        "saving left is to call it for more sequences at once.",
        "needed: text is decoded on the host",
        package=f"{TRANSFORMERS}tokenization",
        code=("batch_decode(",),
    ),
    Advice(
        ("host-sync",),
        "Tokens are copied to the host for decoding: decode all sequences with one batch_decode().",
        "one batch_decode() for all sequences",
        package=f"{TRANSFORMERS}tokenization",
    ),
    Advice(
        ("host-sync",),
        "The trainer reads it, mostly for logging. A larger logging_steps reads less often where the code "
        "respects it, and a callback can drop unused metrics.",
        "the trainer's read: log less often",
        package=f"{TRANSFORMERS}trainer",
    ),
    Advice(
        ("host-sync",),
        "The trainer reads it, mostly for logging. A larger logging_steps reads less often where the code "
        "respects it.",
        "the trainer's read: log less often",
        package=TRL,
    ),
    Advice(
        ("host-sync",),
        "The library reads it in its own code; from the calling line, only fewer calls help.",
        "the library's own read: fewer calls",
        package=TRANSFORMERS,
    ),
    Advice(
        ("host-sync",),
        "The loop checks after every token whether all sequences have ended. Check every k-th token instead: "
        "a few extra tokens are generated and dropped, and the device does not wait.",
        "check every k-th token",
        code=("finished.all(", "done.all(", "ended.all(", "eos).all("),
        is_rl=True,
    ),
    Advice(
        ("host-sync",),
        "Every parameter and buffer is copied to the host one at a time. Where memory allows, keep the "
        "model on the device, or copy into pinned memory: tensor.to(device, non_blocking=True).",
        "keep it on the device, or pinned memory",
        code=(".cpu()", '.to("cpu")', ".to('cpu')"),
    ),
    Advice(
        ("unbatched-optimizer",),
        "The trainer creates the optimizer: --optim adamw_torch_fused, or TrainingArguments("
        'optim="adamw_torch_fused").',
        "--optim adamw_torch_fused",
        code=("optimizer.step(",),
        trainer=True,
    ),
    Advice(
        ("unbatched-optimizer", "alloc-churn"),
        "zero_grad(set_to_none=True), the default since torch 2.0, writes nothing. Zeros are written one "
        "gradient at a time.",
        "zero_grad(set_to_none=True)",
        code=("zero_grad(",),
    ),
    Advice(
        ("unbatched-optimizer", "alloc-churn"),
        "clip_grad_norm_(..., foreach=True) computes norms and scales gradients in a few calls. Where the "
        "norm is only logged, compute it every k-th step.",
        "clip_grad_norm_(..., foreach=True)",
        code=("clip_grad_norm_(", "clip_grad_value_("),
    ),
)  # fmt: skip


def fit(findings: Sequence[Finding], steps: Sequence[StepRecord]) -> None:
    """Replace the advice of each finding by the first entry that matches its context, if any."""
    around = surroundings(steps, findings)
    for finding in findings:
        if finding.rule == "dead-rows" and finding.count == finding.evidence["rows"]:
            finding.what, finding.fix, finding.short_fix = NO_GRADIENT
            finding.leanstep = None
            continue
        for advice in ADVICE:
            if advice.fits(finding, around):
                finding.fix, finding.short_fix = advice.fix, advice.short_fix
                finding.leanstep = advice.leanstep
                break
