"""One script per workload: plain code, leanstep, other libraries and the limit, measured interleaved."""

BENCHMARKS = (
    "bank_access",
    "distill",
    "dpo",
    "gpt_step",
    "grpo_step",
    "lens_loss",
    "lens_step",
    "logprob_linear",
    "logprob_logits",
    "masked_head",
    "muon_step",
    "polar",
    "policy_loss",
    "sft_step",
    "transpose_add",
    "transpose_copy",
)
