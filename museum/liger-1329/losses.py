import torch
import torch.nn.functional as F
from liger_kernel.transformers import LigerCrossEntropyLoss


def inputs():
    return torch.randn(64, 97), torch.randint(97, (64,))


def plain(logits, labels):
    return F.cross_entropy(logits.float(), labels)


def fused(logits, labels):
    return LigerCrossEntropyLoss()(logits.contiguous(), labels)
