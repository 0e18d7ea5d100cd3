"""Cases of this folder: reading weights from banks, and a whole training step of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanstep.case import Case, Implementation, Outputs, Params, Step, Workload, register
from leanstep.cpu import find_compiler
from leanstep.gpt.attention import BandPlan, PlanCache, PlanKey
from leanstep.gpt.banks import BankedGPT, unbind_bank
from leanstep.gpt.config import GPTConfig
from leanstep.gpt.model import GPT
from leanstep.gpt.reference import ReferenceGPT

# bank-access


def _make_banks(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    layers, dim, hidden = params["layers"], params["model_dim"], params["hidden"]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(device)

    return Workload(
        {
            "mlp_bank": draw(layers, 2, hidden, dim),
            "attn_bank": draw(layers, 4 * dim, dim),
            "upstream:mlp": draw(layers, 2, hidden, dim),
            "upstream:attn": draw(layers, 4 * dim, dim),
        }
    )


def _access(
    take: Callable[[Tensor, Tensor], tuple[list[Tensor], list[Tensor]]],
) -> Callable[[Workload], Step]:
    """Read every layer's matrices from both banks, and backpropagate one gradient through each."""

    def build(workload: Workload) -> Step:
        t = workload.tensors
        # In a training step, these arrive one at a time from the matrix products.
        upstream = [*t["upstream:mlp"].flatten(0, 1).unbind(0), *t["upstream:attn"].unbind(0)]

        def step() -> Outputs:
            mlp, attn = (t[name].detach().requires_grad_() for name in ("mlp_bank", "attn_bank"))
            mlp_weights, attn_weights = take(mlp, attn)
            grads = torch.autograd.grad([*mlp_weights, *attn_weights], [mlp, attn], upstream)
            return {"grad:mlp_bank": grads[0], "grad:attn_bank": grads[1]}

        return step

    return build


def _by_index(mlp: Tensor, attn: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return [mlp[i, j] for i in range(mlp.shape[0]) for j in range(2)], [attn[i] for i in range(attn.shape[0])]


def _by_halves(mlp: Tensor, attn: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    first, second = mlp[:, 0].unbind(0), mlp[:, 1].unbind(0)
    return [w for pair in zip(first, second, strict=True) for w in pair], list(attn.unbind(0))


def _by_unbind(mlp: Tensor, attn: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return list(unbind_bank(mlp)), list(unbind_bank(attn))


# Three ways to read a bank; values and gradients have the same bits.
BANK_FORMS = {"index": _by_index, "halves": _by_halves, "unbind": _by_unbind}


def train_from_banks(form: str, seed: int, steps: int, *, compiled: bool = False) -> list[float]:
    """Losses of a residual network in bfloat16 whose weights are read from banks in one of `BANK_FORMS`."""
    generator = torch.Generator().manual_seed(seed)
    layers, dim = 4, 32

    def draw(*shape: int, scale: float) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.bfloat16().requires_grad_()

    mlp, attn = draw(layers, 2, 4 * dim, dim, scale=0.1), draw(layers, 4 * dim, dim, scale=0.1)
    truth = torch.randn(dim, dim, generator=generator) / dim**0.5
    optimizer = torch.optim.AdamW([mlp, attn], lr=2e-3)

    def loss_of(x: Tensor, mlp: Tensor, attn: Tensor) -> Tensor:
        mlp_weights, attn_weights = BANK_FORMS[form](mlp, attn)
        hidden = x.bfloat16()
        for layer in range(layers):
            mixed = F.rms_norm(hidden, (dim,)) @ attn_weights[layer].T
            hidden = hidden + mixed[:, :dim] * torch.tanh(mixed[:, dim : 2 * dim])
            up = F.relu(F.rms_norm(hidden, (dim,)) @ mlp_weights[2 * layer].T).square()
            hidden = hidden + up @ mlp_weights[2 * layer + 1]
        return (hidden.float() - x @ truth).square().mean()

    step = torch.compile(loss_of, dynamic=False, fullgraph=True) if compiled else loss_of
    losses = []
    for _ in range(steps):
        loss = step(torch.randn(64, dim, generator=generator), mlp, attn)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def _bank_drift(implementation: str, seed: int, steps: int) -> list[float]:
    form = {"reference": "index", "leanstep": "unbind", "halves": "halves"}[implementation]
    return train_from_banks(form, seed, steps)


def _stream_banks(workload: Workload) -> Step:
    t = workload.tensors

    def step() -> Outputs:
        return {"grad:mlp_bank": t["upstream:mlp"].clone(), "grad:attn_bank": t["upstream:attn"].clone()}

    return step


BANK_ACCESS = register(
    Case(
        name="bank-access",
        summary="Every layer's weights out of the parameter banks, and their gradients back into them.",
        make=_make_banks,
        implementations=(
            Implementation("reference", "reference", _access(_by_index), note="bank[i] in every layer"),
            Implementation(
                "leanstep", "fast", _access(_by_unbind), note="unbind once; backward is one stack"
            ),
            Implementation(
                "halves",
                "fast",
                _access(_by_halves),
                note="bank[:, 0] and bank[:, 1], each unbound: one zero fill per half",
            ),
            Implementation("limit", "limit", _stream_banks, note="one copy of the gradients"),
        ),
        sizes={
            "tiny": {"layers": 11, "model_dim": 32, "hidden": 128},
            "odd": {"layers": 1, "model_dim": 41, "hidden": 17},
            "cpu": {"layers": 11, "model_dim": 256, "hidden": 1024},
            "seed": {"layers": 11, "model_dim": 768, "hidden": 3072},
            "gpu": {"layers": 11, "model_dim": 768, "hidden": 3072},
        },
        prove_sizes=("tiny", "odd"),
        dtypes=(torch.float32, torch.bfloat16),
        # Nothing is computed here, only moved: every path must return the same bits.
        floor=0.0,
        drift=_bank_drift,
    )
)


# gpt-step


def _config(params: Params) -> GPTConfig:
    fields = {k: v for k, v in params.items() if k not in ("preset", "tokens", "document")}
    return GPTConfig.preset(params["preset"], **fields)


def _make_step(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    config = _config(params)
    model = GPT(config, generator=generator)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        # Initial zeros (second MLP matrices, gates, bigrams) would hide half of the gradients.
        spread = 0.05 if parameter.dim() > 1 else 0.1
        noise = torch.randn(parameter.shape, generator=generator) * spread
        tensors[name] = (parameter.detach() + noise).to(dtype).to(device)
    length = params["tokens"]
    # Skewed like text: low ids are common.
    draws = torch.rand(length + 1, generator=generator).square() * config.vocab_size
    tokens = draws.long().clamp(max=config.vocab_size - 1).to(device)
    cuts = torch.arange(0, length, params["document"])
    cu_seqlens = torch.cat([cuts, torch.tensor([length])]).int()
    tensors |= {"inputs": tokens[:-1].clone(), "targets": tokens[1:].clone(), "cu_seqlens": cu_seqlens}
    return Workload(tensors, {"config": config})


Builder = Callable[[GPTConfig], BankedGPT]


def _flat(config: GPTConfig) -> BankedGPT:
    return GPT(config)


def _flat_compiled(config: GPTConfig) -> BankedGPT:
    return GPT(config, run="compiled")


def _modules(config: GPTConfig) -> BankedGPT:
    return ReferenceGPT(config, core="banded")


def _modules_compiled(config: GPTConfig) -> BankedGPT:
    model = ReferenceGPT(config, core="banded")
    # Plans are data: traced, every new one would be a new graph.
    model.plans.get = torch.compiler.disable(model.plans.get)  # type: ignore[method-assign]
    # Two sizes need more graphs than Dynamo's limit of 8, beyond which it runs eager code.
    model.hidden = torch._dynamo.config.patch(recompile_limit=64)(model.hidden)
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


def _modules_dense(config: GPTConfig) -> BankedGPT:
    return ReferenceGPT(config, core="dense")


def _model_of(workload: Workload, builder: Builder) -> BankedGPT:
    """A model whose parameters are the workload's tensors, not copies."""
    model = builder(workload.constants["config"])
    for name, parameter in model.named_parameters():
        parameter.data = workload.tensors[name]
    return model


def _training_step(builder: Builder) -> Callable[[Workload], Step]:
    def build(workload: Workload) -> Step:
        model = _model_of(workload, builder)
        t = workload.tensors

        def step() -> Outputs:
            model.zero_grad(set_to_none=True)
            # Every batch of a training run has different documents, hence different masks.
            model.plans.clear()
            loss = model(t["inputs"], t["targets"], t["cu_seqlens"])
            loss.backward()
            outputs = {"loss": loss.detach()}
            small = []
            for name, parameter in model.named_parameters():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                # A few lambdas are too few values to judge rounding, so they are judged together.
                if grad.numel() < 1000:
                    small.append(grad.reshape(-1))
                else:
                    outputs[f"grad:{name}"] = grad
            outputs["grad:lambdas and gates"] = torch.cat(small)
            model.zero_grad(set_to_none=True)
            return outputs

        return step

    return build


def _bare_products(workload: Workload) -> Step:
    """The matrix products of the step (forward, both gradients) and its attention kernels, nothing else."""
    config, t = workload.constants["config"], workload.tensors
    dtype, length = t["embed"].dtype, t["inputs"].shape[0]
    dim, heads = config.model_dim, config.num_heads
    device = t["inputs"].device
    products = [(3 * dim, dim), (dim, dim)] * len(config.attention_layers)
    products += [(config.mlp_hidden, dim), (dim, config.mlp_hidden)] * config.num_layers
    products += [(config.padded_vocab, dim)]
    operands = [
        (
            torch.ones(length, cols, dtype=dtype, device=device),
            torch.ones(rows, cols, dtype=dtype, device=device),
            torch.ones(length, rows, dtype=dtype, device=device),
        )
        for rows, cols in set(products)
    ]
    counts = [products.count((w.shape[0], w.shape[1])) for _, w, _ in operands]
    model, plans = GPT(config), PlanCache(kind="band")
    bounds = t["cu_seqlens"].tolist()
    attention = []
    for layer in config.attention_layers:
        paired = layer in config.paired_layers
        key = PlanKey(model.window_tokens(layer), paired, config.head_dim, dtype, device)
        plan = plans.get(bounds, key)
        assert isinstance(plan, BandPlan)
        streams = heads // 2 if paired else heads
        shape = (plan.num_blocks, streams, plan.block, config.head_dim)
        band = (plan.num_blocks, streams, plan.front + plan.block, config.head_dim)
        like = {"dtype": dtype, "device": device}
        qkv = [torch.ones(s, **like, requires_grad=True) for s in (shape, band, band)]
        attention.append((qkv, plan.mask, torch.ones(shape, **like)))

    def step() -> Outputs:
        for (inputs, weight, grad), count in zip(operands, counts, strict=True):
            for _ in range(count):
                torch.mm(inputs, weight.T)
                torch.mm(grad, weight)
                torch.mm(grad.T, inputs)
        for qkv, mask, grad in attention:
            out = F.scaled_dot_product_attention(*qkv, attn_mask=mask, scale=0.1)
            torch.autograd.grad(out, qkv, grad)
        return {}

    return step


def _drift(implementation: str, seed: int, steps: int) -> list[float]:
    """Losses per token of a short run on a random Markov chain, AdamW, one implementation."""
    config = GPTConfig.preset("tiny", vocab_size=64, vocab_multiple=64, bigram_vocab_size=320, mtp=(1.0,))
    builder = {"leanstep": _flat, "reference": _modules}[implementation]
    generator = torch.Generator().manual_seed(seed)
    model = builder(config)
    model.reset_parameters(generator)
    likely = torch.randint(0, 64, (64, 3), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    cu_seqlens = torch.arange(0, 513, 64, dtype=torch.int32)
    losses = []
    for _ in range(steps):
        tokens = torch.zeros(513, dtype=torch.long)
        choices = torch.randint(0, 3, (513,), generator=generator).tolist()
        for i in range(1, 513):
            tokens[i] = likely[tokens[i - 1], choices[i]]
        loss = model(tokens[:-1], tokens[1:], cu_seqlens) / 512
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


# Two graphs of C++ kernels per model, size and dtype.
COMPILES = "torch.compile takes minutes on a CPU"


def _no_compiler(params: Params) -> str | None:
    return None if find_compiler() else "torch.compile needs a C++ compiler"


_WIDE: dict[str, Any] = {
    "preset": "record-74",
    "vocab_size": 8192,
    "model_dim": 384,
    "num_heads": 6,
    "head_dim": 64,
    "mlp_hidden": 1536,
    "bigram_vocab_size": 5 * 8192,
    "dtype": "float32",
    "document": 512,
}

GPT_STEP = register(
    Case(
        name="gpt-step",
        summary="Forward, loss and backward of the speedrun GPT.",
        make=_make_step,
        implementations=(
            Implementation(
                "reference",
                "reference",
                _training_step(_modules),
                note="Block, Attention, MLP modules; bank[i] per layer; the same banded attention",
            ),
            Implementation(
                "leanstep",
                "fast",
                _training_step(_flat),
                note="flattened forward, one-pass head loss",
            ),
            Implementation(
                "compiled",
                "fast",
                _training_step(_flat_compiled),
                devices=("cpu",),
                unavailable=_no_compiler,
                on_request=COMPILES,
                note="the same code under torch.compile",
            ),
            Implementation(
                "modules-compiled",
                "peer",
                _training_step(_modules_compiled),
                devices=("cpu",),
                unavailable=_no_compiler,
                on_request=COMPILES,
                note="each module of the reference under torch.compile",
            ),
            Implementation(
                "modules-dense",
                "peer",
                _training_step(_modules_dense),
                unavailable=lambda p: "T x T masks take minutes here" if p["tokens"] > 2048 else None,
                note="the modules with a T x T mask per layer, as plain attention code has it",
            ),
            Implementation(
                "limit", "limit", _bare_products, note="bare matrix products and attention kernels"
            ),
        ),
        sizes={
            "tiny": {"preset": "tiny", "tokens": 2048, "document": 200},
            "odd": {
                "preset": "tiny",
                "tokens": 401,
                "document": 41,
                "vocab_size": 251,
                "bigram_vocab_size": 307,
                "window_block": 5,
            },
            "cpu": {**_WIDE, "tokens": 1024, "num_layers": 11},
            "large": {**_WIDE, "tokens": 4096, "num_layers": 11},
            "gpu": {"preset": "record-74", "tokens": 16384, "document": 512},
        },
        prove_sizes=("odd",),
        dtypes=(torch.float32, torch.bfloat16),
        truth=_training_step(_modules_dense),
        truth_size="odd",
        floor=2e-6,
        drift=_drift,
        default_size="tiny",
    )
)
