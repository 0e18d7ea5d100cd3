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
    from leanstep.heads import (
        OBJECTIVES,
        Head,
        LoRA,
        linear_logprobs,
        linear_policy_loss,
        next_token_targets,
        plan_rows,
        policy_loss,
        rowwise,
        token_logprobs,
    )

    tokens, width, vocab = HEADS[size]
    hidden, weight = normal(tokens, width, grad=True), normal(vocab, width, grad=True)
    master, bias = normal(vocab, width, dtype=FP32, grad=True), normal(vocab, grad=True)
    targets = torch.randint(vocab, (tokens,), device="cuda")
    rows = torch.arange(tokens // 4, tokens, device="cuda")
    old = normal(len(rows), dtype=FP32)
    lengths = [len(rows) // 4] * 4
    per_row = {"mask": torch.ones_like(old), "ref_logp": old}
    down, up = normal(16, width, grad=True), normal(vocab, 16, grad=True)

    def fresh() -> None:
        for tensor in (hidden, weight, master, bias, down, up):
            tensor.grad = None

    def linear(head: Any = weight, **options: Any) -> Callable[[int], None]:
        def call(_: int) -> None:
            fresh()
            out = linear_logprobs(hidden, head, targets, rows=rows, **options)
            backward(out.logp, out.entropy, out.lse)

        return call

    def autocast(_: int) -> None:
        with torch.autocast("cuda", BF16):
            linear(master, entropy="grad")(0)

    def policy(objective: str = "grpo") -> Callable[[int], None]:
        def call(_: int) -> None:
            fresh()
            options = {"objective": objective, "rows": rows, "sequence_lengths": lengths, **per_row}
            backward(linear_policy_loss(hidden, weight, targets, old, old, **options).loss)

        return call

    path("linear_logprobs", size, tokens, linear(entropy="grad"))
    path("linear_logprobs, metric", size, tokens, linear(entropy="metric"))
    capped = Head(weight, bias, None, 0.5, 30.0)
    path("linear_logprobs, bias, softcap", size, tokens, linear(capped, entropy="grad", temperature=0.7))
    path("linear_logprobs, frozen head", size, tokens, linear(weight.detach(), entropy="grad"))
    path("linear_logprobs, autocast, fp32 weight", size, tokens, autocast)
    path("linear_logprobs, LoRA", size, tokens, linear(Head(weight.detach(), lora=LoRA(down, up))))
    # On the host, as samplers return them: the offsets are read.
    kept = torch.randint(vocab, (8 * len(rows),)), torch.arange(0, 8 * len(rows) + 1, 8)
    path("linear_logprobs, allowed", size, tokens, linear(allowed=kept))

    def of_rows(_: int) -> None:
        fresh()
        backward(rowwise(lambda z: torch.logsumexp(z, -1), hidden, weight, rows=rows))

    path("rowwise", size, tokens, of_rows)
    for objective in OBJECTIVES:
        path(f"linear_policy_loss, {objective}", size, tokens, policy(objective))

    def plain(_: int) -> None:
        logp = normal(len(rows), dtype=FP32, grad=True)
        options = {"entropy": logp.square(), "ref_logp": old, "mask": per_row["mask"]}
        backward(policy_loss(logp, old, old, **options).loss)

    path("policy_loss", size, tokens, plain)

    def planned(_: int) -> None:
        fresh()
        # As a trainer of verl's or slime's kind calls it: lengths and masks on the host.
        samples = [tokens // 4] * 4
        masks = [[1] * (n // 2) for n in samples]
        plan = plan_rows(samples, [n // 2 for n in samples], loss_masks=masks, device="cuda")
        out = linear_logprobs(hidden, weight, targets[plan.rows], rows=plan.rows)
        backward(torch.cat(plan.split(out.logp)))

    path("plan_rows", size, tokens, planned)

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
    from leanstep.heads import (
        PREFERENCES,
        TeacherHead,
        TeacherLogProbs,
        TeacherTopK,
        linear_cross_entropy,
        linear_distill_loss,
        linear_preference_loss,
    )

    tokens, width, vocab = HEADS[size]
    hidden, weight = normal(4, tokens // 4, width, grad=True), normal(vocab, width, grad=True)
    far, wide = normal(tokens, 2 * width), normal(vocab, 2 * width)
    # As a data loader gives them: on the host, half of each sequence padding.
    labels = torch.randint(vocab, (4, tokens // 4))
    labels[:, : tokens // 8] = -100
    rows = torch.arange(tokens // 4, tokens, device="cuda")
    desirable = torch.arange(4, device="cuda") % 2 == 0

    def fresh(loss: Callable[[Tensor], Tensor]) -> Callable[[int], None]:
        def call(_: int) -> None:
            hidden.grad = weight.grad = None
            backward(loss(hidden))

        return call

    reference, head = TeacherHead(hidden.detach(), weight.detach()), TeacherHead(far, wide)
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

    for name, loss in {
        "linear_cross_entropy": lambda h: linear_cross_entropy(h, weight, labels),
        "linear_cross_entropy, none": lambda h: linear_cross_entropy(
            h, weight, labels, reduction="none", label_smoothing=0.1
        ),
        "linear_distill_loss": distill(head),
        "linear_distill_loss, reverse_kl": distill(head, divergence="reverse_kl"),
        "linear_distill_loss, jsd": distill(head, divergence=("jsd", 0.5)),
        "linear_distill_loss, skew_kl": distill(head, divergence=("skew_kl", 0.1)),
        "linear_distill_loss, TeacherLogProbs": distill(TeacherLogProbs(given), some),
        "linear_distill_loss, TeacherTopK": distill(best, some),
        **{f"linear_preference_loss, {kind}": prefer(kind) for kind in PREFERENCES},
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
    from recipes.speedrun.train import GPT, Settings, Shape

    tokens, width, vocab = MODELS[size]
    shape = Shape(model_dim=width, num_heads=width // 128, mlp_hidden=4 * width)
    model = GPT(Settings(vocab_size=vocab), shape).to("cuda")
    inputs, targets, bigrams = (torch.randint(vocab, (tokens,), device="cuda") for _ in range(3))

    def loss(batch: int, mtp: tuple[float, ...]) -> Tensor:
        length = 512 - 64 * batch
        ends = torch.tensor([*range(0, tokens, length), tokens], dtype=torch.int32)
        return model.loss(inputs, targets, bigrams, model.documents(ends, tokens), mtp)

    def call(batch: int) -> None:
        model.zero_grad(set_to_none=True)
        loss(batch, (1.0, 0.5)).backward()

    path("GPT", size, tokens, call)

    def evaluate(batch: int) -> None:
        with torch.no_grad():
            loss(batch, (1.0,))

    path("GPT, evaluation", size, tokens, evaluate)


LENSES = {"tiny": (3, 96, 4), "seed": (13, 2_048, 32), "large": (32, 4_096, 32)}


def lens(size: str) -> None:
    from benchmarks.lens_workloads import make_batch
    from leanstep.lens import LensObjective

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
    "lens": (lens, LENSES),
}
for room in sys.argv[1:] or ROOMS:
    run, sizes = ROOMS[room]
    for size in sizes:
        run(size)
print(json.dumps(seen))
