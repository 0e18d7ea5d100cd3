"""Literal lists of the contract: what `test_contract.py` compares with the package."""

from __future__ import annotations

# command -> its options
OPTIONS = {
    "demo": "--json --out",
    "diagnose": (
        "--all --annotations --baseline --device --explain --fail-on --html --ignore --json --sarif "
        "--select --steps --trace --warmup --write-baseline -m"
    ),
    "fix": "--budget --json --select --write",
    "bench": "--budget --json --no-proof --ranks",
    "prove": "--args --device --drift --invariant --json --ranks --runs --splits --steps --with",
    "rehearse": (
        "--clock --device --eager --host-us --json --machine --nodes --oom --ranks --snapshot --steps "
        "--sweep --timeline -m"
    ),
}

# package -> public names and their signatures
NAMES = {
    "leanstep": {
        "diagnose": "value",
        "heads": "value",
        "lens": "value",
        "muon": "value",
        "prove": "value",
        "masked_token_logprobs": "(hidden, head, tokens, mask=, *, entropy=, temperature=, max_rows=)",
        "model_logprobs": (
            "(model, input_ids, mask=, *, temperature=, entropy=, max_rows=, targets=, logits_to_keep=, "
            "**inputs)"
        ),
        "update": "(*, full=, parts=)",
    },
    "leanstep.heads": {
        "OBJECTIVES": "value",
        "PREFERENCES": "value",
        "DistillLoss": "(loss, divergence, entropy)",
        "Head": "(weight, bias=, lora=, scale=, softcap=)",
        "LoRA": "(down, up, scaling=)",
        "LogProbs": "(logp, entropy, lse, argmax)",
        "PolicyLoss": "(loss, logp, entropy, metrics)",
        "PreferenceLoss": "(loss, logps, ref_logps, metrics)",
        "RowPlan": (
            "(rows, targets_index, resp_index, splits, T_local, select, slots, weights, rows_host, "
            "response_host, spans, prompt_lengths, response_lengths, cp_size, cp_rank, layout)"
        ),
        "TeacherHead": "(hidden, head)",
        "TeacherLogProbs": "(log_probs)",
        "TeacherTopK": "(ids, log_probs, tail=)",
        "gather_response": "(parts, plan, group)",
        "linear_cross_entropy": (
            "(hidden, head, labels, *, ignore_index=, shift=, reduction=, label_smoothing=, z_loss=, rows=,"
            " group=, vocab_total=)"
        ),
        "linear_distill_loss": (
            "(hidden, head, teacher, *, divergence=, temperature=, rows=, row_weights=, normalizer=, group=)"
        ),
        "linear_logprobs": (
            "(hidden, head, targets, *, rows=, temperature=, entropy=, allowed=, group=, vocab_total=, "
            "sequence_parallel=, main_grad=, chunk_rows=)"
        ),
        "linear_policy_loss": (
            "(hidden, head, targets, old_logp, advantages, *, objective=, clip_low=, clip_high=, "
            "dual_clip=, mask=, ref_logp=, kl=, kl_coef=, entropy_coef=, normalizer=, sequence_lengths=, "
            "rows=, temperature=, entropy=, group=, vocab_total=)"
        ),
        "linear_preference_loss": (
            "(hidden, head, labels, *, objective=, beta=, gamma=, label_smoothing=, nll_coef=, reference=, "
            "desirable=, kl=, desirable_weights=, nll_labels=, ignore_index=, group=, vocab_total=)"
        ),
        "masked_token_logprobs": "(hidden, head, tokens, mask=, *, entropy=, temperature=, max_rows=)",
        "next_token_targets": "(tokens, *, ignore_index=)",
        "place_response": "(parts, plan)",
        "plan_rows": (
            "(total_lengths, response_lengths, *, layout=, cp_size=, cp_rank=, local_len=, max_seq_len=, "
            "pad_multiple=, loss_masks=, select=, device=)"
        ),
        "policy_loss": (
            "(logp, old_logp, advantages, *, objective=, clip_low=, clip_high=, dual_clip=, mask=, "
            "ref_logp=, kl=, kl_coef=, entropy=, entropy_coef=, normalizer=, sequence_lengths=)"
        ),
        "return_parts": "(plan, group, *values)",
        "rowwise": "(fn, hidden, head, *per_row, rows=)",
        "select_allowed": "(ids, offsets, plan)",
        "slice_response": "(responses, plan)",
        "token_logprobs": (
            "(logits, targets, *, rows=, temperature=, entropy=, allowed=, group=, vocab_total=, "
            "chunk_rows=, reuse_buffer=)"
        ),
    },
    "leanstep.muon": {
        "NEWTON_SCHULZ": "value",
        "POLAR_EXPRESS": "value",
        "NorMuon": (
            "(params, lr=, *, momentum=, nesterov=, beta2=, variance=, weight_decay=, decay=, lr_mul=, "
            "wd_mul=, lr_rule=, layout=, flatten=, split=, split_dim=, heads=, coefficients=, eps_mode=, "
            "compute_dtype=, residual=, nonfinite=, adam=, mesh=, averaged=)"
        ),
        "from_master": "(master, mode=)",
        "momentum_polar": (
            "(grad, momentum_buffer, momentum=, *, nesterov=, coefficients=, eps_mode=, compute_dtype=)"
        ),
        "polar": "(update, *, coefficients=, eps_mode=, compute_dtype=)",
        "split_params": "(model, rule=, *, muon=, adam=, algorithm=)",
        "to_master": "(weight, residual, mode=)",
        "transpose_add": "(src, dst)",
        "transpose_copy": "(src, dst=)",
        "unbind_bank": "(bank)",
    },
    "leanstep.lens": {
        "AsyncLens": "(controller, loss, *, max_staleness=, device=)",
        "ContextCache": "()",
        "GateConfig": "(every=, unit=, mode=)",
        "LensBatch": "(pos, lod, valid, loss, row, tokens, baseline, num_tokens, counts=)",
        "LensConfig": "(block_size=, max_lod=, objective=, sampling=, gate=)",
        "LensMetrics": "(scores, batch, config, pairs, kept, targets, terms, loss, state, extra=)",
        "LensObjective": "(config)",
        "LensResult": "(loss, terms=, kept=, active=, state=, pairs=, metrics=, scores=)",
        "ObjectiveConfig": (
            "(lens_loss_weight=, rank_weight=, margin=, budget_weight=, budget_smooth_weight=, "
            "budget_smooth_beta=, kl_weight=, coverage_weight=, coverage_target=, coverage_capacity=, "
            "temperature=, collapse_weight=, form=, hinge_margin=, normalize=)"
        ),
        "SamplingConfig": (
            "(num_random_variants=, recent_tokens=, max_pairs=, hard_negative_ratio=, pair_sampling=, "
            "pairs_sampled=, pairs_per_variant=, span_sampling=, span_k=, span_stride=, aux_on_full=)"
        ),
        "Variant": "(positions, lods, loss=, is_baseline=)",
        "check_variant_counts": "(counts, micro_batch, n_random, *, max_pairs=, num_pairs=)",
        "coverage": "(scores, batch, config)",
        "lens_loss": (
            "(scores, batch, config, *, state=, prev_scores=, prev_valid=, pair_order=, terms=, generator=)"
        ),
        "lens_loss_reference": (
            "(scores, batch, config, *, state=, prev_scores=, prev_valid=, pair_order=, terms=)"
        ),
        "proxy_loss": "(scores, batch, config, kind=, *, teacher=, entries_per_context=, generator=)",
    },
    "leanstep.diagnose": {
        "RULE_IDS": "value",
        "Finding": (
            "(rule, line, count, counts, callers, phase, evidence, work, confidence, compiled, what, why, "
            "fix, short_fix, leanstep, amount, in_loop=, per_rollout=, seconds=, seconds_range=, bytes=, "
            "share=, basis=, rank=, baselined=)"
        ),
        "Limits": "(changes=)",
        "Watch": "(steps=, warmup=, limits=, *, timed_warmup=, on_done=, timed=)",
        "step": "()",
        "watch": "(steps=, warmup=, limits=)",
    },
    "leanstep.prove": {
        "prove_functions": "(before, after, inputs=, *, device=, proof=)",
        "row_invariance": "(function, *args, name=, module=, **kwargs)",
        "same_update": "(step, cuts, *, dropout=)",
        "update": "(*, full=, parts=)",
    },
    "leanstep.rehearse": {
        "register_cost": "(name, cost)",
    },
    "leanstep.integrations.trl": {
        "LeanDPOTrainer": "(*args, allow_untested=, **kwargs)",
        "LeanGRPOTrainer": "(*args, allow_untested=, **kwargs)",
        "LeanKTOTrainer": "(*args, allow_untested=, **kwargs)",
        "LeanSFTTrainer": "(*args, allow_untested=, **kwargs)",
        "apply_leanstep": "(trainer, *, allow_untested=, check=)",
    },
    "leanstep.integrations.modded_nanogpt": {
        "XTX": "(A, out)",
        "XXT": "(A, out)",
        "ba_plus_cAA": "(A, alpha, beta, out)",
        "polar_express": "(grad_chunk, momentum_buffer, momentum_t, split_baddbmm=)",
        "transpose_add": "(src, dst)",
        "transpose_copy": "(src, dst=)",
        "unbind_bank": "(bank)",
    },
    "leanstep.integrations.transformers": {
        "LeanTrainer": "(*args, allow_untested=, **kwargs)",
        "apply_leanstep": "(model, *, allow_untested=, check=)",
        "norm_muon": "(model, lr=, **options)",
    },
    "leanstep.integrations.verl": {
        "apply_leanstep": "(*modules, allow_untested=)",
    },
    "leanstep.integrations.megatron": {
        "HiddenOutput": "(layer)",
        "apply_leanstep": "(output_layer)",
        "output_layer_logprobs": "(hidden, output_layer, targets, *, weight=, vocab_total=, **options)",
        "output_processor": (
            "(*, hidden_states, output_layer, output_weight, labels, loss_mask=, context=, config=, **_)"
        ),
        "vocab_parallel_logprobs": "(logits, targets, *, vocab_total=, **options)",
    },
    "leanstep.integrations.slime": {
        "apply_leanstep": "(args)",
        "parse_args": "(add_custom_arguments=)",
    },
    "leanstep.integrations.megacontext": {
        "apply_leanstep": "(runtime, *, sampling=, gate=)",
        "lens_batch": "(controller, batch_states)",
        "lens_config": "(controller)",
        "read_metrics": "(controller)",
    },
    "leanstep.integrations.callbacks": {
        "LeanstepCallback": "(steps=, warmup=, **options)",
        "LeanstepLightning": "(steps=, warmup=, **options)",
        "recorded": "(batches, *, steps=, warmup=, **options)",
    },
}
