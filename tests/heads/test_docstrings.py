"""Every public function of heads documents what it computes: shapes, and equivalent code that runs."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from docstring_code import code_blocks

import leanstep.heads as package

FUNCTIONS = [n for n in package.__all__ if inspect.isfunction(getattr(package, n))]
RECORDS = [n for n in package.__all__ if inspect.isclass(getattr(package, n))]
# What the code of a docstring must have computed; the names are those of the docstring and of `world`.
CLOSE = "torch.allclose({}, {}, atol=1e-5)".format
MEANS = {
    "gather_response": "all(a.equal(b) for a, b in zip(whole, gather_response(parts, one_plan, None)))",
    "linear_cross_entropy": CLOSE("loss", "linear_cross_entropy(hidden, weight, labels)"),
    "linear_distill_loss": CLOSE("loss", "linear_distill_loss(hidden, weight, teacher, rows=rows).loss"),
    "linear_logprobs": CLOSE("logp", "linear_logprobs(hidden, weight, targets, rows=rows).logp")
    + " and "
    + CLOSE("entropy", "linear_logprobs(hidden, weight, targets, rows=rows, entropy='metric').entropy"),
    "linear_policy_loss": CLOSE(
        "value.loss",
        "linear_policy_loss(hidden, head, targets, old_logp, advantages, rows=rows, mask=mask).loss",
    ),
    "linear_preference_loss": CLOSE(
        "loss", "linear_preference_loss(hidden, head, labels, reference=reference).loss"
    ),
    "masked_token_logprobs": CLOSE(
        "logp", "masked_token_logprobs(padded_hidden, weight, padded, padded_mask)"
    ),
    "next_token_targets": "(rows.equal(pair[0]) and targets.equal(pair[1]))",
    "plan_rows": "rows.equal(one_plan.rows) and targets.equal(one_plan.targets(tokens))",
    "policy_loss": CLOSE("loss", "policy_loss(logp, old_logp, advantages).loss"),
    "return_parts": "all(a.equal(b) for a, b in zip(parts[0], return_parts(plan, None, *values)[0]))",
    "rowwise": CLOSE("values", "rowwise(fn, hidden, weight, *per_row, rows=rows)"),
    "select_allowed": "all(a.equal(b) for a, b in zip(allowed, select_allowed(ids, offsets, one_plan)))",
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
    if name == "linear_policy_loss":
        names |= {"head": names["weight"], "mask": torch.tensor([1, 1, 0, 1])}
    if name == "linear_cross_entropy":
        names["labels"] = torch.randint(V, (L,), generator=g)
    if name == "linear_preference_loss":
        names |= {"hidden": torch.randn(4, L, D, generator=g), "head": names["weight"]}
        names["labels"] = torch.randint(V, (4, L), generator=g)
        names["labels"][:, :3] = -100
        names["reference"] = torch.randn(4, generator=g)
    if name == "linear_distill_loss":
        teacher = torch.randn(L, D, generator=g), torch.randn(V, D, generator=g)
        names["teacher"] = package.TeacherHead(*teacher)
    if name == "rowwise":
        names |= {"fn": lambda z, x: z.logsumexp(-1) * x, "per_row": (torch.randn(4, generator=g),)}
    # The second of two context-parallel ranks, and one rank with one sample and with masks.
    names["plan"] = package.plan_rows([L, 8], [R, 3], layout="zigzag", cp_size=2, cp_rank=1)
    names["responses"] = [torch.randn(R, generator=g), torch.randn(3, generator=g)]
    names["values"] = [torch.randn(names["plan"].num_rows, generator=g)]
    names["one_plan"] = package.plan_rows([L], [R])
    names["parts"] = [torch.randn(R, generator=g)]
    names |= {"ids": [[3, 1, 4, 1, 5, 9]], "offsets": [[0, 1, 3, 3, 5, 6]]}
    if name == "next_token_targets":
        names |= {"B": 3, "S": 5, "tokens": torch.randint(V, (3, 5), generator=g)}
        names["pair"] = package.next_token_targets(names["tokens"])
    return names


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"place_response"}))
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
    named = re.search(r"\[[A-Z0-9n]|\[ranks|0-dimensional|scalar|\[T", doc)
    assert named or "total_lengths" in doc, f"{name}: no shape"
