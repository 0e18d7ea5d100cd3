"""Custom ops: in Python, with a compiled body, of leanstep, and one whose body needs a binary."""

import torch
from torch import Tensor

from leanstep.heads import linear_logprobs

ROWS, WIDTH, WORDS = 512, 256, 1024


@torch.library.custom_op("shop::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    @torch.compile
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return (x.relu() @ weight.t()).float()

    return run(x, weight)


@torch.library.custom_op("shop::project_backward", mutates_args=())
def project_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    grad = grad.to(x.dtype)
    return grad @ weight, grad.t() @ x


@torch.library.custom_op("shop::binary", mutates_args=())
def binary(x: Tensor) -> Tensor:
    torch.relu(x)
    raise OSError("a library of the vendor")


@project.register_fake
def _(x, weight):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@project_backward.register_fake
def _(grad, x, weight):
    return torch.empty_like(x), torch.empty_like(weight)


@binary.register_fake
def _(x):
    return torch.empty_like(x)


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


project.register_autograd(lambda ctx, g: project_backward(g, *ctx.saved_tensors), setup_context=save)
weight = torch.nn.Parameter(torch.randn(WORDS, WIDTH, device="cuda", dtype=torch.bfloat16))
hidden = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
targets = torch.zeros(ROWS, device="cuda", dtype=torch.int64)
optimizer = torch.optim.SGD([weight], lr=0.1)


def projected():
    return project(hidden, weight).sum()  # MARK project


def scored():
    return linear_logprobs(hidden, weight, targets).logp.sum()  # MARK head


def update(loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


with torch.no_grad():
    binary(hidden)  # MARK binary
for function in (projected, torch.compile(projected), scored, torch.compile(scored)):
    update(function())
