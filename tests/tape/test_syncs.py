"""What counts as a look at a device value, and what does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from leanstep.tape.syncs import count_host_reads

x = torch.arange(30.0).view(6, 5)
mask = torch.arange(6) > 2
repeats = torch.tensor([1, 2, 1, 1, 1, 1])
index = torch.tensor([1, 2])
scalar = torch.tensor(2)


@pytest.mark.parametrize(
    ("call", "reads"),
    [
        (lambda: x[0, 0].item(), 1),
        (lambda: float(x.sum()), 1),
        (lambda: bool(mask.any()), 1),
        (lambda: x[scalar], 1),
        (lambda: x[mask], 1),
        (lambda: x[index], 0),
        (lambda: torch.where(mask), 1),
        (lambda: torch.where(mask, 1, 0), 0),
        (lambda: torch.masked_select(x, mask[:, None]), 1),
        (lambda: torch.equal(x, x), 1),
        (lambda: torch.allclose(x, x), 1),
        (lambda: index.unique(), 1),
        (lambda: torch.bincount(index), 1),
        (lambda: x.repeat_interleave(repeats, 0), 1),
        (lambda: x.repeat_interleave(repeats, 0, output_size=7), 0),
        (lambda: x.repeat_interleave(2, 0), 0),
        # A CPU also checks the range of the classes by reads; a GPU leaves that to its kernel.
        (lambda: F.one_hot(index), 1),
        (lambda: F.one_hot(index.clone().cpu()), 1),
        (lambda: F.one_hot(index, 9), 0),
        (lambda: F.one_hot(index, num_classes=9), 0),
        (lambda: torch.histc(x, 4), 1),
        (lambda: torch.histc(x, 4, 0, max=1), 0),
        (lambda: x.clone().__setitem__(mask, 0.0), 0),
        (lambda: x.clone().__setitem__(mask, torch.zeros(3, 5)), 1),
        (lambda: x.tolist(), 1),
        (lambda: x.numpy(), 1),
        (lambda: np.asarray(x), 1),
        (lambda: repr(x), 1),
        (lambda: f"{x.sum()}", 1),
        (lambda: f"{x}", 1),
        (lambda: torch.tensor([x[0, 0], x[0, 1]]), 1),
        (lambda: torch.tensor([1.0, 2.0]), 0),
        (lambda: x.new_tensor([x[0, 0], 1.0]), 1),
        (lambda: x.to("cpu"), 0),
        (lambda: x.cpu().numpy(), 1),
        (lambda: [row.tolist() for row in x.cpu()], 1),
        (lambda: [x.detach().cpu().numpy(), x.detach().tolist()], 2),
        (lambda: [x.cpu() for _ in range(3)], 3),
        (lambda: (x + 1).mean(), 0),
    ],
)
def test_reads_of_one_call(call, reads: int) -> None:
    with count_host_reads() as counted:
        call()
    assert counted.total == reads


def test_hooks_inside_the_backward_are_seen() -> None:
    leaf = torch.ones(3, requires_grad=True)
    y = leaf * 2
    y.register_hook(lambda grad: grad.tolist() and None)
    with count_host_reads() as counted:
        y.sum().backward()
        torch.autograd.grad((leaf * 2).sum(), leaf)
    assert counted.kinds == {"tolist": 1}


def test_nothing_is_left_behind_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), count_host_reads():
        1 / 0  # noqa: B018
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_patched_methods_are_counted_all_the_same(monkeypatch) -> None:
    x = torch.ones(3)
    for name in ("tolist", "numpy", "__array__", "item"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args, original=original, **kw: original(self, *args, **kw)
        )
    with count_host_reads() as reads:
        np.asarray(x)
        x.tolist()
        x.numpy()
        x[0].item()
    assert reads.kinds == {"numpy": 2, "tolist": 1, "scalar": 1}
