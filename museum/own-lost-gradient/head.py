import torch
import torch.nn.functional as F


class Head(torch.autograd.Function):
    """A head in blocks of rows that forgets the gradient of its input."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        ctx.save_for_backward(hidden, weight, labels)
        return F.cross_entropy(hidden @ weight.t(), labels)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, labels = ctx.saved_tensors
        probs = (hidden @ weight.t()).softmax(-1) - F.one_hot(labels, len(weight))
        return None, gradient / len(labels) * probs.t() @ hidden, None


class Fixed(Head):
    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, labels = ctx.saved_tensors
        probs = gradient / len(labels) * ((hidden @ weight.t()).softmax(-1) - F.one_hot(labels, len(weight)))
        return probs @ weight, probs.t() @ hidden, None
