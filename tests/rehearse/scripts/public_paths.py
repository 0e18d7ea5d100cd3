"""Every public path of the package, three sizes each, on the device: what test_public_paths.py looks at.

public_paths.py [ROOM ...]: prints [{"room", "path", "size", "tokens", "step", "trouble"}, ...] as one line;
"step" is the number of the step that the path was alone in. A path runs twice, the second time on another
batch: what the first call makes once and keeps (state, plans of kernels) is not counted.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Steps are cut at this optimizer's `step`; it has no gradient and launches nothing.
pace = torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cuda"))], lr=0.0)
BF16, FP32 = torch.bfloat16, torch.float32
seen: list[dict[str, Any]] = []
cuts = 0
room = ""


def cut() -> None:
    global cuts
    pace.step()
    cuts += 1


cut()  # the first optimizer that steps sets the pace


def path(name: str, size: str, tokens: int, call: Callable[[int], Any]) -> None:
    """Run `call(0)` apart, then `call(1)` as a step of its own."""
    trouble = ""
    try:
        call(0)
        cut()
        call(1)
    except Exception as problem:
        trouble = f"{type(problem).__name__}: {problem}"[:300]
    fields = {"room": room, "path": name, "size": size, "tokens": tokens, "step": cuts, "trouble": trouble}
    seen.append(fields)
    cut()


def normal(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_().requires_grad_(grad)


def backward(*outputs: Tensor | None) -> None:
    roots = [t for t in outputs if t is not None and t.requires_grad]
    torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])


# tokens, hidden size, vocabulary; the second vocabulary is no multiple of 8.
HEADS = {"small": (384, 128, 1_024), "odd": (1_024, 768, 50_257), "large": (6_144, 2_560, 151_936)}


def logprob(size: str) -> None:
    from leanstep.logprob import (
        OBJECTIVES,
        Allowed,
        LMHead,
        LoRA,
        PolicyBatch,
        ReferenceHead,
        Transform,
        linear_logprobs,
        linear_policy_loss,
        next_token_targets,
        plan_rows,
        policy_loss,
        sample_mean,
        token_logprobs,
    )

    tokens, width, vocab = HEADS[size]
    hidden, weight = normal(tokens, width, grad=True), normal(vocab, width, grad=True)
    master, bias = normal(vocab, width, dtype=FP32, grad=True), normal(vocab, grad=True)
    targets = torch.randint(vocab, (tokens,), device="cuda")
    rows = torch.arange(tokens // 4, tokens, device="cuda")
    old = normal(len(rows), dtype=FP32)
    lengths = [len(rows) // 4] * 4
    batch = PolicyBatch(old, old, mask=torch.ones_like(old), ref_logp=old, sequence_lengths=lengths)
    down, up = normal(16, width, grad=True), normal(vocab, 16, grad=True)

    def fresh() -> None:
        for tensor in (hidden, weight, master, bias, down, up):
            tensor.grad = None

    def linear(head: Any = weight, **options: Any) -> Callable[[int], None]:
        def call(_: int) -> None:
            fresh()
            out = linear_logprobs(hidden, head, targets, rows=rows, **options)
            backward(out.logp, out.entropy, out.lse, out.kl)

        return call

    def autocast(_: int) -> None:
        with torch.autocast("cuda", BF16):
            linear(master, entropy="grad")(0)

    def policy(objective: str = "grpo") -> Callable[[int], None]:
        def call(_: int) -> None:
            fresh()
            backward(linear_policy_loss(hidden, weight, targets, batch, objective=objective, rows=rows).loss)

        return call

    path("linear_logprobs", size, tokens, linear(entropy="grad"))
    path("linear_logprobs, metric, lse", size, tokens, linear(entropy="metric", outputs=("lse",)))
    transform = Transform(scale=0.5, softcap=30.0)
    path(
        "linear_logprobs, bias, softcap, temperature", size, tokens,
        linear(LMHead(weight, bias), entropy="grad", temperature=0.7, transform=transform),
    )  # fmt: skip
    compared = {"reference": ReferenceHead(weight=weight.detach()), "outputs": ("kl", "argmax", ("top_k", 8))}
    path("linear_logprobs, kl, top_k", size, tokens, linear(**compared))
    path("linear_logprobs, frozen head", size, tokens, linear(weight.detach(), entropy="grad"))
    path("linear_logprobs, autocast, fp32 weight", size, tokens, autocast)
    path("linear_logprobs, LoRA", size, tokens, linear(LMHead(weight.detach(), lora=LoRA(down, up))))
    # On the host, as samplers hand them over: the offsets are looked at.
    kept = Allowed(torch.randint(vocab, (8 * len(rows),)), torch.arange(0, 8 * len(rows) + 1, 8))
    path("linear_logprobs, allowed", size, tokens, linear(allowed=kept))
    for objective in OBJECTIVES:
        path(f"linear_policy_loss, {objective}", size, tokens, policy(objective))

    def plain(_: int) -> None:
        logp = normal(len(rows), dtype=FP32, grad=True)
        options = {"entropy": logp.square(), "ref_logp": old, "mask": batch.mask}
        backward(policy_loss(logp, old, old, **options).loss)

    path("policy_loss", size, tokens, plain)

    def planned(_: int) -> None:
        fresh()
        # As a trainer of verl's or slime's kind calls it: lengths and masks on the host.
        samples = [tokens // 4] * 4
        masks = [[1] * (n // 2) for n in samples]
        plan = plan_rows(samples, [n // 2 for n in samples], loss_masks=masks, device="cuda")
        out = linear_logprobs(hidden, weight, targets[plan.rows], rows=plan.rows)
        backward(sample_mean(plan.split(out.logp), plan))

    path("plan_rows, sample_mean", size, tokens, planned)

    def ahead(_: int) -> None:
        fresh()
        where, wanted = next_token_targets(targets.view(4, -1))
        backward(linear_logprobs(hidden, weight, wanted, rows=where).logp)

    path("next_token_targets", size, tokens, ahead)
    logits = normal(min(tokens, 2048), vocab, grad=True)

    def existing(_: int) -> None:
        logits.grad = None
        out = token_logprobs(logits, targets[: len(logits)], entropy="grad")
        backward(out.logp, out.entropy)

    path("token_logprobs", size, tokens, existing)


def objectives(size: str) -> None:
    from leanstep.logprob import Allowed, PolicyBatch, ReferenceHead, Transform
    from leanstep.objectives import (
        PREFERENCES,
        HardLabels,
        RolloutCorrection,
        SoftLabels,
        TeacherHead,
        TeacherLogProbs,
        TeacherTopK,
        correct_rollout,
        linear_ahead_cross_entropy,
        linear_cross_entropy,
        linear_distill_loss,
        linear_masked_logprobs,
        linear_preference_loss,
        linear_sequence_logprobs,
    )

    tokens, width, vocab = HEADS[size]
    hidden, weight = normal(4, tokens // 4, width, grad=True), normal(vocab, width, grad=True)
    far, wide = normal(tokens, 2 * width), normal(vocab, 2 * width)
    # As a data loader gives them: on the host, half of each sequence padding.
    labels = torch.randint(vocab, (4, tokens // 4))
    labels[:, : tokens // 8] = -100
    rows = torch.arange(tokens // 4, tokens, device="cuda")
    hard, desirable = torch.randint(vocab, rows.shape, device="cuda"), torch.arange(4, device="cuda") % 2 == 0
    kept = Allowed(torch.randint(vocab, (8 * tokens,)), torch.arange(0, 8 * tokens + 1, 8))

    def fresh(loss: Callable[[Tensor], Tensor]) -> Callable[[int], None]:
        def call(_: int) -> None:
            hidden.grad = weight.grad = None
            backward(loss(hidden))

        return call

    reference = ReferenceHead(weight.detach(), hidden.detach())
    head, classes = TeacherHead(far, wide), normal(vocab, dtype=FP32).abs()
    second = normal(vocab, width, grad=True)
    # Given by somebody else for the selected rows alone, and few of them: [T', V] is as large as it gets.
    some = rows[: min(len(rows), 1_024)]
    given = normal(len(some), vocab)
    best = TeacherTopK(torch.randint(vocab, (len(some), 8), device="cuda"), normal(len(some), 8, dtype=FP32))

    def distill(teacher: Any, picked: Tensor = rows, **options: Any) -> Callable[[Tensor], Tensor]:
        return lambda h: linear_distill_loss(h.flatten(0, 1), weight, teacher, rows=picked, **options).loss

    def prefer(objective: str) -> Callable[[Tensor], Tensor]:
        options: dict[str, Any] = {"objective": objective}
        if objective not in ("cpo", "simpo", "orpo"):
            options["reference"] = reference
        if objective == "kto":
            options["desirable"] = desirable
        return lambda h: linear_preference_loss(h, weight, labels, **options).loss

    def corrected(level: str, kind: str) -> Callable[[Tensor], Tensor]:
        def loss(h: Tensor) -> Tensor:
            old = h.flatten(0, 1)[:, 0].float()
            batch = PolicyBatch(old, old.detach(), sequence_lengths=[tokens // 4] * 4)
            rule = RolloutCorrection(level=level, reject=[(kind, None, 4.0)], normalize=True)
            after, metrics = correct_rollout(batch, old.detach() + 1, rule)
            return (after.advantages * after.mask * old).sum() + metrics["mean_weight"]

        return loss

    for name, loss in {
        "linear_cross_entropy": lambda h: linear_cross_entropy(h, weight, labels),
        "linear_cross_entropy, all rows": lambda h: linear_cross_entropy(h, weight, labels, rows="all"),
        "linear_cross_entropy, none": lambda h: linear_cross_entropy(
            h, weight, labels, reduction="none", label_smoothing=0.1
        ),
        "linear_cross_entropy, classes": lambda h: linear_cross_entropy(
            h, weight, labels, class_weights=classes, label_smoothing=0.1
        ),
        "linear_cross_entropy, probabilities": lambda h: linear_cross_entropy(
            h.flatten(0, 1)[: len(given)], weight, given
        ),
        "linear_ahead_cross_entropy": lambda h: linear_ahead_cross_entropy(
            h, (weight, second), labels, factors=(1.0, 0.5)
        ),
        "linear_distill_loss": distill(head),
        "linear_distill_loss, reverse_kl": distill(head, divergence="reverse_kl"),
        "linear_distill_loss, jsd": distill(head, divergence=("jsd", 0.5)),
        "linear_distill_loss, skew_kl": distill(head, divergence=("skew_kl", 0.1)),
        "linear_distill_loss, cross_entropy": distill(head, divergence="cross_entropy"),
        "linear_distill_loss, labels, softcap": distill(
            head, hard=HardLabels(hard, 0.5), temperature=2.0, transform=Transform(softcap=30.0)
        ),
        "linear_distill_loss, TeacherLogProbs": distill(TeacherLogProbs(given), some),
        "linear_distill_loss, TeacherTopK": distill(best, some),
        "linear_distill_loss, SoftLabels": distill(
            SoftLabels(given, 0.1, classes), some, divergence="cross_entropy"
        ),
        "linear_distill_loss, two teachers": distill([(head, 0.5), (TeacherHead(far, wide), 0.5)]),
        "linear_sequence_logprobs": lambda h: linear_sequence_logprobs(h, weight, labels).sums,
        **{f"linear_preference_loss, {kind}": prefer(kind) for kind in PREFERENCES},
        "correct_rollout": corrected("token", "token_k3"),
        "correct_rollout, sequence": corrected("sequence", "seq_max_k2"),
        "linear_masked_logprobs, entropy, kl": lambda h: (
            linear_masked_logprobs(
                h.flatten(0, 1),
                weight,
                labels.flatten().clamp(min=0),
                kept,
                entropy="grad",
                reference=ReferenceHead(weight.detach(), hidden.detach().flatten(0, 1)),
            ).logp
        ),
        "linear_masked_logprobs": lambda h: (
            linear_masked_logprobs(h.flatten(0, 1), weight, labels.flatten().clamp(min=0), kept).logp
        ),
    }.items():
        path(name, size, tokens, fresh(loss))


# matrices: model dimension, layers
MATRICES = {"small": (128, 2), "gpt-124M": (768, 12), "large": (2_048, 4)}


def muon(size: str) -> None:
    from leanstep.muon import NorMuon, polar, transpose_add, transpose_copy

    width, layers = MATRICES[size]
    shapes = [(width, width)] * (4 * layers) + [(4 * width, width), (width, 4 * width)] * layers
    for name, dtype, kinds in (
        ("fp32", FP32, shapes),
        ("bf16", BF16, shapes),
        ("banks", BF16, [(4 * layers, width, width), (2 * layers, 4 * width, width)]),
    ):
        parameters = [nn.Parameter(normal(*shape, dtype=dtype)) for shape in kinds]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = NorMuon(parameters, lr=0.02)
        path(f"NorMuon, {name}", size, width, lambda _, optimizer=optimizer: optimizer.step())
    wide = normal(width, 4 * width)
    path("polar", size, width, lambda _: polar(wide))
    turned = normal(4 * width, width)

    def turn(_: int) -> None:
        transpose_copy(wide, turned)
        transpose_add(wide, turned)

    path("transpose_copy, transpose_add", size, width, turn)


# tokens, model dimension, vocabulary. No other size is a multiple of the tokens: T x T is known by its shape.
MODELS = {"small": (1_152, 256, 5_000), "record": (8_320, 768, 50_257), "long": (16_512, 768, 50_257)}


def gpt(size: str) -> None:
    from leanstep.gpt import GPT, GPTConfig

    tokens, width, vocab = MODELS[size]
    shape = {"model_dim": width, "num_heads": width // 128, "mlp_hidden": 4 * width, "vocab_size": vocab}
    config = GPTConfig.preset("record-74", **shape)
    model = GPT(config).to("cuda")
    inputs, targets = (torch.randint(config.vocab_size, (tokens,), device="cuda") for _ in range(2))

    def call(batch: int) -> None:
        model.zero_grad(set_to_none=True)
        length = 512 - 64 * batch
        ends = torch.tensor([*range(0, tokens, length), tokens], dtype=torch.int32)
        model(inputs, targets, ends, mtp=(1.0, 0.5)).backward()

    path("GPT", size, tokens, call)

    def evaluate(batch: int) -> None:
        length = 512 - 64 * batch
        ends = torch.tensor([*range(0, tokens, length), tokens], dtype=torch.int32)
        model.mean_loss(inputs, targets, ends)

    path("GPT, mean_loss", size, tokens, evaluate)
    model.untie()
    path("GPT, untied", size, tokens, call)


LENSES = {"tiny": (3, 96, 4), "seed": (13, 2_048, 32), "large": (32, 4_096, 32)}


def ragged(size: str) -> None:
    from leanstep.objectives import bradley_terry, draw_pairs, hinge, make_groups, plackett_luce

    samples, tokens, _ = LENSES[size]
    # Groups as a loader that works ahead leaves them: offsets on the device.
    count = 16 * samples
    scores, labels = normal(count, dtype=FP32, grad=True), normal(count, dtype=FP32)
    groups = make_groups(scores, torch.arange(0, count + 1, 16, device="cuda"), max_group_size=16)
    for loss in (bradley_terry, hinge, plackett_luce):
        path(loss.__name__, size, tokens, lambda _, loss=loss: backward(loss(scores, labels, groups)))

    def drawn(_: int) -> None:
        pairs = draw_pairs(labels, groups, 16)
        backward(bradley_terry(scores, pairs=(pairs.i, pairs.j), weights=pairs.weight))

    path("draw_pairs", size, tokens, drawn)


def lens(size: str) -> None:
    from leanstep.lens import LensObjective
    from leanstep.lens.cases import make_batch

    samples, tokens, block = LENSES[size]
    params = {
        "samples": samples,
        "variants": 3,
        "tokens": tokens,
        "block": block,
        "max_lod": 2,
        "max_pairs": 8,
    }
    batches = [make_batch(params, torch.Generator().manual_seed(n), torch.device("cuda")) for n in range(2)]
    config = batches[0][1]
    for dtype in (FP32, BF16):
        objective = LensObjective(config)

        def call(number: int, objective: Any = objective, dtype: torch.dtype = dtype) -> None:
            batch = batches[number][0]
            backward(objective(normal(*batch.pos.shape, dtype=dtype, grad=True), batch).loss)

        path(f"LensObjective, {str(dtype)[6:]}", size, tokens, call)


ROOMS = {
    "logprob": (logprob, HEADS),
    "objectives": (objectives, HEADS),
    "muon": (muon, MATRICES),
    "gpt": (gpt, MODELS),
    "ragged": (ragged, LENSES),
    "lens": (lens, LENSES),
}
for room in sys.argv[1:] or ROOMS:
    run, sizes = ROOMS[room]
    for size in sizes:
        run(size)
print(json.dumps(seen))
