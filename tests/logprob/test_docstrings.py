"""Every public function of logprob documents what it computes: shapes, and equivalent code that runs."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from docstring_code import code_blocks

import leanstep.logprob as package

FUNCTIONS = [n for n in package.__all__ if inspect.isfunction(getattr(package, n))]
RECORDS = [n for n in package.__all__ if inspect.isclass(getattr(package, n))]
# They count; there is nothing to compute beside them.
SIZES = {"choose_tiles"}
# What the code of a docstring must have computed; the names are those of the docstring and of `world`.
CLOSE = "torch.allclose({}, {}, atol=1e-5)".format
MEANS = {
    "full_loss_mask": "full.equal(full_loss_mask([mask], [L], [R]))",
    "gather_response": "all(a.equal(b) for a, b in zip(whole, gather_response(parts, one_plan, None)))",
    "gather_vocab_starts": "starts == gather_vocab_starts(width, None)",
    "linear_logprobs": CLOSE("logp", "linear_logprobs(hidden, LMHead(weight, bias), targets, rows=rows).logp")
    + " and "
    + CLOSE(
        "entropy",
        "linear_logprobs(hidden, LMHead(weight, bias), targets, rows=rows, entropy='metric').entropy",
    ),
    "linear_policy_loss": CLOSE(
        "value.loss", "linear_policy_loss(hidden, weight, targets, batch, rows=rows).loss"
    ),
    "masked_token_logprobs": CLOSE(
        "logp", "masked_token_logprobs(padded_hidden, weight, padded, padded_mask)"
    ),
    "next_token_targets": "(rows.equal(pair[0]) and targets.equal(pair[1]))",
    "plan_rows": "rows.equal(one_plan.rows) and targets.equal(one_plan.targets(tokens))",
    "policy_loss": CLOSE("loss", "policy_loss(logp, old_logp, advantages).loss"),
    "return_parts": "all(a.equal(b) for a, b in zip(parts[0], return_parts(plan, None, *values)[0]))",
    "sample_mean": CLOSE("share", "sample_mean(values, masked_plan).float()"),
    "select_allowed": "all(a.equal(b) for a, b in zip(allowed, select_allowed(ids, offsets, one_plan)))",
    "select_rows": "select == select_rows(response_only, loss_mask_only)",
    "slice_response": "all(a.equal(b) for a, b in zip(parts, slice_response(responses, plan)))",
    "token_logprobs": CLOSE("logp", "token_logprobs(logits, targets).logp")
    + " and "
    + CLOSE("entropy", "token_logprobs(logits, targets, entropy='metric').entropy"),
}


def world(name: str) -> dict[str, object]:
    """Names that the docstrings use."""
    g = torch.Generator().manual_seed(0)
    L, R, V, D = 9, 5, 11, 6
    tokens = torch.randint(V, (L,), generator=g)
    mask = torch.tensor([1, 0, 1, 1, 1])
    names: dict[str, object] = {n: getattr(package, n) for n in package.__all__}
    rows = torch.tensor([0, 2, 3, 7])
    names |= {"torch": torch, "L": L, "R": R, "mask": mask, "width": V, "tokens": tokens, "temperature": 1.0}
    names |= {"response_only": True, "loss_mask_only": False, "rows": rows}
    names |= {"hidden": torch.randn(L, D, generator=g), "weight": torch.randn(V, D, generator=g)}
    names |= {"bias": torch.randn(V, generator=g), "targets": torch.randint(V, (4,), generator=g)}
    names |= {"logits": torch.randn(4, V, generator=g), "padded": torch.randint(V, (2, L), generator=g)}
    names |= {"padded_mask": torch.rand(2, L, generator=g) > 0.5}
    names |= {"padded_hidden": torch.randn(2, L, D, generator=g)}
    names |= {k: torch.randn(4, generator=g) for k in ("logp", "old_logp", "advantages")}
    names["batch"] = package.PolicyBatch(
        names["old_logp"], names["advantages"], mask=torch.tensor([1, 1, 0, 1])
    )
    # The second of two context-parallel ranks, and one rank with one sample and with masks.
    names["plan"] = package.plan_rows([L, 8], [R, 3], layout="zigzag", cp_size=2, cp_rank=1)
    names["responses"] = [torch.randn(R, generator=g), torch.randn(3, generator=g)]
    names["values"] = [torch.randn(names["plan"].num_rows, generator=g)]
    names["one_plan"] = package.plan_rows([L], [R])
    names["parts"] = [torch.randn(R, generator=g)]
    names |= {"ids": [[3, 1, 4, 1, 5, 9]], "offsets": [[0, 1, 3, 3, 5, 6]]}
    if name == "sample_mean":
        names["loss_masks"] = [mask, torch.tensor([0, 1, 1])]
        names["masked_plan"] = package.plan_rows([L, 8], [R, 3], loss_masks=names["loss_masks"])
        names["values"] = names["responses"]
    if name == "next_token_targets":
        names |= {"B": 3, "S": 5, "tokens": torch.randint(V, (3, 5), generator=g)}
        names["pair"] = package.next_token_targets(names["tokens"])
    return names


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - SIZES))
def test_code_of_a_docstring_means_the_same(name):
    blocks = code_blocks(inspect.getdoc(getattr(package, name)) or "")
    assert blocks, f"{name}: no Equivalent"
    names = world(name)
    for block in blocks:
        lines = block.strip().splitlines()
        # A bare last expression is the value.
        if not re.match(r"[\w, ]+ = ", lines[-1]):
            lines[-1] = f"value = {lines[-1]}"
        exec("\n".join(lines), names)
    assert eval(MEANS[name], names), name


@pytest.mark.parametrize("name", FUNCTIONS + RECORDS)
def test_public_name_has_a_docstring_of_its_own_with_shapes(name):
    doc = inspect.getdoc(getattr(package, name)) or ""
    assert doc and not doc.startswith(f"{name}("), f"{name} has no docstring of its own"
    numbers_only = {"PolicyObjective", "Tiles", "Transform", "select_rows"}
    numbers_only |= {"choose_tiles", "CovarianceChoice"}
    named = name in numbers_only or re.search(r"\[[A-Z0-9n]|\[ranks|0-dimensional|scalar|\[T", doc)
    assert named or "total_lengths" in doc, f"{name}: no shape"
