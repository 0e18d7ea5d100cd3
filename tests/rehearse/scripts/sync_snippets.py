"""Snippets with the number of times that a GPU makes the host wait for them: {name: (code, number)}.

What a library does in several copies for one call (the smallest and largest value of `bincount`) counts once,
and so does a boolean index with its backward: one sync per place in the source.
"""

import torch
from torch.nn import functional

SNIPPETS = {
    "item": ("y.sum().item()", 1),
    "float": ("float(y.detach()[0, 0])", 1),
    "bool": ("bool((y > 0).any())", 1),
    "Tensor.__index__": ("list(range(9))[i[0]]", 1),
    "slice by a tensor": ("y[: i[0]]", 1),
    "in": ("3 in i", 1),
    "format": ("f'{y.sum()}'", 1),
    "print": ("str(y)", 1),
    "tensor of tensors": ("torch.tensor([y.detach()[0, 0], y.detach()[0, 1]])", 1),
    "tensor of numbers": ("torch.tensor([1.0, 2.0])", 0),
    "tolist": ("y.tolist()", 1),
    "cpu": ("y.cpu()", 1),
    "numpy": ("x.cpu().numpy()", 1),
    "equal": ("torch.equal(y, x)", 1),
    "allclose": ("torch.allclose(y, x)", 1),
    "nonzero": ("y.nonzero()", 1),
    "nonzero as tuple": ("y.nonzero(as_tuple=True)", 1),
    "argwhere": ("torch.argwhere(y)", 1),
    "where of one argument": ("torch.where(y > 0)", 1),
    "where of three": ("torch.where(y > 0, y, x)", 0),
    "masked_select": ("y.masked_select(y > 0)", 1),
    "unique": ("torch.unique(i)", 1),
    "unique, known": ("torch.unique(torch.tensor([3, 1, 3]).to(y.device))", 1),
    "unique with counts": ("torch.unique(i, return_counts=True)", 1),
    "unique of rows": ("torch.unique(y, dim=0)", 1),
    "unique_consecutive": ("torch.unique_consecutive(i)", 1),
    "unique_consecutive of rows": ("torch.unique_consecutive(y, dim=0)", 1),
    "bincount": ("torch.bincount(i)", 1),
    "bincount with minlength": ("torch.bincount(i, minlength=20)", 1),
    "bincount with weights": ("torch.bincount(i, weights=y[:, 0])", 1),
    "bincount of unknown values": ("torch.bincount(y.argsort(1)[:, 0], minlength=3)", 1),
    "bincount of unknown values, no minlength": ("torch.bincount(y.argsort(1)[:, 0])", 1),
    "histc": ("torch.histc(y, 4)", 1),
    "histc with bounds": ("torch.histc(y, 4, 0, 1)", 0),
    "one_hot": ("F.one_hot(i)", 1),
    "one_hot with num_classes": ("F.one_hot(i, 9)", 0),
    "repeat_interleave": ("y.repeat_interleave(i, 0)", 1),
    "repeat_interleave with output_size": ("y.repeat_interleave(i, 0, output_size=12)", 0),
    "repeat_interleave with a number": ("y.repeat_interleave(2, 0)", 0),
    "mask read": ("y[y > 0]", 1),
    "mask of rows read": ("y[y[:, 0] > 0]", 1),
    "mask beside an index": ("y[y[:, 0] > 0, 1]", 1),
    "mask read, backward": ("y[y > 0].sum().backward()", 1),
    "mask written, a number": ("z[y > 0] = 0.0", 0),
    "mask written, a number, backward": ("z[y > 0] = 0.0\nz.sum().backward()", 0),
    "mask written, a tensor of one": ("z[y > 0] = torch.zeros(1)", 0),
    "mask of the host written, a number": ("z[torch.tensor([True, False, True, False])] = 0.0", 0),
    "mask of rows written, a number": ("z[y[:, 0] > 0] = 0.0", 0),
    "mask of columns written, a number": ("z[:, y[0] > 0] = 0.0", 0),
    "mask written, values": ("z[y > 0] = y[y > 0]", 2),
    "mask of rows written, a row": ("z[y[:, 0] > 0] = y[0]", 1),
    "index_put of values": ("y.index_put((y[:, 0] > 0,), y[0])", 1),
    "index_put that adds": ("y.index_put((y > 0,), torch.ones((), device=y.device), accumulate=True)", 1),
    "index_put by numbers": ("y.index_put((i % 4,), y)", 0),
    "index by numbers": ("y[i % 4]", 0),
    "masked_fill": ("y.masked_fill(y > 0, 0.0)", 0),
    "masked_scatter": ("y.masked_scatter(y > 0, x)", 0),
    "inverse": ("torch.linalg.inv(y.detach().T @ y.detach() + torch.eye(3, device=y.device))", 1),
    "clip_grad_norm_": ("y.sum().backward()\ntorch.nn.utils.clip_grad_norm_([w], 1.0)", 0),
}


def namespace(device):
    """What the snippets name: activations x, y, z, a weight w, integers i that the host knows."""
    torch.manual_seed(0)
    w = torch.randn(3, 3, device=device, requires_grad=True)
    x = torch.randn(4, 3, device=device)
    y = x @ w
    i = torch.tensor([1, 5, 2, 4]).to(device)
    return {"torch": torch, "F": functional, "w": w, "x": x, "y": y, "z": y.clone(), "i": i}
