"""Advice that fits the place: inside somebody else's trainer a rule's general advice cannot be followed.

Each entry names what a user can change from their own line. `fit` puts the first that matches into a finding.
"""

from __future__ import annotations

from dataclasses import dataclass

from leanstep.diagnose.step_records import Finding
from leanstep.script.lines import short_path

HEAD_RULES = ("dead-rows", "full-vocab", "retained-chunks")


@dataclass(frozen=True)
class Advice:
    """For findings of `rules` in files that start with `package`, on lines that contain one of `code`."""

    rules: tuple[str, ...]
    fix: str
    short_fix: str
    package: str = ""
    code: tuple[str, ...] = ("",)
    leanstep: str | None = None

    def fits(self, finding: Finding) -> bool:
        line = finding.line
        lines = [line, *finding.callers]
        if self.package and not (line.library and short_path(line.file).startswith(self.package)):
            return False
        return finding.rule in self.rules and any(
            word in near.statement for near in lines for word in self.code
        )


# All rows are dead: (what, fix, short fix).
NO_GRADIENT = (
    "Every row of the head gets a gradient of exactly zero: the loss has no gradient (advantages are all "
    "zero).",
    "Look at the loss first: equal rewards within a group give advantages of zero, and a mask that selects "
    "nothing gives a loss of zero. Skip such a batch before the forward pass, or vary the rewards.",
    "the loss has no gradient (advantages are all zero)",
)
ADVICE = (
    Advice(
        HEAD_RULES,
        "leanstep.integrations.trl.apply_leanstep(trainer) before train(), or the trainer's class with Lean "
        "before its name (LeanSFTTrainer, LeanDPOTrainer, LeanGRPOTrainer, LeanKTOTrainer). Without Triton "
        "TRL scores the prompt's rows as well; then they never meet the head.",
        "integrations.trl.apply_leanstep(trainer)",
        package="trl/",
        leanstep="leanstep.integrations.trl.apply_leanstep",
    ),
    Advice(
        HEAD_RULES,
        "leanstep.integrations.transformers: LeanTrainer in place of Trainer, or apply_leanstep(model) "
        "once. Rows with label -100 then never meet the head, and one tile of logits is held.",
        "LeanTrainer or apply_leanstep(model)",
        package="transformers/",
        leanstep="leanstep.integrations.transformers.LeanTrainer",
    ),
    Advice(
        ("host-sync",),
        "The trainer looks at the loss on every step to keep NaN out of its logs: "
        "TrainingArguments(logging_nan_inf_filter=False) leaves the value on the device.",
        "logging_nan_inf_filter=False",
        package="transformers/",
        code=("isnan(", "isinf("),
    ),
    Advice(
        ("host-sync",),
        "A look at every generated token, to see whether all sequences have ended: generate with a server "
        "(use_vllm=True), or with fewer and longer calls.",
        "generate with a server (use_vllm)",
        package="transformers/",
        code=("unfinished_sequences",),
    ),
    Advice(
        ("host-sync",),
        "The library reads it, mostly to log: a larger logging_steps reads less often where its code asks "
        "for that, and a callback can drop metrics that nobody looks at.",
        "the library's read: log less often",
        package="transformers/",
    ),
    Advice(
        ("host-sync",),
        "The library reads it, mostly to log: a larger logging_steps reads less often where its code asks "
        "for that.",
        "the library's read: log less often",
        package="trl/",
    ),
    Advice(
        ("unbatched-optimizer", "alloc-churn"),
        "zero_grad(set_to_none=True), the default since torch 2.0, writes nothing; zeros are written one "
        "gradient at a time.",
        "zero_grad(set_to_none=True)",
        code=("zero_grad(",),
    ),
    Advice(
        ("unbatched-optimizer", "alloc-churn"),
        "clip_grad_norm_(..., foreach=True) takes norms and scales in a few calls; where the norm is only "
        "logged, take it every k-th step.",
        "clip_grad_norm_(..., foreach=True)",
        code=("clip_grad_norm_(", "clip_grad_value_("),
    ),
)  # fmt: skip


def fit(finding: Finding) -> None:
    """Replace the advice of a finding by one that its user can follow, where there is one."""
    if finding.rule == "dead-rows" and finding.count == finding.evidence["rows"]:
        finding.what, finding.fix, finding.short_fix = NO_GRADIENT
        finding.leanstep = None
        return
    for advice in ADVICE:
        if advice.fits(finding):
            finding.fix, finding.short_fix, finding.leanstep = advice.fix, advice.short_fix, advice.leanstep
            return
