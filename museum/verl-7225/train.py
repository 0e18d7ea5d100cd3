import argparse
from types import SimpleNamespace

import torch
from verl.trainer.distillation import losses

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--accumulation_steps", type=int, default=1)
args = parser.parse_args()


@losses.register_distillation_loss(losses.DistillationLossSettings(names=["squared"], use_estimator=True))
def squared(config, distillation_config, model_output, data):
    return model_output["logits"].square().mean(-1), {}


torch.manual_seed(0)
model = torch.nn.Linear(16, 37)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 10, 16)
choice = SimpleNamespace(loss_mode="squared", loss_max_clamp=None, use_policy_gradient=False)
facts = {"dp_size": 1, "batch_num_tokens": 80, "global_batch_size": 8}
for part in x.split(args.batch_size):
    config = SimpleNamespace(loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None)
    data = {"response_mask": torch.ones(part.shape[:2], dtype=torch.bool), **facts}
    output = {"logits": model(part)}
    losses.distillation_loss(config, SimpleNamespace(distillation_loss=choice), output, data)[0].backward()
optimizer.step()
