"""A few small launches of every kernel, through the functions that normally launch it.

Blocks are small, so that rows take several; storages end where the data ends, so that an access past the data
is out of bounds. test_memory.py runs these in the interpreter, tools/mutate_kernels.py runs them on mutants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from leanstep.gpt import kernel as gpt
from leanstep.lens import LensConfig, ObjectiveConfig, SamplingConfig, Variant, lens_loss, lens_objective
from leanstep.lens import kernel as lens
from leanstep.lens.batch import LensBatch
from leanstep.lens.pairs import build_pairs
from leanstep.logprob import PolicyObjective
from leanstep.logprob.engine import kernel as passes
from leanstep.logprob.engine.gpu import kernel as rowwise
from leanstep.logprob.engine.pass_interface import Compared, Finish, LabelGradient
from leanstep.logprob.engine.tiles import laid_over
from leanstep.muon import NorMuon, state
from leanstep.muon import kernel as products
from leanstep.muon.fused import kernel as fused

FP32, BF16 = torch.float32, torch.bfloat16
SMALL_TILES = (16, 32, 16)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def finishes(rows: int, columns: int) -> list[Finish | None]:
    bias = torch.randn(columns).to(BF16)
    return [None, Finish(bias, 0.5, True, torch.rand(rows) + 1.0)]


def tokens_around(rows: int, columns: int) -> Tensor:
    """Return targets to the left and right of the tile, and at its first and last id."""
    around = [-1, 0, columns - 1, columns, columns + 7, columns // 2]
    return torch.tensor([around[row % len(around)] for row in range(rows)])


def apart(tensors: Tensor) -> tuple[Any, ...]:
    """Return the parts of a tensor, each in a separate storage."""
    return tuple(part.clone() for part in tensors)


def update_statistics() -> None:
    with replaced(passes, STATISTICS_BLOCK=16):
        for rows, columns, dtype in ((7, 41, FP32), (6, 16, FP32), (6, 1, BF16), (5, 37, BF16)):
            for finish in finishes(rows, columns):
                for keep in {False, finish is not None and dtype == FP32}:
                    z = torch.randn(rows, columns).to(dtype)
                    maximum, total, moment = (
                        torch.full((rows,), -torch.inf),
                        torch.zeros(rows),
                        torch.zeros(rows),
                    )
                    read = (tokens_around(rows, columns) + 100, 100, torch.zeros(rows)) if rows > 5 else ()
                    passes.update_statistics(
                        z, maximum, total, moment if rows != 6 else None, *read, finish=finish, keep=keep
                    )


def scale_exponentials() -> None:
    with replaced(passes, GRADIENT_BLOCK=16, SUMMED_ROWS=3):
        for rows, columns in ((7, 41), (6, 16), (5, 1)):
            maximum, constant, slope, target = apart(torch.randn(4, rows))
            for finish in finishes(rows, columns):
                for out_dtype in (FP32, BF16):
                    z = torch.randn(rows, columns)
                    labels = (tokens_around(rows, columns), 0, target)
                    out = torch.zeros(rows, columns, dtype=out_dtype)
                    sums = torch.zeros(columns)
                    passes.scale_exponentials(z, out, maximum, constant, slope, *labels, finish, sums)
                    passes.scale_exponentials(z, z, maximum, constant, None)


def overwrite_exponentials() -> None:
    with replaced(passes, GRADIENT_BLOCK=16):
        for rows, columns in ((7, 41), (6, 16), (5, 1)):
            maximum, constant, slope, target = apart(torch.randn(4, rows))
            for finish in finishes(rows, columns):
                z = torch.randn(rows, columns)
                labels = (tokens_around(rows, columns), 0, target)
                out = laid_over(z, BF16)
                passes.scale_exponentials(z, out, maximum, constant, slope, *labels, finish, overlaps=True)


def divergences() -> None:
    with replaced(passes, GRADIENT_BLOCK=16):
        for mode, (rows, columns) in enumerate(((5, 41), (4, 16), (3, 1), (2, 37), (2, 19))):
            z, y = apart(torch.randn(2, rows, columns))
            y = y.softmax(-1) if mode == 4 else y
            compared = Compared(apart(torch.randn(4, rows).abs()), mode, 0.4, 0.6, 0.4)
            sums, factor = torch.zeros(3, rows), torch.ones(rows)
            passes.divergence_sums(z, y, compared, sums)
            labels = LabelGradient(tokens_around(rows, columns), factor, factor, 0.7)
            out = torch.zeros(rows, columns, dtype=BF16)
            passes.divergence_gradient(z, y, out, compared, sums[1], factor, 20.0, labels)
            passes.divergence_gradient(z, y, y, compared, sums[1], factor)


def gather_rows() -> None:
    with replaced(rowwise, GATHER_BLOCK=16):
        for columns in (41, 16, 1):
            x, rows = torch.randn(9, columns), torch.tensor([8, 0, 3, 3, -1, 9, -(2**40), 2**40])
            rowwise.gather_rows(x, rows, torch.zeros(len(rows), columns, dtype=BF16))


def policy_rows() -> None:
    with replaced(rowwise, POLICY_BLOCK=16):
        for rows, kind, kl, bonus in (
            (37, "clip", "k3", 0.1),
            (16, "clip", "k2", 0.0),
            (1, "cispo", "k1", 0.1),
        ):
            objective = PolicyObjective(
                kind=kind, kl=kl, kl_coef=0.1, entropy_coef=bonus, dual_clip=1.5 if kind == "clip" else None
            )
            maximum, target, old, advantage, reference, slopes = (t.clone() for t in torch.randn(6, rows))
            total, moment, weight = (t.clone() for t in torch.rand(3, rows) + 0.5)
            mask = (torch.rand(rows) < 0.7).float()
            results = [*(torch.zeros(rows) for _ in range(4)), torch.zeros(rows, dtype=torch.bool)]
            rowwise.policy_rows(
                (maximum, total, moment, target), (old, advantage, mask, reference),
                weight, objective, results, (0.5, slopes),
            )  # fmt: skip


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


def optimizer_steps(dtype: torch.dtype, **options: Any) -> Callable[[], None]:
    """Steps of NorMuon on matrices of several layouts and of Adam on vectors; one that is skipped."""
    blocks = {"TILE": (4, 8), "FLAT_BLOCK": 16, "MAX_PROGRAMS": 3, "LINE_TILE": (4, 8), "COLUMN_TILE": (8, 4)}

    def launch() -> None:
        with replaced(state, FUSED_DEVICES=("cuda", "cpu")), replaced(fused, **blocks):
            matrices, vectors = (
                [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
                for shapes in (((5, 9), (5, 9), (9, 5), (2, 5, 9), (1, 20)), ((7,), (33,), (16,), ()))
            )
            groups = [
                {"params": [*matrices[:3], matrices[4]], **options},
                {"params": matrices[3:4], "lr_mul": [1.0, 2.0], **options},
                {"params": vectors, "algorithm": "adam"},
            ]
            stepper = NorMuon(groups, lr=torch.tensor(0.02), compute_dtype=FP32)
            for parameter in (*matrices, *vectors):
                parameter.grad = torch.randn(parameter.shape).to(dtype)
            stepper.step()
            if not options:
                vectors[1].grad[3] = torch.nan
                stepper.step()

    return launch


OPTIMIZERS = (
    optimizer_steps(BF16, variance="row"),
    optimizer_steps(FP32),
    optimizer_steps(FP32, variance="off"),
)


def lens_batch() -> LensBatch:
    """Two samples of three contexts over 24 tokens: all levels, a missing loss, unequal lengths."""

    def context(start: int, levels: tuple[int, ...], loss: float | None, plain: bool = False) -> Variant:
        positions, at = [], start
        for level in levels:
            positions.append(at)
            at += 4**level
        return Variant(positions, list(levels), loss, plain)

    whole = (0,) * 24
    samples = [
        [
            context(0, whole, 2.0, True),
            context(0, (1, 1, 0, 0, 0, 0, 1, 1, 1), 2.5),
            context(0, (2, 1, 1), 2.2),
        ],
        [
            context(0, whole[:23], 2.1, True),
            context(4, (1, 0, 0, 0, 0, 1, 1), None),
            context(0, (1,) * 6, 2.6),
        ],
    ]
    return LensBatch.from_variants(samples, LensConfig(block_size=4), num_tokens=24)


def lens_objectives() -> None:
    batch = lens_batch()
    with replaced(lens, MAX_TILE=8), replaced(lens_objective, _kernels=lambda scores: lens):
        for form, sampling, dtype in (("logistic", "none", FP32), ("hinge", "topk", BF16)):
            config = LensConfig(
                block_size=4,
                objective=ObjectiveConfig(form=form, budget_smooth_weight=0.3),
                sampling=SamplingConfig(span_sampling=sampling, span_k=5, aux_on_full=False),
            )
            scores = torch.randn(batch.pos.shape).tanh().to(dtype).requires_grad_()
            lens_loss(scores, batch, config, backend="fused").loss.backward()


def lens_pairs() -> None:
    for variants, slots in ((3, 4), (8, 7), (1, 1), (5, 40)):
        losses = torch.randn(2, variants)
        losses[1, 0] = torch.nan
        row = torch.arange(2 * variants).view(2, variants)
        lens.triton_pairs(losses, row, LensConfig(sampling=SamplingConfig(max_pairs=slots)))


def lens_targets() -> None:
    batch, config = lens_batch(), LensConfig(block_size=4)
    pairs = build_pairs(batch.loss, batch.row, config)
    for tile in (8, 32):
        with replaced(lens, MAX_TILE=tile):
            lens.triton_targets(batch, pairs, config)


LAUNCHES: dict[str, tuple[Callable[[], None], ...]] = {
    "update_statistics_kernel": (update_statistics,),
    "scale_exponentials_kernel": (scale_exponentials,),
    "overwrite_exponentials_kernel": (overwrite_exponentials,),
    "divergence_sums_kernel": (divergences,),
    "divergence_gradient_kernel": (divergences,),
    "gather_rows_kernel": (gather_rows,),
    "policy_rows_kernel": (policy_rows,),
    "softcap_rows_kernel": (softcap_rows,),
    "relu_product_kernel": (relu_product,),
    "xxt_kernel": (symmetric(products.xxt), quadratic),
    "xtx_kernel": (symmetric(products.xtx),),
    "transpose_kernel": (transposes,),
    "momentum_kernel": OPTIMIZERS,
    "normalize_kernel": OPTIMIZERS,
    "variance_kernel": OPTIMIZERS[:2],
    "write_kernel": OPTIMIZERS,
    "adam_kernel": OPTIMIZERS,
    "lens_pairs_kernel": (lens_pairs,),
    "lens_targets_kernel": (lens_targets,),
    "lens_rows_kernel": (lens_objectives,),
}
