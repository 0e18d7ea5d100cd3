"""The loss and backward of a transformers causal LM with masked prompts, stock and leanstep.

python -m benchmarks.sft_step --help
"""

# B sequences · T positions · D model · V vocabulary · C completion length

# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    Benchmark,
    Row,
    Step,
    Workload,
    main,
)
from benchmarks.trainer_workloads import SIZES, labels_of, limit_step, loaded_model, loss_gradients, make


def _sft(prepare: Any) -> Any:
    def build(workload: Workload) -> Step:
        model = loaded_model(workload)
        loss_of = prepare(model)
        batch = {"input_ids": workload.tensors["ids"], "attention_mask": workload.tensors["mask"]}
        labels = labels_of(workload)
        return lambda: loss_gradients(model, loss_of(model, batch, labels))

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


BENCHMARK = Benchmark(
    name="sft-step",
    summary="The loss and backward of a transformers causal LM with masked prompts, stock and leanstep.",
    make=make,
    rows=(
        Row("transformers", "reference", _sft(_stock_loss), requires=("transformers",), note="stock"),
        Row("leanstep", "fast", _sft(_lean_loss), requires=("transformers",)),
        Row("limit", "limit", limit_step, requires=("transformers",), note="backbone + head GEMMs"),
    ),
    sizes=SIZES,
    dtypes=(torch.float32, torch.bfloat16),
    truth=_sft(_full_logits_loss),
    truth_size="tiny",
)

if __name__ == "__main__":
    main(BENCHMARK)
