"""Forward, loss and backward of the speedrun GPT.

python -m benchmarks.gpt_step --help
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.harness import (
    Benchmark,
    Outputs,
    Params,
    Row,
    Step,
    Workload,
    main,
)
from recipes.speedrun.data import bigram_hash
from recipes.speedrun.reference import ReferenceGPT
from recipes.speedrun.train import GPT, SIZES, Settings, attend


def _make_step(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    settings = Settings(vocab_size=params["vocab_size"])
    fields = {key: params[key] for key in ("bigram_vocab_size", "window_block") if key in params}
    shape = replace(SIZES[params["preset"]].shape, **fields)
    model = GPT(settings, shape, generator=generator)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        # Initial zeros (second MLP matrices, gates, bigrams) would hide half of the gradients.
        spread = 0.05 if parameter.dim() > 1 else 0.1
        noise = torch.randn(parameter.shape, generator=generator) * spread
        tensors[name] = (parameter.detach() + noise).to(dtype).to(device)
    length = params["tokens"]
    # Skewed like text: low ids are common.
    draws = torch.rand(length + 1, generator=generator).square() * settings.vocab_size
    tokens = draws.long().clamp(max=settings.vocab_size - 1)
    bigrams = bigram_hash(tokens[:-1], shape.bigram_vocab_size)
    cuts = torch.arange(0, length, params["document"])
    cu_seqlens = torch.cat([cuts, torch.tensor([length])]).int()
    tensors["tokens"], tensors["targets"] = tokens[:-1].to(device), tokens[1:].to(device)
    tensors["bigrams"] = bigrams.to(device)
    return Workload(tensors, {"settings": settings, "shape": shape, "cu_seqlens": cu_seqlens})


def _model_of(workload: Workload, build: type[GPT]) -> GPT:
    """A model whose parameters are the workload's tensors, not copies."""
    model = build(workload.constants["settings"], workload.constants["shape"])
    for name, parameter in model.named_parameters():
        parameter.data = workload.tensors[name]
    return model


def _training_step(model_class: type[GPT]) -> Callable[[Workload], Step]:
    def build(workload: Workload) -> Step:
        model = _model_of(workload, model_class)
        t, cu_seqlens = workload.tensors, workload.constants["cu_seqlens"]

        def step() -> Outputs:
            model.zero_grad(set_to_none=True)
            # Every batch of a training run has different documents, hence different masks.
            documents = model.documents(cu_seqlens, len(t["tokens"]))
            loss = model.loss(t["tokens"], t["targets"], t["bigrams"], documents, (1.0, 0.5, 0.25))
            loss.backward()
            outputs = {"loss": loss.detach()}
            small = []
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                # A few lambdas are too few values to judge rounding, so they are judged together.
                if parameter.numel() < 1000:
                    small.append(parameter.grad.reshape(-1))
                else:
                    outputs[f"grad:{name}"] = parameter.grad
            outputs["grad:lambdas and gates"] = torch.cat(small)
            model.zero_grad(set_to_none=True)
            return outputs

        return step

    return build


def _bare_products(workload: Workload) -> Step:
    """The matrix products of the step (forward, both gradients) and its attention kernels, nothing else."""
    shape, t = workload.constants["shape"], workload.tensors
    length, heads, dim = len(t["tokens"]), shape.num_heads, shape.model_dim
    like = {"dtype": t["embed"].dtype, "device": t["embed"].device}
    products = [(3 * dim, dim), (dim, dim)] * len(shape.attention_layers)
    products += [(shape.mlp_hidden, dim), (dim, shape.mlp_hidden)] * shape.num_layers
    products += [(t["embed"].shape[0], dim)]
    operands = {
        (rows, cols): [torch.ones(size, **like) for size in ((length, cols), (rows, cols), (length, rows))]
        for rows, cols in products
    }
    model = _model_of(workload, GPT)
    documents = model.documents(workload.constants["cu_seqlens"], length)
    calls = []
    for layer in shape.attention_layers:
        paired = layer in shape.paired_layers
        size = (length * (1 + paired), heads // (1 + paired), shape.head_dim)
        qkv = [torch.ones(size, **like, requires_grad=True) for _ in range(3)]
        calls.append((qkv, model.window_of(layer), paired, torch.ones(size, **like)))

    def step() -> Outputs:
        for product in products:
            inputs, weight, grad = operands[product]
            torch.mm(inputs, weight.T)
            torch.mm(grad, weight)
            torch.mm(grad.T, inputs)
        for qkv, window, paired, grad in calls:
            torch.autograd.grad(attend(*qkv, documents, window, paired, 0.1), qkv, grad)
        return {}

    return step


BENCHMARK = Benchmark(
    name="gpt-step",
    summary="Forward, loss and backward of the speedrun GPT.",
    make=_make_step,
    rows=(
        Row(
            "plain",
            "reference",
            _training_step(ReferenceGPT),
            unavailable=lambda p: "T x T masks take minutes here" if p["tokens"] > 2048 else None,
            note="Block, Attention, MLP modules; bank[i] and a T x T mask per layer; whole logits",
        ),
        Row("leanstep", "fast", _training_step(GPT), note="flat forward, banded attention, head in chunks"),
        Row("limit", "limit", _bare_products, note="bare matrix products and attention kernels"),
    ),
    sizes={
        "tiny": {"preset": "tiny", "tokens": 2048, "document": 200, "vocab_size": 512},
        "odd": {
            "preset": "tiny",
            "tokens": 401,
            "document": 41,
            "vocab_size": 251,
            "bigram_vocab_size": 307,
            "window_block": 5,
        },
        "gpu": {"preset": "record-74", "tokens": 16384, "document": 512, "vocab_size": 50257},
    },
    prove_sizes=("odd",),
    dtypes=(torch.float32, torch.bfloat16),
    truth=_training_step(ReferenceGPT),
    truth_size="odd",
    floor=2e-6,
    default_size="tiny",
)

if __name__ == "__main__":
    main(BENCHMARK)
