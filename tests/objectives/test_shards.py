"""Every objective with its vocabulary sharded over 2 and 3 ranks: results of one rank, collectives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from leanstep.logprob import Allowed, LMHead, ReferenceHead, Transform, Tuning, VocabShards
from leanstep.objectives import (
    HardLabels,
    PreferenceObjective,
    TeacherHead,
    TeacherLogProbs,
    TeacherTopK,
    linear_ahead_cross_entropy,
    linear_cross_entropy,
    linear_distill_loss,
    linear_masked_logprobs,
    linear_preference_loss,
    linear_sequence_logprobs,
)

S, T, D, WIDE, V = 4, 5, 4, 6, 29
CUTS = {1: [0, V], 2: [0, 11, V], 3: [0, 11, 13, V]}
ROWS = torch.tensor([7, 0, 3, 3, 5])
KINDS = ["forward_kl", "reverse_kl", ("jsd", 0.4), ("skew_kl", 0.1), ("skew_reverse_kl", 0.1)]


class Setting:
    """The tensors of one rank; `w`, `b` and `head` are its part of the student's head."""

    def __init__(self, rank, world):
        g = torch.Generator().manual_seed(0)
        shapes = {"hidden": (S, T, D), "w": (V, D), "b": (V,), "far": (S, T, WIDE), "wide": (V, WIDE)}
        shapes |= {"log_q": (S * T, V), "second": (V, D)}
        drawn = {n: torch.randn(*s, generator=g, dtype=torch.float64) for n, s in shapes.items()}
        self.mine = slice(*CUTS[world][rank : rank + 2])
        self.hidden = drawn["hidden"].requires_grad_()
        self.w, self.b, self.second = (
            drawn[n][self.mine].clone().requires_grad_() for n in ("w", "b", "second")
        )
        self.far, self.wide, self.full = drawn["far"], drawn["wide"][self.mine], drawn["wide"]
        self.log_q = torch.log_softmax(drawn["log_q"], -1)
        self.labels = torch.randint(0, V, (S, T), generator=g)
        self.labels[0, :2] = self.labels[2, 3:] = -100
        self.targets = torch.randint(0, V, (len(ROWS),), generator=g)
        self.head = LMHead(self.w, self.b)
        self.flat = self.hidden.flatten(0, 1)
        self.teacher = TeacherHead(self.far.flatten(0, 1), self.wide)
        self.reference = ReferenceHead(self.wide, self.far)
        shards = VocabShards(dist.group.WORLD, self.mine.start, V) if world > 1 else None
        self.sharding = {"shards": shards}
        # Two rows of both heads at a time.
        self.small = {"shards": shards, "tuning": Tuning(budget=2 * 2 * -(-V // world) * 8)}

    def distill(self, kind, **options):
        options = {"rows": ROWS, **self.small, **options}
        return linear_distill_loss(self.flat, self.head, self.teacher, divergence=kind, **options).loss

    def several(self):
        teachers = [(self.teacher, 0.7), (TeacherLogProbs(self.log_q[:, self.mine]), 0.5)]
        return linear_distill_loss(
            self.flat, self.head, teachers, divergence=("jsd", 0.3), **self.sharding
        ).loss

    def top_k(self):
        log_q, ids = self.log_q.topk(3, -1)
        return linear_distill_loss(self.flat, self.head, TeacherTopK(ids, log_q), **self.sharding).loss

    def soft_targets(self):
        return linear_cross_entropy(
            self.flat, self.head, self.log_q.exp()[:, self.mine], label_smoothing=0.1, **self.sharding
        )

    def preference(self, kind, **options):
        objective = PreferenceObjective(kind, nll_coef=0.5 if kind == "orpo" else 0.0)
        options = {"objective": objective, **self.sharding, **options}
        return linear_preference_loss(self.hidden, self.head, self.labels, **options).loss

    def masked(self, has_set=None):
        ids, offsets = torch.tensor([3, 9, 12, 0, 28, 5, 7, 7, 8]), torch.tensor([0, 3, 3, 6, 9, 9])
        reference = ReferenceHead(self.wide, self.far.flatten(0, 1))
        allowed = Allowed(ids, offsets, has_set)
        out = linear_masked_logprobs(
            self.flat, self.head, self.targets, allowed, rows=ROWS, entropy="grad", reference=reference,
            transform=Transform(0.9, 4.0), temperature=0.7, **self.sharding,
        )  # fmt: skip
        return torch.stack(out[:3]).square().sum()


CLASSES = torch.linspace(0.5, 2, V, dtype=torch.float64)
SUMS = torch.linspace(-5, -1, S, dtype=torch.float64)
WITHOUT = torch.tensor([True, False, True, True, False])
# Path -> (a loss, its collectives with a group). Three chunks of rows have 3 each, and one sum of d hidden.
PATHS = {
    "labels": (
        lambda s: linear_cross_entropy(s.hidden, s.head, s.labels, label_smoothing=0.1, **s.sharding),
        3,
    ),
    "class weights": (
        lambda s: linear_cross_entropy(s.hidden, s.head, s.labels, class_weights=CLASSES, **s.sharding),
        3,
    ),
    "soft targets": (Setting.soft_targets, 3 + 1),
    "ahead": (lambda s: linear_ahead_cross_entropy(s.hidden, [s.head, s.second], s.labels, **s.sharding), 6),
    **{f"distill {kind}": (lambda s, kind=kind: s.distill(kind), 3 * 3 + 1) for kind in KINDS},
    "distill, labels": (
        lambda s: s.distill(
            "reverse_kl", hard=HardLabels(s.targets, 0.3), temperature=1.3, transform=Transform(softcap=3.0)
        ),
        3 * 3 + 1,
    ),
    "several teachers": (Setting.several, 3 + 1),
    "top k": (Setting.top_k, 3),
    "sequence sums": (
        lambda s: linear_sequence_logprobs(s.hidden, s.head, s.labels, **s.sharding).sums.square().sum(),
        3,
    ),
    "dpo, reference head": (lambda s: s.preference("dpo", reference=s.reference), 5),
    **{f"{k}, given": (lambda s, k=k: s.preference(k, reference=SUMS), 3) for k in ("dpo", "ipo", "hinge")},
    "kto": (lambda s: s.preference("kto", reference=SUMS, desirable=SUMS > -3, kl=0.2), 3),
    **{kind: (lambda s, kind=kind: s.preference(kind), 3) for kind in ("simpo", "cpo", "orpo")},
    "masked": (Setting.masked, 3),
    "masked, rows without a set": (lambda s: s.masked(WITHOUT), 6),
}


def every_path(rank, world):
    """Return {path: loss, gradients of hidden, weight, bias and second head, collectives}."""
    calls = []
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"):
        original = getattr(dist, name)

        def counted(*args, original=original, **options):
            calls.append(1)
            return original(*args, **options)

        setattr(dist, name, counted)
    results = {}
    for path, (loss, _) in PATHS.items():
        setting, begin = Setting(rank, world), len(calls)
        value = loss(setting)
        value.backward()
        grads = [x.grad for x in (setting.hidden, setting.w, setting.b, setting.second)]
        arrays = [None if x is None else x.numpy() for x in (value.detach(), *grads)]
        results[path] = (*arrays, len(calls) - begin)
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one(run_ranks, world):
    (alone,), ranks = run_ranks(1, every_path), run_ranks(world, every_path)
    for path, (_, collectives) in PATHS.items():
        loss, d_hidden, *of_columns, none = alone[path]
        assert none == 0, path
        for rank in ranks:
            np.testing.assert_allclose(rank[path][0], loss, atol=1e-11, err_msg=path)
            np.testing.assert_allclose(rank[path][1], d_hidden, atol=1e-11, err_msg=path)
            assert rank[path][5] == collectives, path
        for place, whole in enumerate(of_columns, 2):
            parts = [rank[path][place] for rank in ranks]
            if whole is None:
                assert all(part is None for part in parts), path
            else:
                np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-11, err_msg=path)
