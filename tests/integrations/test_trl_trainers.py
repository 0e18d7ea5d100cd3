"""Five steps of TRL's DPO, KTO and SFT trainers: gradients, weights and logged metrics of the stock ones.

Padding, ragged lengths, a sample without a single labelled token and gradient accumulation are in every run.
The fp64 reference is the stock trainer on a model of doubles whose head is plain torch.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings

import pytest
import torch
from integrations.tiny_models import VOCAB, causal_lm, tokenizer
from transformers import TrainerCallback

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
    from trl.trainer.utils import FusedCausalLMOutput

    from leanstep.integrations import trl as lean

# TRL and its dependencies warn about their own deprecations; ours stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 5
# The prompt that begins with this word loses all its labels.
SILENT = "w199"
TIMES = ("runtime", "per_second", "flos", "epoch")


def sentence(seed: int, length: int) -> str:
    return " ".join(f"w{(31 * seed + 17 * i + seed * i * i) % 190}" for i in range(length))


def prompts(size: int) -> list[str]:
    return [("" if i != 3 else SILENT + " ") + sentence(i, 2 + 3 * i % 7) for i in range(size)]


def pairs(size: int = 16):
    from datasets import Dataset

    chosen = [" " + sentence(50 + i, 1 + 5 * i % 8) for i in range(size)]
    rejected = [" " + sentence(90 + i, 1 + 3 * i % 8) for i in range(size)]
    return Dataset.from_dict({"prompt": prompts(size), "chosen": chosen, "rejected": rejected})


def judged(size: int = 16):
    from datasets import Dataset

    completions = [" " + sentence(50 + i, 1 + 5 * i % 8) for i in range(size)]
    labels = [i % 3 != 0 for i in range(size)]
    return Dataset.from_dict({"prompt": prompts(size), "completion": completions, "label": labels})


def labelled(size: int = 16):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(0, VOCAB - 3, (6 + 5 * i % 9,), generator=generator).tolist() for i in range(size)]
    labels = [[-100] * len(row) if i == 3 else [-100] * 3 + row[3:] for i, row in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def silenced(collator_class):
    """The trainer's own collator; the completion of a prompt that begins with SILENT counts for nothing."""

    class Silenced(collator_class):
        def __call__(self, *args, **kwargs):
            batch = super().__call__(*args, **kwargs)
            for prefix in ("", "KL_"):
                if f"{prefix}input_ids" in batch:
                    batch[f"{prefix}completion_mask"][batch[f"{prefix}input_ids"][:, 0] == 199] = 0
            return batch

    return Silenced(pad_token_id=VOCAB - 3)


def plain_head(model):
    """Answer TRL's fused call in plain torch, in the model's own dtype."""
    stock = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, num_items_in_batch=None, **kwargs):
        if not fused_lm_head:
            return stock(*args, **kwargs)
        kwargs.setdefault("output_router_logits", None)
        asked = {k: v for k, v in kwargs.items() if v is not None}
        outputs = type(self).forward(self, *args, **asked)
        logits, target = outputs.logits[:, :-1], labels[:, 1:]
        mask = target != -100
        log_p = logits.log_softmax(-1)
        own = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        values = {
            "log_probs": own,
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
            "mean_logits": logits.mean(-1),
            "is_top1": logits.argmax(-1) == target,
        }
        values = {name: value.masked_fill(~mask, 0) for name, value in values.items()}
        aux_loss = getattr(outputs, "aux_loss", None) if asked.get("output_router_logits") else None
        return FusedCausalLMOutput(**values, label_mask=mask, aux_loss=aux_loss)

    model.forward = types.MethodType(forward, model)


class Gradients(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        self.found.append(torch.cat([g.double().flatten() for g in grads if g is not None]))


def run(kind, which, tmp_path, family="llama", model=None, **options):
    """Five steps; which: stock, lean or truth. Gradients [steps, P], weights [P], logged numbers."""
    trainer_class = getattr(trl if which != "lean" else lean, f"{'Lean' * (which == 'lean')}{kind}Trainer")
    model = causal_lm(family) if model is None else copy.deepcopy(model)
    extra = {}
    if kind == "DPO":
        dataset, extra["data_collator"] = pairs(), silenced(DataCollatorForPreference)
    elif kind == "KTO":
        dataset, extra["data_collator"] = judged(), silenced(DataCollatorForUnpairedPreference)
    else:
        dataset = labelled()
    if kind != "SFT" and not hasattr(model, "peft_config"):
        # Another policy than the reference: the first step's ratios are not all 1.
        extra["ref_model"] = causal_lm(family, seed=1)
    if which == "truth":
        model = model.double()
        if "ref_model" in extra:
            extra["ref_model"] = extra["ref_model"].double()
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path / which),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=3,
        **options,
    )
    gradients = Gradients()
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer(),
        callbacks=[gradients], **extra,
    )  # fmt: skip
    if which == "truth":
        for one in (trainer.model, getattr(trainer, "ref_model", None)):
            if one is not None:
                plain_head(one.get_base_model() if hasattr(one, "get_base_model") else one)
    trainer.train()
    logs = [
        {name: value for name, value in entry.items() if not any(word in name for word in TIMES)}
        for entry in trainer.state.log_history
    ]
    weights = torch.cat([p.detach().double().flatten() for p in trainer.model.parameters()])
    return torch.stack(gradients.found), weights, logs


def assert_same_training(kind, tmp_path, **options):
    found = {which: run(kind, which, tmp_path, **options) for which in ("stock", "lean", "truth")}
    truth, logs = found["truth"], {which: found[which][2] for which in found}
    assert len(logs["stock"]) == len(logs["lean"]) == STEPS + 1
    for step, (theirs, ours) in enumerate(zip(logs["stock"], logs["lean"], strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), step
    assert truth[0].norm(dim=1).min() > 0 and len(truth[0]) == STEPS
    for part in (0, 1):
        scale = truth[part].norm(dim=-1)
        error = {which: (found[which][part] - truth[part]).norm(dim=-1) / scale for which in found}
        assert (error["lean"] <= 2 * error["stock"] + 2e-6).all(), (part, error)
    return found


OPTIONS = [
    ("DPO", {}),
    ("DPO", {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5], "label_smoothing": 0.0}),
    ("DPO", {"use_weighting": True, "loss_type": ["robust"], "label_smoothing": 0.1, "family": "gemma2"}),
    ("KTO", {}),
    ("KTO", {"loss_type": "apo_zero_unpaired", "family": "gemma2", "undesirable_weight": 1.7}),
    ("SFT", {}),
    ("SFT", {"loss_type": "dft", "family": "qwen3"}),
    ("DPO", {"family": "qwen3_moe", "router_aux_loss_coef": 0.2}),
    ("SFT", {"family": "qwen3_moe", "router_aux_loss_coef": 0.2}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=lambda o: o if isinstance(o, str) else "-".join(o))
def test_five_steps_equal_the_stock_trainer(tmp_path, kind, options):
    assert_same_training(kind, tmp_path, **options)


@pytest.mark.parametrize("kind", ["DPO", "SFT"])
def test_a_lora_head_trains_its_adapter(tmp_path, kind):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(causal_lm("llama"), LoraConfig(r=4, target_modules=["v_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    with pytest.raises(ValueError, match="lm_head"):
        run(kind, "stock", tmp_path, model=model)
    # In place of the stock trainer, which would ignore the adapter: plain torch in doubles.
    with lean._adapter_on_head_allowed(getattr(trl, f"{kind}Trainer")):
        truth = run(kind, "truth", tmp_path, model=model)
    ours = run(kind, "lean", tmp_path, model=model)
    for found, expected in zip(ours[:2], truth[:2], strict=True):
        assert ((found - expected).norm(dim=-1) <= 1e-4 * expected.norm(dim=-1)).all()
    if kind == "DPO":
        with pytest.raises(ValueError, match="precompute_ref_log_probs: expected False with a trained"):
            run(kind, "lean", tmp_path, model=model, precompute_ref_log_probs=True)
