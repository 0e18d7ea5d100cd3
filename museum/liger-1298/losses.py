import torch
import torch.nn.functional as F
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss


def inputs():
    return torch.randn(64, 32), torch.randn(97, 32) / 6, torch.randint(97, (64,))


def plain(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="none")


def fused(hidden, weight, labels):
    return LigerFusedLinearCrossEntropyLoss(reduction="none")(weight, hidden, labels)
