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
        LMHead,
        PolicyBatch,
        ReferenceHead,
        Transform,
        linear_logprobs,
        linear_policy_loss,
        token_logprobs,
    )

    tokens, width, vocab = HEADS[size]
    hidden, weight = normal(tokens, width, grad=True), normal(vocab, width, grad=True)
    master, bias = normal(vocab, width, dtype=FP32, grad=True), normal(vocab, grad=True)
    targets = torch.randint(vocab, (tokens,), device="cuda")
    rows = torch.arange(tokens // 4, tokens, device="cuda")
    old = normal(len(rows), dtype=FP32)

    def fresh() -> None:
        for tensor in (hidden, weight, master, bias):
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
            batch = PolicyBatch(old_logp=old, advantages=old, mask=torch.ones_like(old))
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
    path("linear_policy_loss", size, tokens, policy())
    path("linear_policy_loss, clip_cov", size, tokens, policy("clip_cov"))
    logits = normal(min(tokens, 2048), vocab, grad=True)

    def existing(_: int) -> None:
        logits.grad = None
        out = token_logprobs(logits, targets[: len(logits)], entropy="grad")
        backward(out.logp, out.entropy)

    path("token_logprobs", size, tokens, existing)


def objectives(size: str) -> None:
    from leanstep.logprob import Allowed, ReferenceHead, Transform
    from leanstep.objectives import (
        HardLabels,
        TeacherHead,
        linear_cross_entropy,
        linear_distill_loss,
        linear_masked_logprobs,
        linear_preference_loss,
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
    for name, loss in {
        "linear_cross_entropy": lambda h: linear_cross_entropy(h, weight, labels),
        "linear_cross_entropy, all rows": lambda h: linear_cross_entropy(h, weight, labels, rows="all"),
        "linear_distill_loss": lambda h: (
            linear_distill_loss(
                h.flatten(0, 1), weight, TeacherHead(far, wide), divergence=("jsd", 0.5), rows=rows
            ).loss
        ),
        "linear_distill_loss, labels, softcap": lambda h: (
            linear_distill_loss(
                h.flatten(0, 1),
                weight,
                TeacherHead(far, wide),
                rows=rows,
                hard=HardLabels(hard, 0.5),
                temperature=2.0,
                transform=Transform(softcap=30.0),
            ).loss
        ),
        "linear_preference_loss": lambda h: (
            linear_preference_loss(h, weight, labels, reference=reference).loss
        ),
        "linear_preference_loss, kto": lambda h: (
            linear_preference_loss(
                h, weight, labels, objective="kto", reference=reference, desirable=desirable
            ).loss
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


LENSES = {"tiny": (3, 96, 4), "seed": (13, 2_048, 32), "large": (32, 4_096, 32)}


def preference(size: str) -> None:
    from leanstep.preference import LensObjective
    from leanstep.preference.cases import make_batch
    from leanstep.preference.ragged import bradley_terry, hinge, make_groups, plackett_luce

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
    # Groups as a loader that works ahead leaves them: offsets on the device.
    count = 16 * samples
    scores, labels = normal(count, dtype=FP32, grad=True), normal(count, dtype=FP32)
    groups = make_groups(scores, torch.arange(0, count + 1, 16, device="cuda"), max_group_size=16)
    for loss in (bradley_terry, hinge, plackett_luce):
        path(loss.__name__, size, tokens, lambda _, loss=loss: backward(loss(scores, labels, groups)))
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
    "preference": (preference, LENSES),
}
for room in sys.argv[1:] or ROOMS:
    run, sizes = ROOMS[room]
    for size in sizes:
        run(size)
print(json.dumps(seen))
