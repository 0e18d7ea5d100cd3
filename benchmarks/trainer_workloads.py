"""Whole trainer steps, stock against leanstep: `grpo-step` (TRL) and `sft-step` (transformers)."""

# B sequences · T positions · D model · V vocabulary · C completion length

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    Outputs,
    Params,
    Step,
    Workload,
)

# On a CPU: two layers of width 256, whose head has most of the parameters. On a GPU: Qwen2-0.5B's shapes; the
# whole step, stock logits included, fits on a card of 24 GB.
_TINY = {"vocab": 401, "width": 32, "layers": 1, "heads": 1, "kv_heads": 1, "mlp": 64}
_SMALL = {"vocab": 151936, "width": 256, "layers": 2, "heads": 4, "kv_heads": 4, "mlp": 512}
_QWEN = {"vocab": 151936, "width": 896, "layers": 24, "heads": 14, "kv_heads": 2, "mlp": 4864}
SIZES = {
    "tiny": {"batch": 3, "tokens": 24, "response_frac": 0.25, **_TINY},
    "cpu": {"batch": 2, "tokens": 256, "response_frac": 0.25, **_SMALL},
    "gpu": {"batch": 4, "tokens": 1024, "response_frac": 0.25, **_QWEN},
}


def make(params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Workload:
    """Draw random parameters, left-padded prompts, ragged completions, group-normalised advantages."""
    model = build_model(dict(params), torch.float32)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator) * (0.05 if parameter.dim() > 1 else 0.02)
        tensors[f"param:{name}"] = (value + (parameter.dim() == 1)).to(device, dtype)
    batch, total = params["batch"], params["tokens"]
    completion = max(1, round(total * params["response_frac"]))
    ids = torch.randint(0, params["vocab"] - 3, (batch, total), generator=generator)
    mask = torch.ones(batch, total, dtype=torch.long)
    for index in range(batch):
        mask[index, : (index * 5) % max(1, (total - completion) // 2)] = 0
        mask[index, total - (index * 3) % max(1, completion // 2) :] = 0 if index else 1
    advantages = torch.randn(batch, generator=generator)
    tensors |= {"ids": ids.to(device), "mask": mask.to(device), "advantages": advantages.to(device, dtype)}
    return Workload(tensors, {**params, "completion": completion})


def build_model(constants: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=constants["vocab"],
        hidden_size=constants["width"],
        num_hidden_layers=constants["layers"],
        num_attention_heads=constants["heads"],
        num_key_value_heads=constants["kv_heads"],
        intermediate_size=constants["mlp"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=constants["vocab"] - 3,
        eos_token_id=constants["vocab"] - 2,
    )
    with torch.random.fork_rng(devices=[]):
        model: Any = Qwen2ForCausalLM(config)
    return model.to(dtype)


def loaded_model(workload: Workload) -> Any:
    """Build the model on the workload's parameters, not copies: a step that writes to them is detected."""
    dtype = workload.tensors["advantages"].dtype
    model = build_model(workload.constants, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = workload.tensors[f"param:{name}"]
    return model.train()


def loss_gradients(model: Any, loss: Tensor) -> Outputs:
    loss.backward()
    outputs: Outputs = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        outputs[f"grad:{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # The caller owns the results: the next call starts without gradients.
        parameter.grad = None
    return outputs


def labels_of(workload: Workload) -> Tensor:
    labels = workload.tensors["ids"].masked_fill(workload.tensors["mask"] == 0, -100)
    labels[:, : -workload.constants["completion"]] = -100
    return labels


def limit_step(workload: Workload) -> Step:
    """Run the backbone's forward and backward, and the three head GEMMs on completion rows, tile by tile."""
    model = loaded_model(workload)
    batch = {
        "input_ids": workload.tensors["ids"],
        "attention_mask": workload.tensors["mask"],
        "use_cache": False,
    }
    rows = (labels_of(workload)[:, 1:] != -100).nonzero()
    tile = 8192

    def step() -> Outputs:
        hidden = model.base_model(**batch).last_hidden_state
        weight = model.get_output_embeddings().weight.detach()
        selected = hidden.detach()[rows[:, 0], rows[:, 1]]
        d_selected, d_weight = torch.zeros_like(selected), torch.empty_like(weight)
        buffer = selected.new_empty(selected.shape[0], tile)
        for start in range(0, weight.shape[0], tile):
            part = weight[start : start + tile]
            logits = (
                buffer[:, : part.shape[0]]
                if part.shape[0] == tile
                else selected.new_empty(len(selected), len(part))
            )
            torch.mm(selected, part.T, out=logits)
            d_selected.addmm_(logits, part)
            torch.mm(logits.T, selected, out=d_weight[start : start + tile])
        d_hidden = torch.zeros_like(hidden)
        d_hidden[rows[:, 0], rows[:, 1]] = d_selected
        hidden.backward(d_hidden)
        model.zero_grad()
        return {}

    return step
