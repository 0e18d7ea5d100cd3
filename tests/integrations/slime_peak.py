"""One training step of slime's policy loss behind Megatron's output layer, for `leanstep rehearse`.

    LEANSTEP_SLIME=~/slime leanstep rehearse --device h200 tests/integrations/slime_peak.py -- \\
        --log-probs-from-hidden

T, V and D are those of slime's issue 1951; the model in front of the head is left out.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parent))
from slime_package import arguments, import_trainer, module  # noqa: E402 - its folder is on the path now

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=205_280)
parser.add_argument("--vocab", type=int, default=76_032)
parser.add_argument("--hidden", type=int, default=2_560)
parser.add_argument("--response-frac", type=float, default=0.25)
parser.add_argument("--samples", type=int, default=8)
parser.add_argument("--log-probs-response-only", action="store_true")
parser.add_argument("--log-probs-loss-mask-only", action="store_true")
parser.add_argument("--log-probs-from-hidden", action="store_true")
given = parser.parse_args()


def samples(device):
    """Micro-batch of equal samples without padding."""
    total = given.tokens // given.samples
    response = int(total * given.response_frac)
    count = range(given.samples)
    per_token = {
        key: [torch.randn(response, device=device) for _ in count] for key in ("log_probs", "advantages")
    }
    return {
        "total_lengths": [total for _ in count],
        "response_lengths": [response for _ in count],
        "unconcat_tokens": [torch.randint(0, given.vocab, (total,), device=device) for _ in count],
        "loss_masks": [torch.ones(response, dtype=torch.int, device=device) for _ in count],
        "rollout_mask_sums": [torch.tensor(float(response), device=device) for _ in count],
        **per_token,
    }


class Model(torch.nn.Module):
    """Stands for the decoder: its output, then Megatron's output layer, then Float16Module's cast to fp32."""

    def __init__(self, config):
        from megatron.core.tensor_parallel import ColumnParallelLinear

        super().__init__()
        self.hidden = torch.nn.Parameter(torch.randn(given.tokens, 1, given.hidden, dtype=torch.bfloat16))
        self.output_layer = ColumnParallelLinear(
            given.hidden,
            given.vocab,
            config=config,
            init_method=torch.nn.init.normal_,
            bias=False,
            gather_output=False,
        )

    def forward(self):
        hidden = self.hidden * 1.0
        logits, _ = self.output_layer(hidden, weight=None, runtime_gather_output=None)
        return logits.transpose(0, 1).contiguous().float()


def main():
    import_trainer()
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig

    dist.init_process_group("nccl", rank=0, world_size=1, init_method="tcp://127.0.0.1:29655")
    parallel_state.initialize_model_parallel()
    loss_module = module("slime.backends.megatron_utils.loss")
    models = module("slime.backends.megatron_utils.model")

    from leanstep.integrations.slime import apply_leanstep

    flags = {name: value for name, value in vars(given).items() if name.startswith("log_probs")}
    args = arguments(use_kl_loss=False, log_probs_chunk_size=1024, **flags)
    apply_leanstep(args)
    config = ModelParallelConfig(params_dtype=torch.bfloat16, use_cpu_initialization=True)
    import slime_package

    slime_package.build = lambda **stage: Model(config)
    args.custom_model_provider_path = "slime_package.provide"
    model = models.get_model_provider_func(args, "actor")(pre_process=True, post_process=True).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = samples("cuda")
    for _ in range(3):
        loss, _, _ = loss_module.loss_function(args, batch, 1, given.samples, model())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
