"""slime and its fork miles: log-probs and entropy with leanstep, enabled by flags of the training script.

In train.py (or train_async.py), one line:

    from leanstep.integrations.slime import parse_args    # was: from slime.utils.arguments import parse_args

and in the launch script:

    --log-probs-from-hidden         no logits: the model returns hidden states, the head runs tile by tile
    --log-probs-response-only       logits exist, but only the rows that score a response are read
    --log-probs-loss-mask-only      with one of the two: in the policy loss, only rows whose loss mask is 1

Without a flag nothing is replaced. With one, every training process calls `apply_leanstep(args)` before it
builds its model: slime does so itself through `--custom-megatron-init-path`, which `parse_args` sets.
"""

from __future__ import annotations

import functools
import inspect
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from leanstep.integrations.slime_scores import KNOWN_PARAMETERS, Scorer, without_masked_values

__all__ = ["apply_leanstep", "parse_args"]
FLAGS = {
    "--log-probs-response-only": "Read only the logit rows that score a response token; equal results.",
    "--log-probs-loss-mask-only": (
        "In the policy loss, read only rows whose loss mask is 1; masked positions are 0. "
        "Needs --log-probs-response-only or --log-probs-from-hidden."
    ),
    "--log-probs-from-hidden": (
        "The output layer returns hidden states; log-probs and entropy of the response rows are computed "
        "from them tile by tile, so the logits never exist."
    ),
}
HOOK = "leanstep.integrations.slime.apply_leanstep"


class _Trainer(NamedTuple):
    """Names and modules of a trainer that are replaced."""

    package: str
    scoring: str
    losses: str
    models: str


TRAINERS = (
    _Trainer(
        "slime",
        scoring="slime.backends.megatron_utils.loss",
        losses="slime.backends.megatron_utils.loss",
        models="slime.backends.megatron_utils.model",
    ),
    _Trainer(
        "miles",
        scoring="miles.backends.training_utils.loss_hub.logit_processors",
        losses="miles.backends.training_utils.loss_hub.losses",
        models="miles.backends.megatron_utils.model",
    ),
)


def parse_args(add_custom_arguments: Callable[[Any], Any] | None = None) -> Namespace:
    """Run the trainer's `parse_args` with leanstep's flags; refuse unsupported combinations."""
    arguments = import_module(f"{_installed_trainer().package}.utils.arguments")

    def add_custom(parser: Any) -> Any:
        add_arguments(parser, arguments)
        return parser if add_custom_arguments is None else add_custom_arguments(parser)

    args = arguments.parse_args(add_custom)
    check_arguments(args)
    if _is_on(args):
        init_path = getattr(args, "custom_megatron_init_path", None)
        if init_path not in (None, HOOK):
            raise ValueError(
                f"--custom-megatron-init-path: leanstep needs it; call {HOOK}(args) from {init_path}"
            )
        args.custom_megatron_init_path = HOOK
    return args


def add_arguments(parser: Any, arguments: ModuleType) -> None:
    """Add leanstep's flags to `parser`, except those that the trainer registers itself.

    Args:
        arguments: the trainer's `utils.arguments`, whose parser is built once to see its options.
    """
    provider = f"get_{arguments.__name__.partition('.')[0]}_extra_args_provider"
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    getattr(arguments, provider)()(own)
    for flag, help_text in FLAGS.items():
        if flag not in own._option_string_actions:
            parser.add_argument(flag, action="store_true", help=help_text)


def check_arguments(args: Namespace) -> None:
    """Raise a one-line error for options that cannot be combined with the flags."""
    on = functools.partial(_flag, args)
    if on("log_probs_loss_mask_only"):
        if not (on("log_probs_response_only") or on("log_probs_from_hidden")):
            needed = "--log-probs-response-only or --log-probs-from-hidden"
            raise ValueError(f"--log-probs-loss-mask-only: needs {needed}")
        if getattr(args, "save_debug_train_data", None) is not None:
            raise ValueError(
                "--log-probs-loss-mask-only: expected no --save-debug-train-data, which stores log-probs of "
                "masked tokens too"
            )
    if _is_on(args) and on("true_on_policy_mode"):
        raise ValueError("--true-on-policy-mode: needs the trainer's own log-probs; remove leanstep's flags")
    if not on("log_probs_from_hidden"):
        return
    refused = {
        "enable_mtp_training": "the MTP head needs logits of the same output layer",
        "overlap_moe_expert_parallel_comm": "combined 1F1B splits the model around its output layer",
        "defer_embedding_wgrad_compute": "it computes the output layer's gradient from stored activations",
        "use_megatron_fsdp": "the output layer's weight is sharded when the loss needs it",
        "use_torch_fsdp2": "the output layer's weight is sharded when the loss needs it",
    }
    for name, reason in refused.items():
        if on(name):
            raise ValueError(f"--log-probs-from-hidden: expected no --{name.replace('_', '-')}: {reason}")
    if getattr(args, "loss_type", "policy_loss") == "custom_loss":
        raise ValueError("--log-probs-from-hidden: expected no --loss-type custom_loss, which needs logits")
    if getattr(args, "train_backend", "megatron") != "megatron":
        raise ValueError(f"--log-probs-from-hidden: needs the Megatron backend, got {args.train_backend}")
    if getattr(args, "qkv_format", "thd") == "bshd" and on("sequence_parallel"):
        raise ValueError(
            "--log-probs-from-hidden: expected --qkv-format thd with --sequence-parallel, got bshd"
        )


def apply_leanstep(args: Namespace) -> None:
    """Replace the trainer's log-prob function in this process, in every module that imported it.

    For `--custom-megatron-init-path`, which slime and miles call in every training process after
    torch.distributed is set up and before the model is built. Without flags nothing is replaced.

    Raises:
        ValueError: what is not supported is refused here, before the first step.
    """
    check_arguments(args)
    if not _is_on(args):
        return
    from leanstep.integrations import megatron

    megatron.check_version()
    trainer = _loaded_trainer()
    scoring, losses = sys.modules[trainer.scoring], import_module(trainer.losses)
    stock = inspect.unwrap(_checked(scoring, "get_log_probs_and_entropy"))
    unknown = set(inspect.signature(stock).parameters) - KNOWN_PARAMETERS
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"get_log_probs_and_entropy: unknown parameters of {trainer.package}'s: {names}")
    scorer = Scorer(returns_pair=trainer.package == "slime", from_hidden=_flag(args, "log_probs_from_hidden"))
    # A method cannot have attributes; a partial of it can.
    function = functools.update_wrapper(functools.partial(scorer.get_log_probs_and_entropy), stock)
    _replace(scoring, "get_log_probs_and_entropy", function)
    if _flag(args, "log_probs_loss_mask_only"):
        stock_loss = inspect.unwrap(_checked(losses, "policy_loss_function"))
        _replace(losses, "policy_loss_function", _with_masks(stock_loss, scorer))
    if scorer.from_hidden:
        models = import_module(trainer.models)
        stock_provider = inspect.unwrap(_checked(models, "get_model_provider_func"))
        _replace(models, "get_model_provider_func", _with_hidden_output(stock_provider, scorer))
        _refuse_samples(f"{trainer.package}.backends.megatron_utils.server.logprob_utils")


def _flag(args: Namespace, name: str) -> bool:
    return bool(getattr(args, name, False))


def _is_on(args: Namespace) -> bool:
    return _flag(args, "log_probs_response_only") or _flag(args, "log_probs_from_hidden")


def _installed_trainer() -> _Trainer:
    """Return the trainer whose driver is running, or else the installed one."""
    for is_there in (sys.modules.__contains__, find_spec):
        for trainer in TRAINERS:
            if is_there(trainer.package):
                return trainer
    raise ModuleNotFoundError("slime: neither slime nor miles can be imported", name="slime")


def _loaded_trainer() -> _Trainer:
    for trainer in TRAINERS:
        if trainer.scoring in sys.modules:
            return trainer
    expected = " or ".join(trainer.scoring for trainer in TRAINERS)
    raise ValueError(f"apply_leanstep: expected a training process that has imported {expected}")


def _checked(module: ModuleType, name: str) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{name}: expected it in {module.__name__}, which does not have it")
    return function


def _replace(module: ModuleType, name: str, new: Any) -> None:
    """Replace `name` in `module` and in every loaded module that imported it by name."""
    current = getattr(module, name)
    for other in list(sys.modules.values()):
        for alias, value in list(getattr(other, "__dict__", {}).items()):
            if value is current:
                setattr(other, alias, new)


def _with_masks(policy_loss_function: Callable[..., Any], scorer: Scorer) -> Callable[..., Any]:
    """Return the policy loss with log-probs computed only where the batch's loss masks are 1."""

    @functools.wraps(policy_loss_function)
    def masked(args: Namespace, batch: dict[str, Any], logits: Tensor, *others: Any) -> Any:
        scorer.loss_masks = batch["loss_masks"]
        try:
            return policy_loss_function(args, without_masked_values(args, batch), logits, *others)
        finally:
            scorer.loss_masks = None

    return masked


def _with_hidden_output(get_model_provider_func: Callable[..., Any], scorer: Scorer) -> Callable[..., Any]:
    """Return a provider of actors whose output layer returns its input. Critics are unchanged."""

    @functools.wraps(get_model_provider_func)
    def get_provider(args: Namespace, role: str = "actor", *others: Any) -> Callable[..., Any]:
        from leanstep.integrations import megatron

        build = get_model_provider_func(args, role, *others)
        if role != "actor":
            return build

        @functools.wraps(build)
        def provide(*positional: Any, **named: Any) -> Any:
            model = build(*positional, **named)
            layer = megatron.find_output_layer(model)
            # Only the pipeline's last stage has one.
            if layer is not None:
                scorer.output = megatron.HiddenOutput(layer)
            return model

        return provide

    return get_provider


def _refuse_samples(server: str) -> None:
    """Refuse teacher-server requests that need logits: sampling tokens and scoring label tokens."""
    module = sys.modules.get(server)
    if module is not None and hasattr(module, "get_responses"):

        def get_responses(*_: Any, **__: Any) -> Any:
            raise ValueError(
                "--log-probs-from-hidden: expected no sample_n or label_token_ids, which need logits"
            )

        module.get_responses = get_responses  # type: ignore[attr-defined]
