"""The loss and backward of a TRL GRPOTrainer, stock against leanstep's head.

python -m benchmarks.grpo_step --help
"""

# B sequences · T positions · D model · V vocabulary · C completion length

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import functools
import tempfile
import types
import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    Benchmark,
    Outputs,
    Row,
    Step,
    Workload,
    main,
)
from benchmarks.trainer_workloads import SIZES, limit_step, loaded_model, loss_gradients, make


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
        model = loaded_model(workload)
        trainer = _trainer(model, workload.constants["vocab"])
        head(trainer)
        inputs = _batch(workload)

        def step() -> Outputs:
            trainer._metrics["train"].clear()
            return loss_gradients(model, trainer._compute_loss(model, inputs))

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


BENCHMARK = Benchmark(
    name="grpo-step",
    summary="The loss and backward of a TRL GRPOTrainer, stock against leanstep's head.",
    make=make,
    rows=(
        Row("trl", "reference", _grpo(_stock_head), requires=("trl", "datasets"), note="stock TRL"),
        Row("leanstep", "fast", _grpo(_lean_head), requires=("trl", "datasets")),
        Row("limit", "limit", limit_step, requires=("transformers",), note="backbone + head GEMMs"),
    ),
    sizes=SIZES,
    dtypes=(torch.float32, torch.bfloat16),
    truth=_grpo(_full_logits_head),
    # TRL keeps its row statistics in fp32 whatever the model's dtype; one entropy bonus sums them all.
    floor=2e-6,
    truth_size="tiny",
)

if __name__ == "__main__":
    main(BENCHMARK)
