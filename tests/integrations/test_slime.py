"""slime's calling convention on vectors that slime itself produced, and what is refused at start.

tests/integrations/test_slime_real.py runs slime's own code.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import types
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from integrations.test_megatron import column_layer

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.filterwarnings("ignore")

VECTORS = Path(__file__).parent.parent / "vectors" / "logprob"
SWITCHES = {
    "e2e_full": {},
    "e2e_pr_off": {},
    "e2e_response_only": {"log_probs_response_only": True},
    "e2e_loss_mask_only": {"log_probs_response_only": True, "log_probs_loss_mask_only": True},
}


def cases(name):
    return json.loads((VECTORS / name).read_text())["cases"]


def scorer_for(case, rank, from_hidden):
    """A scorer, and what it is given: logits, or hidden states that an identity projects to the logits."""
    from leanstep.integrations.megatron import HiddenOutput
    from leanstep.integrations.slime_scores import Scorer

    logits = torch.tensor(case["ranks"][rank]["logits"])[None].requires_grad_()
    scorer = Scorer(returns_pair=True, from_hidden=from_hidden)
    if from_hidden:
        scorer.output = HiddenOutput(column_layer(torch.eye(logits.shape[-1])))
        returned, _ = scorer.output.layer(logits.transpose(0, 1))
        return scorer, returned.transpose(0, 1), logits
    return scorer, logits, logits


def score(case, rank, field, *, from_hidden=False):
    """Results on one rank's vectors, and the gradient of the logits."""
    e2e = case["e2e"]
    args = Namespace(
        rollout_temperature=e2e["temperature"],
        log_probs_chunk_size=e2e["chunk"],
        qkv_format="bshd" if case["layout"].startswith("bshd") else "thd",
        allgather_cp=case["layout"] == "allgather",
        entropy_coef=0.01,
        **SWITCHES[field],
    )
    scorer, given, leaf = scorer_for(case, rank, from_hidden)
    mask = torch.tensor(case["ranks"][rank]["full_loss_mask"])
    lengths = {key: case[key] for key in ("total_lengths", "response_lengths")}
    top_p = {key: e2e.get(key) for key in ("top_p_token_ids", "top_p_token_offsets")}
    empty, results = scorer.get_log_probs_and_entropy(
        given,
        args=args,
        unconcat_tokens=[torch.tensor(t) for t in case["tokens"]],
        with_entropy=True,
        max_seq_lens=[case["max_seq_len"]] * len(case["tokens"]) if case.get("max_seq_len") else None,
        full_loss_mask=mask if field == "e2e_loss_mask_only" else None,
        **lengths,
        **top_p,
    )
    assert empty.numel() == 0
    return results, leaf


def assert_equal(results, expected):
    for key in ("log_probs", "entropy"):
        for ours, theirs in zip(results[key], expected[key], strict=True):
            theirs = np.array(theirs, dtype=np.float32)
            np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=2e-5, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("from_hidden", [False, True])
@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("name", ["e2e_cp1_thd.json", "e2e_cp1_bshd.json"])
def test_results_are_those_of_slime(name, field, from_hidden):
    compared = 0
    for case in cases(name):
        expected = case["ranks"][0].get(field)
        if expected is not None:
            results, _ = score(case, 0, field, from_hidden=from_hidden)
            assert_equal(results, expected)
            compared += 1
    assert compared or (name, field) == ("e2e_cp1_bshd.json", "e2e_full")


def context_rank(rank: int, world_size: int, name: str):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=world_size)
    found = [
        {
            key: [v.detach() for v in values]
            for key, values in score(case, rank, "e2e_full", from_hidden=h)[0].items()
        }
        for case in cases(name)
        for h in (False, True)
    ]
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("name", ["e2e_zigzag.json", "e2e_allgather.json"])
def test_context_parallel_results_are_those_of_slime(run_ranks, name):
    for rank, found in enumerate(run_ranks(2, context_rank, name, timeout=120)):
        expected = [case["ranks"][rank]["e2e_full"] for case in cases(name) for _ in range(2)]
        for results, theirs in zip(found, expected, strict=True):
            assert_equal(results, theirs)


@pytest.fixture
def slime(monkeypatch):
    """Modules named as slime's: the definition, and two importers under the same and another name."""
    names = ["loss", "model", "actor", "server", "server.logprob_utils"]
    modules = {f"slime.backends.megatron_utils.{n}": types.ModuleType(n) for n in names}
    for name in (
        "slime",
        "slime.backends",
        "slime.backends.megatron_utils",
        "slime.utils",
        "slime.utils.arguments",
    ):
        modules[name] = types.ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    short = {name.rpartition(".")[2]: module for name, module in modules.items()}

    def stock(
        logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False,
        non_loss_data=True, top_p_token_ids=None, top_p_token_offsets=None,
    ):  # fmt: skip
        return "stock"

    short["loss"].get_log_probs_and_entropy = short["actor"].get_log_probs_and_entropy = stock
    short["logprob_utils"].score = stock
    short["logprob_utils"].get_responses = lambda: "stock"
    short["loss"].policy_loss_function = lambda args, batch, logits, reduce: (args, batch, logits, reduce)
    short["model"].get_model_provider_func = lambda args, role="actor": None
    return types.SimpleNamespace(**short, stock=stock)


def test_every_importer_is_replaced(slime):
    from leanstep.integrations.slime import apply_leanstep

    apply_leanstep(Namespace(log_probs_response_only=True))
    function = slime.loss.get_log_probs_and_entropy
    assert function is not slime.stock and function.__wrapped__ is slime.stock
    assert slime.actor.get_log_probs_and_entropy is function and slime.logprob_utils.score is function
    apply_leanstep(Namespace(log_probs_response_only=True))
    again = slime.actor.get_log_probs_and_entropy
    assert again is not function and again.__wrapped__ is slime.stock


def test_without_flags_nothing_is_replaced(slime):
    from leanstep.integrations.slime import apply_leanstep

    apply_leanstep(Namespace(log_probs_response_only=False))
    assert slime.loss.get_log_probs_and_entropy is slime.stock
    assert slime.actor.get_log_probs_and_entropy is slime.stock


def test_a_parameter_that_leanstep_does_not_know_is_refused(slime):
    from leanstep.integrations.slime import apply_leanstep

    slime.loss.get_log_probs_and_entropy = lambda logits, *, args, softcap: None
    with pytest.raises(ValueError, match="get_log_probs_and_entropy: unknown parameters of slime's: softcap"):
        apply_leanstep(Namespace(log_probs_response_only=True))
    del slime.loss.get_log_probs_and_entropy
    with pytest.raises(ValueError, match="get_log_probs_and_entropy: expected it in"):
        apply_leanstep(Namespace(log_probs_response_only=True))


@pytest.mark.filterwarnings("default")
def test_an_untested_version_warns_at_start(slime, monkeypatch):
    from importlib import metadata

    from leanstep.integrations import megatron
    from leanstep.integrations.slime import apply_leanstep

    monkeypatch.setattr(megatron, "_checked", set())
    monkeypatch.setattr(metadata, "version", lambda package: "0.99.1")
    with pytest.warns(UserWarning, match="megatron-core: this adapter was not tested with version 0.99.1"):
        apply_leanstep(Namespace(log_probs_response_only=True))
    assert slime.loss.get_log_probs_and_entropy is not slime.stock
    assert megatron._checked == {"version"}


def test_a_process_that_does_not_train_is_refused():
    from leanstep.integrations.slime import apply_leanstep

    with pytest.raises(ValueError, match=r"expected a training process that has imported slime\.backends"):
        apply_leanstep(Namespace(log_probs_response_only=True))


HIDDEN = {"log_probs_from_hidden": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"log_probs_loss_mask_only": True},
            "--log-probs-loss-mask-only: needs --log-probs-response-only or",
        ),
        (
            {**HIDDEN, "log_probs_loss_mask_only": True, "save_debug_train_data": "x"},
            "--save-debug-train-data",
        ),
        ({**HIDDEN, "enable_mtp_training": True}, "expected no --enable-mtp-training"),
        ({**HIDDEN, "overlap_moe_expert_parallel_comm": True}, "combined 1F1B"),
        ({**HIDDEN, "defer_embedding_wgrad_compute": True}, "expected no --defer-embedding-wgrad-compute"),
        ({**HIDDEN, "use_megatron_fsdp": True}, "expected no --use-megatron-fsdp"),
        ({**HIDDEN, "loss_type": "custom_loss"}, "custom_loss"),
        ({**HIDDEN, "train_backend": "fsdp"}, "needs the Megatron backend, got fsdp"),
        ({**HIDDEN, "qkv_format": "bshd", "sequence_parallel": True}, "expected --qkv-format thd"),
        ({"log_probs_response_only": True, "true_on_policy_mode": True}, "--true-on-policy-mode"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(slime, arguments, message):
    from leanstep.integrations.slime import apply_leanstep

    with pytest.raises(ValueError, match=message) as error:
        apply_leanstep(Namespace(**arguments))
    assert "\n" not in str(error.value)
    assert slime.loss.get_log_probs_and_entropy is slime.stock


def add_parser(slime, own_flags=()):
    """slime's argument module, whose parser may have some of the flags itself."""

    def get_slime_extra_args_provider(add_custom_arguments=None):
        def add(parser):
            if add_custom_arguments is not None:
                parser = add_custom_arguments(parser)
            parser.add_argument("--custom-megatron-init-path", default=None)
            for flag in own_flags:
                parser.add_argument(flag, action="store_true")
            return parser

        return add

    def parse_args(add_custom_arguments=None):
        parser = get_slime_extra_args_provider(add_custom_arguments)(ArgumentParser())
        return parser.parse_args(slime.command_line)

    slime.arguments.__name__ = "slime.utils.arguments"
    slime.arguments.get_slime_extra_args_provider = get_slime_extra_args_provider
    slime.arguments.parse_args = parse_args


@pytest.mark.parametrize("own_flags", [(), ("--log-probs-response-only", "--log-probs-loss-mask-only")])
def test_the_flags_are_in_slimes_parser(slime, own_flags):
    from leanstep.integrations.slime import HOOK, parse_args

    add_parser(slime, own_flags)
    slime.command_line = []
    args = parse_args()
    assert not args.log_probs_response_only and args.custom_megatron_init_path is None
    slime.command_line = ["--log-probs-response-only", "--log-probs-loss-mask-only", "--steps", "3"]
    args = parse_args(lambda parser: parser.add_argument("--steps") and parser)
    assert args.log_probs_loss_mask_only and args.steps == "3" and args.custom_megatron_init_path == HOOK
    module, _, name = HOOK.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    slime.command_line = ["--log-probs-loss-mask-only"]
    with pytest.raises(ValueError, match="--log-probs-loss-mask-only: needs"):
        parse_args()
    slime.command_line = ["--log-probs-from-hidden", "--custom-megatron-init-path", "mine.start"]
    with pytest.raises(ValueError, match=r"apply_leanstep\(args\) from mine.start"):
        parse_args()


def batch_of_two():
    return {
        "total_lengths": [5, 4],
        "response_lengths": [3, 2],
        "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([0, 1])],
        "log_probs": [torch.tensor([-1.0, -200.0, -2.0]), torch.tensor([-torch.inf, -3.0])],
        "ref_log_probs": None,
        "advantages": [torch.ones(3), torch.ones(2)],
    }


def test_the_policy_loss_gets_masks_and_no_masked_log_probs(slime):
    """With old log-probs of -200 beside new ones of 0 the ratio would overflow, and the loss be NaN."""
    from leanstep.integrations.slime import apply_leanstep

    args = Namespace(log_probs_response_only=True, log_probs_loss_mask_only=True)
    apply_leanstep(args)
    batch = batch_of_two()
    _, seen, logits, reduce = slime.loss.policy_loss_function(args, batch, "logits", "reduce")
    assert (logits, reduce) == ("logits", "reduce")
    assert [x.tolist() for x in seen["log_probs"]] == [[-1.0, 0.0, -2.0], [0.0, -3.0]]
    assert batch["log_probs"][0][1] == -200.0, "the stored values stay"
    assert seen["ref_log_probs"] is None and seen["advantages"] is batch["advantages"]


def test_masks_of_the_policy_loss_select_rows(slime):
    from leanstep.integrations.slime import apply_leanstep

    args = Namespace(log_probs_response_only=True, log_probs_loss_mask_only=True, entropy_coef=0.1)
    tokens = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([5, 4, 3, 2])]
    logits = torch.randn(1, 9, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def policy_loss_function(args, batch, logits, reduce):
        lengths = {key: batch[key] for key in ("total_lengths", "response_lengths")}
        return slime.loss.get_log_probs_and_entropy(logits, args=args, unconcat_tokens=tokens, **lengths)[1]

    slime.loss.policy_loss_function = policy_loss_function
    apply_leanstep(args)
    inside = torch.cat(slime.loss.policy_loss_function(args, batch_of_two(), logits, None)["log_probs"])
    outside = torch.cat(policy_loss_function(args, batch_of_two(), logits, None)["log_probs"])
    kept = torch.tensor([True, False, True, False, True])
    assert torch.equal(inside[kept], outside[kept]) and not inside[~kept].any() and outside.all()
    inside.sum().backward()
    assert logits.grad[0].any(-1).tolist() == [False, True, False, True, False, False, False, True, False]


def test_a_model_that_changes_its_output_is_refused():
    from leanstep.integrations.megatron import HiddenOutput

    hidden = torch.randn(1, 6, 8)
    output = HiddenOutput(column_layer(torch.randn(11, 8)))
    with pytest.raises(ValueError, match="output_layer: expected a model that calls it"):
        output.check(hidden)
    # As Megatron's GPTModel calls it.
    returned = output.layer(hidden.transpose(0, 1), weight=None, runtime_gather_output=None)[0]
    returned = returned.transpose(0, 1).contiguous()
    with pytest.raises(
        ValueError, match="output_layer: the model changes the layer's output before the loss"
    ):
        output.check(30.0 * torch.tanh(returned / 30.0))
    output.check(returned.float())


def test_only_actors_return_hidden_states(slime, monkeypatch):
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from leanstep.integrations.slime import apply_leanstep

    def provide(args, role="actor"):
        return lambda: torch.nn.ModuleDict({"output_layer": layer})

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_ @ self.weight.T, runtime_gather_output

    # Without process groups Megatron's own cannot gather.
    monkeypatch.setattr(ColumnParallelLinear, "forward", forward)
    layer, hidden = column_layer(torch.randn(11, 8)), torch.randn(5, 1, 8)
    slime.model.get_model_provider_func = provide
    args = Namespace(log_probs_from_hidden=True)
    apply_leanstep(args)
    provided = slime.model.get_model_provider_func
    assert provided(args, "critic")()["output_layer"](hidden)[0].shape[-1] == 11
    assert provided(args, "actor")()["output_layer"](hidden)[0] is hidden
    projected, gathers = layer(hidden, layer.weight, True)
    assert gathers and torch.equal(projected, hidden @ layer.weight.T)
    with pytest.raises(ValueError, match="sample_n or label_token_ids"):
        slime.logprob_utils.get_responses()
    # A stage of a pipeline without an output layer is left alone; one of another kind is refused.
    stages = [torch.nn.Linear(1, 1), torch.nn.ModuleDict({"output_layer": torch.nn.Linear(1, 1)})]
    slime.model.get_model_provider_func = lambda args, role: stages.pop
    apply_leanstep(args)
    with pytest.raises(ValueError, match="expected one ColumnParallelLinear in the model, got Linear"):
        slime.model.get_model_provider_func(args, "actor")()
    assert type(slime.model.get_model_provider_func(args, "actor")()) is torch.nn.Linear


def test_the_example_script_uses_flags_that_exist():
    from leanstep.integrations.slime import FLAGS, check_arguments

    script = Path(__file__).parents[2] / "examples" / "slime" / "retool_qwen3_4b.sh"
    used = re.findall(r"--log-probs-[a-z-]+", script.read_text())
    assert used and set(used) <= set(FLAGS)
    check_arguments(Namespace(**{flag[2:].replace("-", "_"): True for flag in used}))
