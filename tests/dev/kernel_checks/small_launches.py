"""A few small launches of every kernel, through the functions that normally launch it.

Blocks are small, so that rows take several; storages end where the data ends, so that an access past the data
is out of bounds. test_memory.py runs these in the interpreter, dev/mutate_kernels.py runs them on mutants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from leanstep.heads import kernels as passes
from leanstep.muon import kernel as products
from recipes.speedrun import kernels as gpt

FP32, BF16 = torch.float32, torch.bfloat16
SMALL_TILES = (16, 32, 16)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def tokens_around(rows: int, columns: int) -> Tensor:
    """Return targets to the left and right of the tile, and at its first and last id."""
    around = [-1, 0, columns - 1, columns, columns + 7, columns // 2]
    return torch.tensor([around[row % len(around)] for row in range(rows)])


def apart(tensors: Tensor) -> tuple[Any, ...]:
    """Return the parts of a tensor, each in a separate storage."""
    return tuple(part.clone() for part in tensors)


def stats() -> None:
    with replaced(passes, STATS_BLOCK=16):
        for rows, columns, dtype in ((7, 41, FP32), (6, 16, FP32), (6, 1, BF16), (5, 37, BF16)):
            z, ids = torch.randn(rows, columns).to(dtype), tokens_around(rows, columns) + 100
            for finish in (passes.NOTHING, (torch.randn(columns), 0.1, 30.0)):
                passes.stats(z, ids, 100, *apart(torch.rand(6, rows)), finish=finish)


def grads() -> None:
    with replaced(passes, GRADS_BLOCK=16):
        for rows, columns in ((7, 41), (6, 16), (5, 1)):
            for cap in (0.0, 0.05):
                vectors = apart(torch.rand(7, rows))
                z, ids = torch.randn(rows, columns), tokens_around(rows, columns)
                finish = (torch.randn(columns), 0.1, 30.0)
                passes.grads(z, torch.zeros(rows, columns), ids, 0, *vectors, cap, finish=finish)
                passes.grads(z, torch.zeros(rows, columns, dtype=BF16), ids, 0, *vectors, cap)
                passes.grads(z, z, ids, 0, *vectors, cap)
                # 16-bit gradients in the first half of each row's memory.
                over = z.view(BF16)[:, :columns]
                passes.grads(z, over, ids, 0, *vectors, cap)


def softcap_rows() -> None:
    cap = (23.0, 5.0, 7.5)
    with replaced(gpt, BLOCK=16):
        for rows, columns, ahead in ((3, 41, 3), (2, 16, 1), (1, 1, 2)):
            u, targets = torch.randn(rows, columns).to(BF16), torch.randint(columns, (rows, ahead))
            weights, loss = torch.rand(rows, ahead), torch.empty(rows)
            gpt.softcap_rows(u, None, targets, weights, loss, cap)
            gpt.softcap_rows(u, torch.empty(rows, columns), targets, weights, loss, cap)
            gpt.softcap_rows(u, u, targets, weights, loss, cap, torch.ones(()))


def relu_product() -> None:
    with replaced(gpt, TILE=(16, 32, 16), GROUP=2):
        # The last ones have more rows of tiles than a group.
        for rows, cols, inner in ((41, 37, 20), (16, 32, 16), (1, 5, 3), (70, 40, 5)):
            a, b = torch.randn(rows, inner).to(BF16), torch.randn(cols, inner).to(BF16)
            pre, out = torch.empty(rows, cols).to(BF16), torch.empty(rows, cols).to(BF16)
            gpt.relu_product(a, b, pre, out, False)
            gpt.relu_product(a, b, pre, out, True)


def symmetric(function: Callable[..., Tensor]) -> Callable[[], None]:
    def launch() -> None:
        # The last ones have more rows of tiles than a group.
        for shape in ((41, 37), (2, 33, 17), (16, 16), (1, 5), (150, 3), (3, 150)):
            x = torch.randn(shape).to(BF16)
            side = shape[-2] if function is products.xxt else shape[-1]
            out = torch.empty(*shape[:-2], side, side, dtype=x.dtype)
            function(x, out, tiles=SMALL_TILES)

    return launch


def quadratic() -> None:
    for side in (41, 16, 1):
        a = torch.randn(side, side)
        products.ba_caa(a + a.T, torch.empty(side, side), 0.5, -2.0, tiles=SMALL_TILES)


def transposes() -> None:
    with replaced(products, transpose_tiles=lambda elements: (16, 16, 4)):
        for shape in ((41, 37), (16, 32), (1, 5), (5, 1)):
            src, dst = torch.randn(shape), torch.randn(shape[::-1])
            products.transpose_copy(src, dst)
            products.transpose_add(src, dst)


LAUNCHES: dict[str, tuple[Callable[[], None], ...]] = {
    "stats_kernel": (stats,),
    "grads_kernel": (grads,),
    "softcap_rows_kernel": (softcap_rows,),
    "relu_product_kernel": (relu_product,),
    "xxt_kernel": (symmetric(products.xxt), quadratic),
    "xtx_kernel": (symmetric(products.xtx),),
    "transpose_kernel": (transposes,),
}
