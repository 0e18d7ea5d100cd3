"""slime's and miles' own code with the adapter: losses, metrics and gradients of the stock trainer.

Runs where a checkout is named: LEANSTEP_SLIME=~/slime (tests/integrations/slime_package.py).
"""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import slime_package
from slime_package import arguments, import_trainer, module, small_model

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(slime_package.checkout() is None, reason="LEANSTEP_SLIME names no checkout of slime"),
]

WIDTH, VOCAB = 16, 72
TOTALS, RESPONSES = [61, 44, 53, 6], [41, 37, 29, 2]
FLAGS = {
    "response": {"log_probs_response_only": True},
    "mask": {"log_probs_response_only": True, "log_probs_loss_mask_only": True},
    "hidden": {"log_probs_from_hidden": True},
    "hidden mask": {"log_probs_from_hidden": True, "log_probs_loss_mask_only": True},
}
TOLERANCE = 1e-6


class Trainer:
    """The modules of slime or miles that a training step goes through."""

    def __init__(self) -> None:
        self.package = import_trainer()
        base = f"{self.package}.backends"
        self.models = module(f"{base}.megatron_utils.model")
        if self.package == "slime":
            self.loss = self.scoring = self.losses = module(f"{base}.megatron_utils.loss")
            self.data = module(f"{base}.megatron_utils.data")
            self.cp_utils = module(f"{base}.megatron_utils.cp_utils")
        else:
            self.loss = module(f"{base}.training_utils.loss")
            self.scoring = module(f"{base}.training_utils.loss_hub.logit_processors")
            self.losses = module(f"{base}.training_utils.loss_hub.losses")
            self.data = module(f"{base}.training_utils.data")
            self.cp_utils = module(f"{base}.training_utils.cp_utils")
        # Compiled, the loss is rounded differently from process to process.
        torch._dynamo.config.disable = True
        # The batches of slime are on its accelerator, those of its older versions and of miles on a GPU.
        here = torch.device("cpu")
        self.data.accelerator = SimpleNamespace(device=lambda: here, current_device=lambda: here)
        torch.cuda.current_device = lambda: here
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        random = module("megatron.core.tensor_parallel.random")
        random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
        self.stock_scoring = self.scoring.get_log_probs_and_entropy
        self.stock = [
            (self.scoring, "get_log_probs_and_entropy", self.stock_scoring),
            (self.losses, "policy_loss_function", self.losses.policy_loss_function),
            (self.models, "get_model_provider_func", self.models.get_model_provider_func),
        ]

        if self.package == "miles":
            self._set_miles_groups()

    @property
    def has_top_p(self) -> bool:
        return "top_p_token_ids" in inspect.signature(self.stock_scoring).parameters

    @property
    def tolerance(self) -> float:
        """Gradients of Megatron's cross-entropy, which pull request 2076 and miles use, go through bf16."""
        return TOLERANCE if self.has_top_p else 4e-3

    def _set_miles_groups(self) -> None:
        groups = module("miles.utils.ft_utils.process_group_utils")
        alone = groups.GroupInfo(rank=0, size=1, group=None)
        state = module("miles.backends.megatron_utils.parallel").create_megatron_parallel_state(
            indep_dp=alone
        )
        module("miles.backends.training_utils.parallel").set_parallel_state(state)

    def loss_of(self, args, batch, output):
        """The trainer's loss, the values that it logs."""
        if self.package == "slime":
            loss, _, log = self.loss.loss_function(args, batch, 1, len(TOTALS), output)
        else:
            settings = {"apply_megatron_loss_scaling": True, "num_rollouts": len(TOTALS)}
            loss, _, log = self.loss.loss_function(args, batch, 1, output, **settings)
        return loss, log["values"]

    def restore(self) -> None:
        from leanstep.integrations.slime import _replace

        for owner, name, function in self.stock:
            if getattr(owner, name) is not function:
                _replace(owner, name, function)


def rollout(trainer: Trainer, args):
    """Four samples; what a rank stores of them is cut for its context-parallel rank."""
    generator = torch.Generator().manual_seed(5)
    local = trainer.cp_utils.slice_log_prob_with_cp
    samples = {"total_lengths": TOTALS, "response_lengths": RESPONSES, "tokens": [], "loss_masks": []}
    stored = ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
    samples.update({key: [] for key in stored})
    for total, response in zip(TOTALS, RESPONSES, strict=True):
        samples["tokens"].append(torch.randint(0, VOCAB, (total,), generator=generator))
        mask = (torch.rand(response, generator=generator) < 0.7).int()
        samples["loss_masks"].append(mask)
        for key in stored:
            values = torch.randn(response, generator=generator) - (0.0 if key == "advantages" else 4.0)
            samples[key].append(local(values, total, response))
    samples["partition"] = list(range(len(TOTALS)))
    samples["rollout_mask_sums"] = [mask.sum() for mask in samples["loss_masks"]]
    sizes = [torch.randint(1, 9, (n,), generator=generator) for n in RESPONSES]
    samples["rollout_top_p_token_ids"] = [
        torch.cat([torch.randperm(VOCAB, generator=generator)[:k] for k in row]).int() for row in sizes
    ]
    samples["rollout_top_p_token_offsets"] = [
        torch.cat([torch.zeros(1), row.cumsum(0)]).int() for row in sizes
    ]
    return samples


def micro_batch(trainer: Trainer, args):
    samples = rollout(trainer, args)
    iterator = trainer.data.DataIterator(samples, micro_batch_indices=[list(range(len(TOTALS)))])
    pad, allgather = args.data_pad_size_multiplier, args.allgather_cp
    return trainer.data.get_batch(iterator, list(samples), pad_multiplier=pad, allgather_cp=allgather)


def build(trainer: Trainer, args, settings, *, pre_process=True):
    """The model through the trainer's own provider."""
    slime_package.build = lambda **stage: small_model(**settings, width=WIDTH, vocab=VOCAB, **stage)
    args.custom_model_provider_path = "slime_package.provide"
    return trainer.models.get_model_provider_func(args, "actor")(pre_process=pre_process, post_process=True)


def forward(model, batch):
    return model(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        loss_mask=batch["full_loss_masks"],
    )


def step(trainer: Trainer, args, model):
    """Loss, metrics and gradients of one micro-batch."""
    batch = micro_batch(trainer, args)
    captures = hasattr(trainer.loss, "enable_log_prob_capture") and args.loss_type == "policy_loss"
    captures = captures and not getattr(args, "log_probs_loss_mask_only", False)
    if captures:
        trainer.loss.enable_log_prob_capture()
    loss, metrics = trainer.loss_of(args, batch, forward(model, batch))
    captured = trainer.loss.drain_captured_log_probs() if captures else {}
    assert len(captured) == (len(TOTALS) if captures else 0)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    # One vector: a rank's loss may be a small difference of large terms.
    results = {"values": torch.cat([loss.detach().view(1), metrics]), **gradients}
    return results | ({"captured": torch.cat([captured[k] for k in range(len(TOTALS))])} if captures else {})


def stored_log_probs(trainer: Trainer, args, model):
    """Old log-probs and entropy, as the trainer's forward_only asks for them."""
    batch = micro_batch(trainer, args)
    options = trainer.loss.get_rollout_top_p_logprob_kwargs(args, batch) if trainer.has_top_p else {}
    with torch.no_grad():
        results = trainer.scoring.get_log_probs_and_entropy(
            forward(model, batch),
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=True,
            **options,
        )
    results = results if trainer.package == "miles" else results[1]
    return {key: torch.cat(values) for key, values in results.items()}


def distance(ours, theirs):
    """The largest relative distance of a result or gradient, and its name."""
    assert theirs.keys() - ours.keys() <= {"captured"}
    worst = (0.0, "")
    for name, own in ours.items():
        x = theirs[name]
        assert own.shape == x.shape and torch.isfinite(own).all(), name
        far = (own.double() - x.double()).norm() / x.double().norm().clamp(min=1e-12)
        worst = max(worst, (float(far), name))
    return worst


SCENARIOS = {
    "plain": {},
    "chunks": {"log_probs_chunk_size": 5},
    "top-p": {"rollout_top_p": 0.9},
    "no entropy gradient": {"entropy_coef": 0.0},
    "recomputed loss": {"recompute_loss_function": True},
    "tis": {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0, "custom_tis_function_path": None},
    "gspo": {"advantage_estimator": "gspo"},
    "sft": {"loss_type": "sft_loss"},
    "allgather": {"allgather_cp": True},
}


def compare(rank: int, world_size: int, tp: int, cp: int, sequence_parallel: bool):
    """Largest distance from stock, per scenario and flags."""
    from megatron.core import parallel_state

    from leanstep.integrations.slime import apply_leanstep

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    trainer = Trainer()
    settings = {"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel}
    distances = {}
    for scenario, changes in SCENARIOS.items():
        if scenario == "top-p" and not trainer.has_top_p:
            continue
        trainer.restore()
        args = arguments(**changes)
        model = build(trainer, args, settings)
        expected = step(trainer, args, model), stored_log_probs(trainer, args, model)
        for flags, values in FLAGS.items():
            trainer.restore()
            args = arguments(**changes, **values, sequence_parallel=sequence_parallel)
            apply_leanstep(args)
            model = build(trainer, args, settings)
            ours = step(trainer, args, model), stored_log_probs(trainer, args, model)
            far = [distance(x, y) for x, y in zip(ours, expected, strict=True)]
            distances[scenario, flags] = [*far, trainer.tolerance]
    parallel_state.destroy_model_parallel()
    return distances


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel"),
    [(1, 1, False), (2, 1, False), (1, 2, False), (2, 2, False), (2, 1, True), (2, 2, True)],
)
def test_a_training_step_is_the_stock_trainers(run_ranks, tp, cp, sequence_parallel):
    for rank, distances in enumerate(run_ranks(tp * cp, compare, tp, cp, sequence_parallel, timeout=400)):
        for case, (of_step, of_stored, tolerance) in distances.items():
            print(f"TP {tp} CP {cp} SP {sequence_parallel} rank {rank} {case}: {of_step} {of_stored}")
            assert of_step[0] < tolerance and of_stored[0] < TOLERANCE, (case, rank, of_step, of_stored)


def special_models(rank: int, world_size: int):
    """Distances from stock of a bf16 model, one with tied embeddings and a pipeline's last stage."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import Float16Module

    from leanstep.integrations.slime import apply_leanstep

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    trainer = Trainer()
    distances = {}
    for name, settings in {"bf16": {"bf16": True}, "tied": {"tied": True}, "last stage": {}}.items():
        results = []
        for flags in ({}, FLAGS["hidden"]):
            trainer.restore()
            args = arguments(**flags)
            apply_leanstep(args)
            is_stage = name == "last stage"
            sharding = {"tp": world_size, "cp": 1, "sequence_parallel": name != "bf16"}
            model = build(trainer, args, {**sharding, **settings}, pre_process=not is_stage)
            batch = micro_batch(trainer, args)
            received = torch.randn(batch["tokens"].shape[1] // world_size, 1, WIDTH).requires_grad_()
            if is_stage:
                torch.manual_seed(3)
                torch.nn.init.normal_(received.detach())
                model.set_input_tensor(received)
            whole = Float16Module(model.config, model) if name == "bf16" else model
            # Float16Module converts its output on a GPU only.
            loss, _ = trainer.loss_of(args, batch, forward(whole, batch).float())
            loss.backward()
            weight = (
                model.shared_embedding_or_output_weight() if name == "tied" else model.output_layer.weight
            )
            results.append({"loss": loss.detach().view(1), "head": weight.grad})
            if is_stage:
                results[-1]["received"] = received.grad
        distances[name] = distance(results[1], results[0])
    parallel_state.destroy_model_parallel()
    return distances


def test_bf16_tied_embeddings_and_the_last_stage(run_ranks):
    for distances in run_ranks(2, special_models, timeout=400):
        print(distances)
        assert distances["tied"][0] < TOLERANCE and distances["last stage"][0] < TOLERANCE, distances
        # slime rounds logits to bf16.
        assert distances["bf16"][0] < 2e-2, distances


def parser_options(rank: int, world_size: int):
    """The trainer's own options with leanstep's in front, as its parse_args adds them."""
    from argparse import ArgumentParser

    from leanstep.integrations.slime import add_arguments

    package = import_trainer()
    owner = module(f"{package}.utils.arguments")

    def add_custom(parser):
        add_arguments(parser, owner)
        return parser

    parser = ArgumentParser(allow_abbrev=False)
    getattr(owner, f"get_{package}_extra_args_provider")(add_custom)(parser)
    return sorted(parser._option_string_actions)


def test_the_flags_go_into_the_trainers_own_parser(run_ranks):
    from leanstep.integrations.slime import FLAGS

    (options,) = run_ranks(1, parser_options, timeout=200)
    assert {*FLAGS, "--custom-megatron-init-path", "--log-probs-chunk-size"} <= set(options)
