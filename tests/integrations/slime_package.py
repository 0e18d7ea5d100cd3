"""slime and miles for the tests: the packages' own code, with a small Megatron model around it.

Neither is a dependency. `LEANSTEP_SLIME=~/slime` (or a checkout of miles) makes a checkout importable. What
its modules import beyond torch and Megatron-Core (sglang, megatron.training) and is not installed is replaced
by empty modules.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings
from argparse import Namespace
from pathlib import Path
from typing import ClassVar
from unittest.mock import MagicMock

REPLACED = (
    "httpx",
    "megatron.training",
    "megatron.bridge",
    "sglang",
    "sglang_router",
    "torch_memory_saver",
    "wandb",
    "ring_flash_attn",
    "mbridge",
    "polars",
)


class _EmptyModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Behind all other finders: empty modules for packages that are not installed."""

    def find_spec(self, fullname, path=None, target=None):
        if any(fullname == name or fullname.startswith(name + ".") for name in REPLACED):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _EmptyModule(spec.name)

    def exec_module(self, module):
        pass


def checkout() -> Path | None:
    folder = os.environ.get("LEANSTEP_SLIME")
    return Path(folder).expanduser() if folder else None


def import_trainer() -> str:
    """Make the checkout importable; the name of its package, "slime" or "miles"."""
    warnings.simplefilter("ignore")
    folder = checkout()
    assert folder is not None
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        sys.meta_path.append(_EmptyModules())
    return "miles" if (folder / "miles").is_dir() else "slime"


def module(name: str):
    return importlib.import_module(name)


def arguments(**changes) -> Namespace:
    """What slime's policy loss and log-probs read of its arguments."""
    values = {
        "rollout_temperature": 0.9,
        "rollout_top_p": 1.0,
        "log_probs_chunk_size": -1,
        "allgather_cp": False,
        "qkv_format": "thd",
        "entropy_coef": 0.01,
        "use_rollout_logprobs": False,
        "use_rollout_entropy": True,
        "skip_actor_forward_only": False,
        "observe_training_entropy": False,
        "true_on_policy_mode": False,
        "advantage_estimator": "grpo",
        "use_opsm": False,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "eps_clip_c": None,
        "get_mismatch_metrics": False,
        "use_tis": False,
        "use_kl_loss": True,
        "use_unbiased_kl": False,
        "kl_loss_type": "low_var_kl",
        "kl_loss_coef": 0.05,
        "calculate_per_token_loss": False,
        "loss_type": "policy_loss",
        "recompute_loss_function": False,
        "custom_pg_loss_reducer_function_path": None,
        "save_debug_train_data": None,
        "custom_megatron_before_log_prob_hook_path": None,
        "data_pad_size_multiplier": 4,
        "multi_lora_n_adapters": 0,
        "lora_rank": 0,
    }
    return Namespace(**{**values, **changes})


def small_model(
    tp: int, cp: int, *, width: int, vocab: int, sequence_parallel=False, bf16=False, tied=False, **stage
):
    """A GPTModel of one layer without attention, which on a CPU supports no context parallelism."""
    import torch
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=1,
        hidden_size=width,
        num_attention_heads=2,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        init_method_std=0.3,
    )
    mlp = ModuleSpec(
        MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    layer = ModuleSpec(
        TransformerLayer, submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_bias_dropout_add)
    )
    # Megatron's norms without Transformer Engine refuse sequence parallelism.
    block = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=IdentityOp)
    torch.manual_seed(1)
    return GPTModel(
        config,
        block,
        vocab_size=vocab,
        max_sequence_length=64,
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,
        parallel_output=True,
        **stage,
    )


def provide(pre_process: bool = True, post_process: bool = True):
    """For `--custom-model-provider-path`. slime keeps the function that it loads; `build` may change."""
    return build(pre_process=pre_process, post_process=post_process)


build = small_model
