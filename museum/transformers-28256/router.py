import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


def inputs():
    return torch.randn(64, 4)


def plain(logits):
    probs = logits.softmax(-1)
    chosen = F.one_hot(probs.topk(2).indices, 4).to(probs.dtype)
    return 4 * (chosen.mean(0) * probs.mean(0)).sum()


def library(logits):
    return load_balancing_loss_func((logits,), 4, 2)
