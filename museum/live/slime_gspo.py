import torch
import torch.distributed as dist
from megatron.core import mpu
from slime.backends.megatron_utils.cp_utils import all_gather_with_cp
from slime.backends.megatron_utils.loss import _allgather_cp_redistribute

dist.init_process_group("gloo")
mpu.initialize_model_parallel(context_parallel_size=dist.get_world_size())
torch.manual_seed(0)
model, x = torch.nn.Linear(2, 1, bias=False), torch.randn(16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total, response = 16, 2  # on two ranks, the response is in the first rank's zigzag chunks only
scores = model(x.chunk(dist.get_world_size())[dist.get_rank()])[:, 0]
start = dist.get_rank() * len(scores)
own = scores[max(total - response - 1 - start, 0) : max(total - 1 - start, 0)]
result = {"log_probs": [own]}
_allgather_cp_redistribute(
    result, logits_local_len=len(scores), total_lengths=[total], response_lengths=[response]
)
local = result["log_probs"][0]
sequence = all_gather_with_cp(local, total, response).mean()  # as GSPO does
(sequence.expand(len(local)).sum() + 0 * scores.sum()).backward()
dist.all_reduce(model.weight.grad, group=mpu.get_context_parallel_group())
optimizer.step()
