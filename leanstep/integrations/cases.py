"""Whole trainer steps, stock against leanstep: `grpo-step` (TRL) and `sft-step` (transformers).

The model is a small random Qwen2 with a tied head and a realistic vocabulary. The benchmark runs the real
trainer's loss function and backward on a fixed batch. Parameters are part of the workload, so every row
starts from the same bits.
"""

# B sequences · T positions · D model · V vocabulary · C completion length

# Both packages export their names lazily, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import functools
import tempfile
import types
import warnings
from typing import Any

import torch
from torch import Tensor

from leanstep.case import Case, Implementation, Outputs, Params, Step, Workload, register

SIZES = {
    "tiny": {"batch": 3, "tokens": 24, "response_frac": 0.25, "vocab": 401, "width": 32, "layers": 1},
    "cpu": {"batch": 4, "tokens": 384, "response_frac": 0.25, "vocab": 151936, "width": 256, "layers": 2},
    "large": {"batch": 8, "tokens": 1024, "response_frac": 0.25, "vocab": 151936, "width": 896, "layers": 4},
    # The whole step, stock logits included, on a card of 24 GB.
    "gpu": {"batch": 4, "tokens": 1024, "response_frac": 0.25, "vocab": 151936, "width": 896, "layers": 24},
}


def make(params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Workload:
    """Draw random parameters, left-padded prompts, ragged completions, group-normalised advantages."""
    model = _model(dict(params), torch.float32)
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


def _model(constants: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=constants["vocab"],
        hidden_size=constants["width"],
        num_hidden_layers=constants["layers"],
        num_attention_heads=max(1, constants["width"] // 64),
        num_key_value_heads=max(1, constants["width"] // 64),
        intermediate_size=2 * constants["width"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=constants["vocab"] - 3,
        eos_token_id=constants["vocab"] - 2,
    )
    with torch.random.fork_rng(devices=[]):
        model: Any = Qwen2ForCausalLM(config)
    return model.to(dtype)


def _loaded_model(workload: Workload) -> Any:
    """Build the model on the workload's parameters, not copies: a step that writes to them is detected."""
    dtype = workload.tensors["advantages"].dtype
    model = _model(workload.constants, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = workload.tensors[f"param:{name}"]
    return model.train()


def _gradients(model: Any, loss: Tensor) -> Outputs:
    loss.backward()
    outputs: Outputs = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        outputs[f"grad:{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # The caller owns the results: the next call starts without gradients.
        parameter.grad = None
    return outputs


def _trainer(model: Any, vocab: int) -> Any:
    """Return a real GRPOTrainer around the model; its data set and rewards are never used here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        words = Tokenizer(models.WordLevel({"a": 0, "<pad>": vocab - 3, "<eos>": vocab - 2}, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
        arguments = GRPOConfig(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=2,
            num_generations=2,
            use_cpu=not next(model.parameters()).is_cuda,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            entropy_coef=0.01,
            temperature=0.9,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=tokenizer,
        )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def _batch(workload: Workload) -> dict[str, Tensor]:
    ids, mask, size = workload.tensors["ids"], workload.tensors["mask"], workload.constants["completion"]
    return {
        "prompt_ids": ids[:, :-size],
        "prompt_mask": mask[:, :-size],
        "completion_ids": ids[:, -size:],
        "completion_mask": mask[:, -size:],
        "advantages": workload.tensors["advantages"],
        "num_items_in_batch": mask[:, -size:].sum(),
    }


def _grpo(head: Any) -> Any:
    def build(workload: Workload) -> Step:
        model = _loaded_model(workload)
        trainer = _trainer(model, workload.constants["vocab"])
        head(trainer)
        inputs = _batch(workload)

        def step() -> Outputs:
            trainer._metrics["train"].clear()
            return _gradients(model, trainer._compute_loss(model, inputs))

        return step

    return build


def _stock_head(trainer: Any) -> None:
    """Return the trainer as TRL built it."""


def _lean_head(trainer: Any) -> None:
    from leanstep.integrations.trl import apply_leanstep

    apply_leanstep(trainer, check=False)


def _full_logits_head(trainer: Any) -> None:
    """Compute TRL's fused calls from the whole [B, T, V] logits in the model's dtype: the fp64 reference."""
    from trl.trainer.utils import FusedCausalLMOutput

    model, stock = trainer.model, trainer.model.forward

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        logits = stock(*args, **kwargs).logits[:, :-1] / trainer.temperature
        target, log_p = labels[:, 1:], torch.log_softmax(logits, -1)
        mask = target != -100
        logp = log_p.gather(-1, target.clamp(min=0)[..., None]).squeeze(-1) * mask
        entropy = -(log_p.exp() * log_p).sum(-1) * mask
        return FusedCausalLMOutput(loss=-logp.sum(), log_probs=logp, entropy=entropy, label_mask=mask)

    model.forward = types.MethodType(forward, model)


def _labels(workload: Workload) -> Tensor:
    labels = workload.tensors["ids"].masked_fill(workload.tensors["mask"] == 0, -100)
    labels[:, : -workload.constants["completion"]] = -100
    return labels


def _sft(prepare: Any) -> Any:
    def build(workload: Workload) -> Step:
        model = _loaded_model(workload)
        loss_of = prepare(model)
        batch = {"input_ids": workload.tensors["ids"], "attention_mask": workload.tensors["mask"]}
        labels = _labels(workload)
        return lambda: _gradients(model, loss_of(model, batch, labels))

    return build


def _stock_loss(model: Any) -> Any:
    return lambda model, batch, labels: model(**batch, labels=labels).loss


def _lean_loss(model: Any) -> Any:
    from leanstep.integrations.transformers import apply_leanstep

    apply_leanstep(model, check=False)
    return _stock_loss(model)


def _full_logits_loss(model: Any) -> Any:
    """Return the mean over labelled tokens without transformers' cast of the logits to fp32."""

    def loss_of(model: Any, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)

    return loss_of


def _limit(workload: Workload) -> Step:
    """Run the backbone's forward and backward, and the three head GEMMs on completion rows, tile by tile."""
    model = _loaded_model(workload)
    batch = {
        "input_ids": workload.tensors["ids"],
        "attention_mask": workload.tensors["mask"],
        "use_cache": False,
    }
    rows = (_labels(workload)[:, 1:] != -100).nonzero()
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


register(
    Case(
        name="grpo-step",
        summary="The loss and backward of a TRL GRPOTrainer, stock against leanstep's head.",
        make=make,
        implementations=(
            Implementation(
                "trl", "reference", _grpo(_stock_head), requires=("trl", "datasets"), note="stock TRL"
            ),
            Implementation("leanstep", "fast", _grpo(_lean_head), requires=("trl", "datasets")),
            Implementation(
                "limit", "limit", _limit, requires=("transformers",), note="backbone + head GEMMs"
            ),
        ),
        sizes=SIZES,
        dtypes=(torch.float32, torch.bfloat16),
        truth=_grpo(_full_logits_head),
        # TRL keeps its row statistics in fp32 whatever the model's dtype; one entropy bonus sums them all.
        floor=2e-6,
        truth_size="tiny",
    )
)
register(
    Case(
        name="sft-step",
        summary="The loss and backward of a transformers causal LM with masked prompts, stock and leanstep.",
        make=make,
        implementations=(
            Implementation(
                "transformers", "reference", _sft(_stock_loss), requires=("transformers",), note="stock"
            ),
            Implementation("leanstep", "fast", _sft(_lean_loss), requires=("transformers",)),
            Implementation(
                "limit", "limit", _limit, requires=("transformers",), note="backbone + head GEMMs"
            ),
        ),
        sizes=SIZES,
        dtypes=(torch.float32, torch.bfloat16),
        truth=_sft(_full_logits_loss),
        truth_size="tiny",
    )
)
