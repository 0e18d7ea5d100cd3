"""Preference objectives from hidden states against TRL's own losses and metrics, and plain code."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from leanstep.heads import PREFERENCES, Head, TeacherHead, linear_preference_loss
from leanstep.heads.losses import kto_losses, pair_losses

S, T, D, V = 6, 7, 5, 19


def batch(seed=0):
    """Ragged completions after prompts, padding at the end; the second chosen completion is empty."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(S, T, D, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, V, (S, T), generator=g)
    mask = torch.zeros(S, T, dtype=torch.int64)
    for row, (start, stop) in enumerate([(2, 7), (3, 3), (1, 4), (2, 6), (3, 5), (4, 7)]):
        mask[row, start:stop] = 1
    return hidden, weight, ids, mask, ids.masked_fill(mask == 0, -100)


def token_logps(hidden, weight, labels):
    log_p = torch.log_softmax(hidden[:, :-1] @ weight.T, -1)
    picked = log_p.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return torch.where(labels[:, 1:] != -100, picked, 0.0)


def compare(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    pairs = zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other)


class Stub(SimpleNamespace):
    """The attributes of a trainer that its loss reads."""

    def __init__(self, **attributes):
        accelerator = SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda m: m
        )
        super().__init__(
            accelerator=accelerator, aux_loss_enabled=False, precompute_ref_logps=True, _total_train_tokens=0,
            _tp_size=1, _metrics={"train": defaultdict(list)}, **attributes,
        )  # fmt: skip

    @property
    def metrics(self):
        return {name: values[0] for name, values in self._metrics["train"].items()}


def outputs_of(per_token):
    zeros = torch.zeros_like(per_token)
    fields = {"log_probs": per_token, "entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
    return SimpleNamespace(training=True), lambda **_: SimpleNamespace(**fields)


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_equals_trl_dpo(kind):
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    hidden, weight, ids, mask, labels = batch()
    # TRL's IPO counts the completion's tokens, ours the rows that score them: the same after a prompt.
    reference = -torch.rand(S, dtype=torch.float64) * 9
    state, model = outputs_of(token_logps(hidden, weight, labels))
    stub = Stub(
        model=state, ld_alpha=None, f_divergence_type="reverse_kl", beta=0.3, use_weighting=False,
        loss_types=["ipo" if kind == "ipo" else "sigmoid"], loss_weights=[1.0],
        label_smoothing=0.0,
    )  # fmt: skip
    inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": mask}
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference.chunk(2)
    theirs = trainer._compute_loss(stub, model, inputs, False)
    ours = linear_preference_loss(hidden, weight, labels, objective=kind, beta=0.3, reference=reference)
    for name, value in ours.metrics.items():
        torch.testing.assert_close(value.item(), stub.metrics[name], rtol=1e-6, atol=1e-7)
    compare(ours.loss, theirs, (hidden, weight))


@pytest.mark.parametrize("desirable", [[1, 0, 1, 1, 0, 0], [1] * 6, [0] * 6])
def test_equals_trl_kto(desirable):
    trainer = pytest.importorskip("trl.trainer.kto_trainer").KTOTrainer
    hidden, weight, ids, mask, labels = batch()
    flags = torch.tensor(desirable, dtype=torch.bool)
    reference, kl_logps = (-torch.rand(S, dtype=torch.float64) * 9 for _ in range(2))
    state, model = outputs_of(token_logps(hidden, weight, labels))
    stub = Stub(
        model=state, beta=0.3, loss_type="kto", calculate_KL=True, desirable_weight=1.3,
        undesirable_weight=0.7, _compute_kl_logps=lambda *_: kl_logps + 0.4,
    )  # fmt: skip
    inputs = {
        "input_ids": ids, "attention_mask": mask, "completion_mask": mask, "label": flags,
        "ref_logps": reference, "ref_KL_logps": kl_logps,
    }  # fmt: skip
    theirs = trainer._compute_loss(stub, model, inputs, False)
    ours = linear_preference_loss(
        hidden, weight, labels, objective="kto", beta=0.3, desirable_weights=(1.3, 0.7),
        reference=reference, desirable=flags, kl=torch.tensor(0.4, dtype=torch.float64),
    )  # fmt: skip
    for name, value in stub.metrics.items():
        if name in ours.metrics:
            torch.testing.assert_close(ours.metrics[name].item(), value, rtol=1e-6, atol=1e-7)
    compare(ours.loss, theirs, (hidden, weight))


@pytest.mark.parametrize(
    ("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("simpo", 0.0), ("simpo", 0.1)]
)
def test_equals_trl_cpo_and_simpo(kind, smoothing):
    trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer").CPOTrainer
    hidden, weight, _, _, labels = batch()
    labels[1, 3] = 2
    tokens, counts = token_logps(hidden, weight, labels), (labels[:, 1:] != -100).sum(1)
    logps = tokens.sum(1) / counts if kind == "simpo" else tokens.sum(1)
    stub = Stub(alpha=0.0, beta=0.7, loss_type=kind, simpo_gamma=0.4, label_smoothing=smoothing)
    losses, *rewards = trainer.cpo_loss(stub, *logps.chunk(2))
    nll = -tokens[: S // 2].sum() / counts[: S // 2].sum()
    options = {"beta": 0.7, "label_smoothing": smoothing, "nll_coef": 0.6}
    if kind == "simpo":
        options |= {"objective": "simpo", "gamma": 0.4}
    else:
        options["objective"] = "cpo"
    ours = linear_preference_loss(hidden, weight, labels, **options)
    torch.testing.assert_close(ours.metrics["rewards/chosen"], rewards[0].mean())
    torch.testing.assert_close(ours.metrics["rewards/margins"], (rewards[0] - rewards[1]).mean())
    compare(ours.loss, losses.mean() + 0.6 * nll, (hidden, weight))


def test_equals_trl_orpo():
    """The nll covers prompt and completion; all rows are projected once."""
    trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    hidden, weight, ids, mask, labels = batch()
    labels[1, 3] = 2
    every = ids.masked_fill(mask.flip(1).cumsum(1).flip(1) == 0, -100)
    every[1, :4] = torch.tensor([0, 1, 2, 2])
    means = token_logps(hidden, weight, labels).sum(1) / (labels[:, 1:] != -100).sum(1)
    # TRL rounds to fp32 here; its formula in fp64 is what we compare with.
    stub = Stub(beta=0.2)
    shown, *_ = trainer.odds_ratio_loss(stub, *means.chunk(2))
    chosen, rejected = means.chunk(2)
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    losses = 0.2 * torch.nn.functional.logsigmoid(odds)
    torch.testing.assert_close(losses.float(), shown.float())
    nll_labels = every[: S // 2]
    tokens = token_logps(hidden[: S // 2], weight, nll_labels)
    nll = -tokens.sum() / (nll_labels[:, 1:] != -100).sum()
    ours = linear_preference_loss(hidden, weight, labels, objective="orpo", beta=0.2, nll_labels=nll_labels)
    compare(ours.loss, nll - losses.mean(), (hidden, weight))


@pytest.mark.parametrize("kind", PREFERENCES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradcheck(kind, smoothing):
    """Ragged completions, one of them empty; an id that cannot occur."""
    hidden, weight, _, _, labels = batch()
    options = {"objective": kind}
    if kind in ("dpo", "cpo", "simpo"):
        options["label_smoothing"] = smoothing
    if kind not in ("cpo", "simpo", "orpo"):
        options["reference"] = -torch.rand(S, dtype=torch.float64) * 5
    if kind == "kto":
        options |= {"desirable": torch.arange(S) % 2 == 0, "kl": 0.3}
    labels[labels == 4] = 5
    bias = torch.zeros(V, dtype=torch.float64)
    bias[4] = -torch.inf

    def loss(h, w):
        return linear_preference_loss(h, Head(w, bias), labels, **options).loss

    assert torch.autograd.gradcheck(loss, (hidden, weight))
    allowed = [v for v in range(V) if v != 4]
    less = torch.where(labels > 4, labels - 1, labels)
    rest = linear_preference_loss(hidden, weight[allowed], less, **options).loss
    compare(loss(hidden, weight), rest, (hidden, weight))


def test_reference_head_equals_given_sums_and_has_no_graph():
    hidden, weight, _, _, labels = batch()
    other, head, *_ = batch(seed=3)
    sums = token_logps(other, head, labels).sum(1).detach()
    from_sums = linear_preference_loss(hidden, weight, labels, reference=sums)
    frozen = linear_preference_loss(hidden, weight, labels, reference=TeacherHead(other, head))
    torch.testing.assert_close(frozen.ref_logps, sums)
    compare(frozen.loss, from_sums.loss, (hidden, weight))
    assert head.grad is None and not frozen.ref_logps.requires_grad


def test_formulas_on_log_probs():
    """Published definitions, on numbers."""
    chosen, rejected, lengths = torch.tensor([-2.0]), torch.tensor([-5.0]), torch.tensor([4.0])
    pair = (chosen, rejected, lengths, lengths)
    assert pair_losses("dpo", *pair, beta=0.1)[0].item() == pytest.approx(0.5543552)
    assert pair_losses("ipo", *pair, beta=0.5)[0].item() == pytest.approx((0.75 - 1.0) ** 2)
    assert pair_losses("simpo", *pair, beta=2.0, gamma=1.0)[0].item() == pytest.approx(0.4740770)
    kto = kto_losses(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), beta=0.5, kl=0.2)
    torch.testing.assert_close(kto, torch.tensor([0.4013123, 0.5986877]))


def test_nothing_is_scored():
    hidden, weight, _, _, labels = batch()
    out = linear_preference_loss(hidden, weight, torch.full_like(labels, -100), reference=torch.zeros(S))
    out.loss.backward()
    torch.testing.assert_close(out.loss, torch.tensor(2.0, dtype=torch.float64).log())
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda h, w, y: linear_preference_loss(h[:5], w, y[:5]), "odd number: 5"),
        (lambda h, w, y: linear_preference_loss(h, w, y, objective="grpo"), "objective: expected one of dpo"),
        (lambda h, w, y: linear_preference_loss(h, w, y, objective="kto"), "desirable: expected bool"),
        (lambda h, w, y: linear_preference_loss(h, w, y, objective="kto", desirable=y[:, 0]), "desirable"),
        (lambda h, w, y: linear_preference_loss(h, w, y, objective="kto", desirable=y[:, 0] > 0), "for kto"),
        (lambda h, w, y: linear_preference_loss(h, w, y, reference=TeacherHead(h[:, 1:], w)), r"ce.hidden: "),
        (lambda h, w, y: linear_preference_loss(h[0], w, y), r"hidden: expected \[S, T, D\]"),
        (lambda h, w, y: linear_preference_loss(h, w, y[:, 1:]), r"labels: expected ids \(6, 7\)"),
        (lambda h, w, y: linear_preference_loss(h, w, y, reference=y[:3, 0]), r"reference: expected \[6\]"),
        (lambda h, w, y: linear_preference_loss(h, w, y, objective="simpo", reference=h[:, 0, 0]), "simpo"),
        (lambda h, w, y: linear_preference_loss(h, w, y, beta=0), "beta: expected a value > 0, got 0"),
        (lambda h, w, y: linear_preference_loss(h, w, y, objective="ipo", label_smoothing=0.1), "0 for ipo"),
    ],
)  # fmt: skip
def test_refusals(call, complaint):
    hidden, weight, _, _, labels = batch()
    with pytest.raises(ValueError, match=complaint):
        call(hidden, weight, labels)
