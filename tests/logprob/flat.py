"""The functions with every field of their records as a separate option, for parametrized tests."""

from __future__ import annotations

import functools
import inspect

from leanstep.logprob import LMHead, PolicyBatch, ReferenceHead, Transform, Tuning, VocabShards
from leanstep.logprob import linear as _linear
from leanstep.logprob import logits as _logits
from leanstep.logprob import policy as _policy

FIELDS = {
    "weight": (LMHead, {"bias": "bias", "lora": "lora"}),
    "transform": (Transform, {"scale": "scale", "softcap": "softcap", "label_smoothing": "label_smoothing"}),
    "reference": (ReferenceHead, {"ref_weight": "weight", "ref_hidden": "hidden", "ref_bias": "bias"}),
    "shards": (
        VocabShards,
        {
            "group": "group",
            "start": "start",
            "total": "total",
            "sequence_parallel": "sequence_parallel",
            "reduce_grad": "reduce_grad",
        },
    ),
    "tuning": (
        Tuning,
        {"budget": "budget", "tile": "tile", "save_logits": "save_logits", "main_grad": "main_grad"},
    ),
    "batch": (
        PolicyBatch,
        {n: n for n in ("old_logp", "advantages", "mask", "ref_logp", "sequence_lengths")},
    ),
}


def _flat(function):
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args, **options):
        arguments = dict(zip(names, args, strict=False))
        # Rows per chunk of `token_logprobs`: -1 for all of them, None for the default.
        rows = options.pop("chunk_rows", None)
        if rows is not None:
            options["tile"] = (None if rows == -1 else rows, None)
        for parameter, (record, fields) in FIELDS.items():
            values = {fields[name]: options.pop(name) for name in list(options) if name in fields}
            if values:
                arguments[parameter] = record(
                    *[arguments[parameter]] if parameter in arguments else [], **values
                )
        return function(**arguments, **options)

    return call


linear_logprobs = _flat(_linear.linear_logprobs)
token_logprobs = _flat(_logits.token_logprobs)
linear_policy_loss = _flat(_policy.linear_policy_loss)
