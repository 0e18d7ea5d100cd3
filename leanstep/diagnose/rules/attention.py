"""Attention written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from leanstep.diagnose.findings import Hit, Rule, Work, callers_of, listed, plural
from leanstep.diagnose.step import Op, Step, grouped, shape_text
from leanstep.tape.events import FORWARD, RECOMPUTE
from leanstep.units import size

# Fewer queries or keys are a set of experts or heads.
MIN_TOKENS = 64
# Smaller ops do not matter.
MIN_BYTES = 16 * 1024


def attention_matrix(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find a softmax over a product of queries and keys: T x T numbers per head are written and saved."""
    for line, ops in grouped(_softmaxes(step), lambda op: op.site).items():
        num_bytes = sum(op.outs[0].num_bytes for op in ops)
        # torch's own attention falls back to this on a CPU (dropout, a mask with a gradient), but not on a
        # GPU.
        if num_bytes < limits["bytes"] or "scaled_dot_product_attention" in line.statement:
            continue
        shapes = Counter(shape_text(op.outs[0]) for op in ops)
        evidence = {"shapes": dict(shapes.most_common(3)), "bytes": num_bytes}
        # Scores and softmax, and their gradients: each is written and read at least once.
        work = Work(moved_bytes=8 * num_bytes, held_bytes=num_bytes)
        yield Hit(line, len(ops), callers_of(op.site for op in ops), FORWARD, evidence, work)


def _softmaxes(step: Step) -> Iterator[Op]:
    """Return the softmaxes over products of two activations, or over elementwise results of them."""
    # Storage of scores -> number of keys.
    scores: dict[int, int] = {}
    for op in step.ops:
        if not op.direct or op.phase not in (FORWARD, RECOMPUTE) or not op.outs or not op.tensors:
            continue
        out = op.outs[0]
        if op.matmul is not None:
            of_weight = step.heads.weight_of(op.factors[1]) is not None
            keys = op.matmul.columns
            if op.matmul.batch > 1 and not of_weight and op.phase == FORWARD and op.event.grad:
                if keys >= MIN_TOKENS:
                    scores[out.storage] = keys
            continue
        keys = scores.get(op.tensors[0].storage, 0)
        if not keys or op.written_bytes < MIN_BYTES or op.in_leanstep or out.shape[-1:] != (keys,):
            continue
        scores[out.storage] = keys
        if op.name == "_softmax" and out.shape[-2] >= MIN_TOKENS:
            yield op


ATTENTION_MATRIX = Rule(
    "attention-matrix",
    attention_matrix,
    limits={"bytes": 4 * 1024 * 1024},
    fires_when="a softmax over queries × keys (each ≥ 64) saves ≥ 4 MiB on a line",
    what=lambda f: (
        f"Hand-written attention: a softmax over queries × keys ({listed(f.evidence['shapes'])}), "
        f"{size(f.evidence['bytes'])} saved for the backward."
    ),
    amount=lambda f: plural(f.count, "matrix", "matrices"),
    why="Scores, softmax and their gradients are written and read in full. A fused kernel holds one tile.",
    fix="torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...), or a flex_attention "
    'mask; attn_implementation="sdpa" in transformers, need_weights=False in nn.MultiheadAttention.',
    short_fix="F.scaled_dot_product_attention",
    compiled="saved",
)
