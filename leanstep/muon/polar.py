"""Polar Express: the nearest semi-orthogonal matrix in five polynomial steps, with the fewest FLOPs.

There are two forms of the same polynomial, with n = shorter side and r = longer / shorter:

    standard   A = X X^T; X <- (aI + bA + cA^2) X                 15r + 5 units of n^3 with symmetric products
    gram       stay in n x n: Q <- P Q, G <- P G P, finally Q X    3r + 20, or 6r + 15 with a restart

A tall X uses A = X^T X and multiplies from the right: the same result as transposing, without a transposed
copy. `plan_polar` chooses by shape, device and dtype; every choice can be forced; `explain` prints it.

Symmetric n x n results are computed in row panels: panel i needs only its first i + 1 column blocks, so b
panels cost (b + 1) / 2b of the full product (one call per panel), and the rest is a transposed copy.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanstep.cpu import cpu_bfloat16_speedup, num_threads, run_on_cores
from leanstep.muon.reference import ABSOLUTE_EPS, POLAR_EXPRESS, SAFETY, Triples
from leanstep.muon.transpose import triton_kernels

METHODS = ("auto", "standard", "gram")
EPS_MODES = ("relative", "absolute")
# Above about this aspect ratio the n x n form needs fewer operations (3.25r + 23.5 < 16.25r + 6.25 with
# four panels).
GRAM_RATIO = 4 / 3
# Squaring loses digits of singular values below 1e-3 of the largest. After two steps these have grown 33
# times, and a fresh Gram matrix recovers one or two digits for 3r - 3 units. Small matrices can afford it.
# Large ones skip it and are still 20 times closer than bfloat16 on the worst spectra of docs/muon.md.
GRAM_RESTART = 2
MIN_FAST_SIDE = 256
# On a CPU half precision is faster only if the product is large enough to hide the conversions.
MIN_HALF_SIDE = 256
MIN_HALF_SPEEDUP = 1.3
# Stacking equal shapes into one batched product helps the CPU only below this many elements.
MAX_BATCHED_ELEMENTS = 64 * 64
# Below this side a full product is as fast as the panels (measured with two threads, see docs/muon.md).
MIN_SYMMETRIC_SIDE = 256
# With fewer matrices per core than this, the last matrices leave the other cores idle for too long.
MIN_JOBS_PER_WORKER = 2


class Workspace:
    """Scratch tensors by role, shape and dtype: matrices of equal shape reuse the same memory.

    Example:
        workspace = Workspace()
        factors = [polar(update, workspace=workspace) for update in updates]   # scratch of one [R, C] matrix
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple, Tensor] = {}
        self._children: list[Workspace] = []

    def take(
        self, role: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the tensor of this role and shape on the device of `like`; its values are undefined."""
        dtype = dtype or like.dtype
        key = (role, shape, dtype, like.device)
        if key not in self._tensors:
            self._tensors[key] = torch.empty(shape, dtype=dtype, device=like.device)
        return self._tensors[key]

    def child(self, index: int) -> Workspace:
        """Return separate scratch for the index-th of several threads."""
        while len(self._children) <= index:
            self._children.append(Workspace())
        return self._children[index]

    def clear(self) -> None:
        self._tensors.clear()
        self._children.clear()


def run_side_by_side(
    jobs: Sequence[Callable[[Workspace], None]], workspace: Workspace, workers: int | None = None
) -> None:
    """Run every job once, one per core with one thread each; few jobs run in sequence with all threads.

    A job receives its worker's workspace. Two threads speed one 768 x 768 product up by 1.6, two products by
    2.
    """
    workers = num_threads() if workers is None else workers
    if workers < 2 or len(jobs) < MIN_JOBS_PER_WORKER * workers:
        for job in jobs:
            job(workspace)
        return
    run_on_cores([lambda worker, job=job: job(workspace.child(worker)) for job in jobs], workers)


@dataclass(frozen=True)
class PolarPlan:
    """How one matrix shape is orthogonalised."""

    rows: int
    cols: int
    method: str
    restart: int | None
    panels: int
    dtype: torch.dtype
    batched: bool
    reasons: tuple[str, ...] = ()

    @property
    def tall(self) -> bool:
        return self.rows > self.cols

    def flops(self, num_steps: int = 5) -> float:
        """Return the floating-point operations of one matrix (multiply and add count as two)."""
        n, r = min(self.rows, self.cols), max(self.rows, self.cols) / max(1, min(self.rows, self.cols))
        share = (self.panels + 1) / (2 * self.panels)
        symmetric, gram, apply = 2 * share, 2 * share * r, 2 * r
        if self.method == "standard":
            return num_steps * (gram + symmetric + apply) * n**3
        total, factors = gram, 0
        for index in range(num_steps):
            last = index == num_steps - 1 or index + 1 == self.restart
            product = (0, symmetric, 2)[min(factors, 2)]
            total += symmetric + product + (0 if last else 2 * symmetric)
            factors += 1
            if last:
                total += apply
                if index + 1 != num_steps:
                    total, factors = total + gram, 0
        return total * n**3

    def __str__(self) -> str:
        form = self.method if self.restart is None else f"{self.method}, restart after {self.restart}"
        dtype = str(self.dtype).removeprefix("torch.")
        head = (
            f"{self.rows}x{self.cols}: {form}, {'X^T X' if self.tall else 'X X^T'}, "
            f"{self.panels} panel{'s' if self.panels > 1 else ''}, {dtype}, {self.flops() / 1e9:.3g} GFLOP"
        )
        return "\n".join([head, *(f"  {reason}" for reason in self.reasons)])


def choose_dtype(
    rows: int, cols: int, device: torch.device, dtype: torch.dtype, cpu_half: bool | None = None
) -> tuple[torch.dtype, str]:
    """Return the compute dtype for `auto` and the reason; `cpu_half` replaces the measurement."""
    if dtype == torch.float64:
        return dtype, "float64: the input is float64"
    if device.type != "cpu":
        return torch.bfloat16, f"bfloat16: {device.type} has matrix units for it"
    if min(rows, cols) < MIN_HALF_SIDE:
        return torch.float32, f"float32: the short side is below {MIN_HALF_SIDE}"
    if cpu_half is not None:
        chosen = torch.bfloat16 if cpu_half else torch.float32
        return chosen, f"{str(chosen).removeprefix('torch.')}: faster when this optimizer was created"
    speedup = cpu_bfloat16_speedup()
    if speedup > MIN_HALF_SPEEDUP:
        return torch.bfloat16, f"bfloat16: {speedup:.1f} times as fast as float32 on this CPU"
    return torch.float32, f"float32: bfloat16 runs at {speedup:.2g} of the float32 speed on this CPU"


def plan_polar(
    rows: int,
    cols: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    method: str = "auto",
    restart: int | str | None = "auto",
    panels: int | str = "auto",
    compute_dtype: torch.dtype | str = "auto",
    cpu_half: bool | None = None,
) -> PolarPlan:
    """Choose the form, the restart, the number of panels and the dtype for matrices of shape [rows, cols].

    Example:
        plan = plan_polar(768, 3072, compute_dtype=torch.float32)
        plan.method, plan.flops() / 768**3                                  # "gram", 36.5

    Args:
        device, dtype: device and dtype of the update.
        method: auto | standard | gram.
        restart: auto (2 for a short side below 256, else None), None, or the number of steps after which
            the gram form recomputes its Gram matrix.
        panels: auto, or the number of row panels of a symmetric product (1 = compute all of it).
        compute_dtype: auto, or a dtype.
        cpu_half: whether bfloat16 is faster on this CPU, if known; None measures it.
    """
    place, short, long = torch.device(device), min(rows, cols), max(rows, cols)
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if panels != "auto" and (not isinstance(panels, int) or panels < 1):
        raise ValueError(f"panels: expected 'auto' or a positive int, got {panels!r}")
    if restart not in ("auto", None) and (not isinstance(restart, int) or restart < 1):
        raise ValueError(f"restart: expected 'auto', None or a positive int, got {restart!r}")
    if compute_dtype != "auto" and not isinstance(compute_dtype, torch.dtype):
        raise ValueError(f"compute_dtype: expected 'auto' or a torch.dtype, got {compute_dtype!r}")
    if isinstance(compute_dtype, torch.dtype):
        reasons = [f"{str(compute_dtype).removeprefix('torch.')}: requested"]
    else:
        compute_dtype, why = choose_dtype(rows, cols, place, dtype, cpu_half)
        reasons = [why]
    half = compute_dtype in (torch.bfloat16, torch.float16)
    ratio = long / max(1, short)
    if method != "auto":
        why = "requested"
    elif half:
        method, why = "standard", "squaring in half precision loses singular values below 0.1"
    elif ratio >= GRAM_RATIO:
        method, why = "gram", f"ratio {ratio:.3g} is at least {GRAM_RATIO}"
    else:
        method, why = "standard", f"ratio {ratio:.3g} is below {GRAM_RATIO}"
    reasons.append(f"{method}: {why}")
    restart = None if method == "standard" else restart
    if restart == "auto":
        restart = GRAM_RESTART if short < MIN_FAST_SIDE else None
        cheap = f"restart: extra precision is cheap for a short side below {MIN_FAST_SIDE}"
        costly = f"no restart: from side {MIN_FAST_SIDE} on it costs a quarter more"
        reasons.append(cheap if restart else costly)
    batched = place.type != "cpu" or rows * cols <= MAX_BATCHED_ELEMENTS
    if not isinstance(panels, int):
        panels = choose_panels(short, place)
    assert restart is None or isinstance(restart, int)
    return PolarPlan(rows, cols, method, restart, panels, compute_dtype, batched, tuple(reasons))


def explain(rows: int, cols: int, **options) -> str:
    """Return the plan for matrices of shape [rows, cols] as text.

    Equivalent to:
        text = str(plan_polar(rows, cols, **options))
    """
    return str(plan_polar(rows, cols, **options))


def _has_kernel(x: Tensor) -> bool:
    # Half precision on a GPU with contiguous rows; everything else uses the vendor's library.
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and triton_kernels() is not None
    )


def choose_panels(side: int, device: torch.device) -> int:
    """Return the number of row panels of a symmetric side x side product; 1 = compute all of it."""
    if device.type != "cpu" or side < MIN_SYMMETRIC_SIDE:
        return 1
    # More panels skip more work but make smaller calls; 4 and 6 tie at 768, where 4 synchronize less often.
    return 4 if side < 1024 else 6


def _bounds(side: int, panels: int) -> list[tuple[int, int]]:
    # Multiples of 16 keep the panels aligned to vector registers.
    edges = [0, *(min(side, round(side * i / panels / 16) * 16) for i in range(1, panels)), side]
    return [(low, high) for low, high in itertools.pairwise(edges) if high > low]


def _lower_panels(out: Tensor, panels: int) -> Iterator[tuple[slice, slice, Tensor]]:
    # Yield (rows, columns, output view) up to the diagonal; afterwards copy their mirror image into the rest.
    bounds = _bounds(out.size(0), panels)
    for lo, hi in bounds:
        yield slice(lo, hi), slice(0, hi), out[lo:hi, :hi]
    for lo, hi in bounds[1:]:
        out[:lo, lo:hi].copy_(out[lo:hi, :lo].mT)


def gram_matrix(x: Tensor, out: Tensor, *, tall: bool = False, panels: int = 1) -> Tensor:
    """out = x @ x.mT, or x.mT @ x when `tall`; x is [R, C] or [B, R, C]. Returns out."""
    if _has_kernel(x):
        return (triton_kernels().xtx if tall else triton_kernels().xxt)(x, out)
    if panels == 1 or x.ndim == 3:
        return torch.matmul(x.mT, x, out=out) if tall else torch.matmul(x, x.mT, out=out)
    for rows, cols, panel in _lower_panels(out, panels):
        torch.mm(x[:, rows].mT, x[:, cols], out=panel) if tall else torch.mm(x[rows], x[cols].mT, out=panel)
    return out


def commuting_product(a: Tensor, b: Tensor, out: Tensor, *, panels: int = 1) -> Tensor:
    """out = a @ b for symmetric a and b that commute, so that the product is symmetric too."""
    if panels == 1 or a.ndim == 3:
        return torch.matmul(a, b, out=out)
    for rows, cols, panel in _lower_panels(out, panels):
        torch.mm(a[rows], b[:, cols], out=panel)
    return out


def quadratic(
    gram: Tensor, out: Tensor, a: float, b: float, c: float, *, panels: int = 1, identity: bool = True
) -> Tensor:
    """out = b * gram + c * gram @ gram, plus a times the identity if `identity`."""
    if _has_kernel(gram):
        triton_kernels().ba_caa(gram, out, alpha=c, beta=b)
    elif gram.ndim == 3:
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=out)
    elif panels == 1:
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=out)
    else:
        for rows, cols, panel in _lower_panels(out, panels):
            torch.addmm(gram[rows, cols], gram[rows], gram[:, cols], beta=b, alpha=c, out=panel)
    if identity:
        out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out


def normalize_into(update: Tensor, out: Tensor, eps_mode: str = "relative") -> Tensor:
    """out = update / (1.02 * its norm), per matrix, in the dtype of `out`; see `reference.normalize`."""
    if eps_mode == "absolute":
        return torch.mul(update, 1 / (_norm(update) * SAFETY + ABSOLUTE_EPS), out=out)
    # Two vectorised passes: torch's infinity norm runs element by element, twenty times slower.
    largest = torch.maximum(update.amax((-2, -1), keepdim=True), -update.amin((-2, -1), keepdim=True))
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    # A division, not a product with the reciprocal: 1 / largest overflows for subnormal updates.
    scaled = torch.div(update, largest, out=out if out.dtype == update.dtype else None)
    return torch.mul(scaled, 1 / (_norm(scaled) * SAFETY).clamp_min(torch.finfo(update.dtype).tiny), out=out)


def _norm(x: Tensor) -> Tensor:
    # Rows first: one float32 sum over millions of squares has an error of 1e-4, two short sums one of 1e-7.
    rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True)


def iterate(
    x: Tensor, plan: PolarPlan, coefficients: Triples, workspace: Workspace, out: Tensor | None = None
) -> Tensor:
    """Run the polynomial steps on a normalised x ([R, C] or [B, R, C], plan.dtype).

    x is overwritten. The result is `out`; without `out` it is x or a tensor of the workspace.
    """
    side = min(plan.rows, plan.cols)
    square = (*x.shape[:-2], side, side)
    spare = workspace.take("x", tuple(x.shape), x)
    gram = workspace.take("gram", square, x)
    poly = workspace.take("poly", square, x)

    def apply(factor: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return torch.matmul(*((x, factor) if plan.tall else (factor, x)), out=out)

    if plan.method == "standard":
        # a * I inside the factor saves a pass over x, but in half precision it would round b A + c A^2 away.
        inside = x.dtype in (torch.float32, torch.float64)
        add = torch.addmm if x.ndim == 2 else torch.baddbmm
        for index, (a, b, c) in enumerate(coefficients):
            gram_matrix(x, gram, tall=plan.tall, panels=plan.panels)
            quadratic(gram, poly, a, b, c, panels=plan.panels, identity=inside)
            if out is not None and index + 1 == len(coefficients):
                spare = out
            if inside:
                apply(poly, x, spare)
            else:
                add(x, *((x, poly) if plan.tall else (poly, x)), beta=a, out=spare)
            x, spare = spare, x
        return x

    work = workspace.take("work", square, x)
    product, other = workspace.take("product", square, x), workspace.take("other", square, x)
    factors = 0
    gram_matrix(x, gram, tall=plan.tall, panels=plan.panels)
    for index, (a, b, c) in enumerate(coefficients):
        restart = index + 1 == plan.restart and index + 1 < len(coefficients)
        last = restart or index + 1 == len(coefficients)
        quadratic(gram, poly, a, b, c, panels=plan.panels)
        if not last:
            commuting_product(poly, gram, work, panels=plan.panels)
            commuting_product(work, poly, gram, panels=plan.panels)
        if factors == 0:
            poly, product = product, poly
        else:
            # The factors commute except where G is noise, which grows with each step. A matrix of low rank
            # needs the first factor next to x and, from the third factor on, the full product, not mirrored.
            pair = (product, poly) if plan.tall else (poly, product)
            commuting_product(*pair, other, panels=plan.panels if factors == 1 else 1)
            product, other = other, product
        factors += 1
        if last:
            if out is not None and not restart:
                spare = out
            x, spare = apply(product, x, spare), x
        if restart:
            gram_matrix(x, gram, tall=plan.tall, panels=plan.panels)
            factors = 0
    return x


@torch.no_grad()
def polar(
    update: Tensor,
    *,
    coefficients: Triples = POLAR_EXPRESS,
    eps_mode: str = "relative",
    method: str = "auto",
    restart: int | str | None = "auto",
    panels: int | str = "auto",
    compute_dtype: torch.dtype | str = "auto",
    workspace: Workspace | None = None,
) -> Tensor:
    """Return the approximate polar factor U V^T of every matrix in `update`.

    Equivalent to:
        factor = leanstep.muon.reference.polar(update, coefficients, eps_mode)

    Args:
        update: [..., R, C], any float dtype; not modified.
        coefficients: (a, b, c) per step.
        eps_mode: relative (any scale gives the same result; zero gives zero) or absolute (adds 1e-6
            to the norm, bit-compatible with the speedrun).
        method, restart, panels, compute_dtype: see `plan_polar`.
        workspace: scratch to reuse between calls; not used inside torch.compile.

    Returns:
        [..., R, C] in the dtype of `update`; singular values for a Gaussian matrix are in 0.86 .. 1.14.
        No gradient flows through it.

    Peak extra memory: three copies of one matrix plus five of its smaller square, in the compute dtype.
    Collectives: none.
    """
    if not update.is_floating_point() or update.layout != torch.strided:
        raise ValueError(f"update: expected a dense real floating tensor, got {update.dtype} {update.layout}")
    if update.ndim < 2:
        raise ValueError(f"update: expected at least two dimensions, got shape {tuple(update.shape)}")
    if eps_mode not in EPS_MODES:
        raise ValueError(f"eps_mode: expected one of {', '.join(EPS_MODES)}, got {eps_mode!r}")
    if torch.compiler.is_compiling():
        choices = (method, _auto_or(restart), _auto_or(panels), _dtype_or_none(compute_dtype))
        return _polar_op(update, [x for triple in coefficients for x in triple], eps_mode, *choices)
    if update.numel() == 0:
        return update.clone()
    rows, cols = update.shape[-2:]
    plan = plan_polar(
        rows,
        cols,
        device=update.device,
        dtype=update.dtype,
        method=method,
        restart=restart,
        panels=panels,
        compute_dtype=compute_dtype,
    )
    workspace = workspace or Workspace()
    source = update.reshape(-1, rows, cols)
    result = torch.empty(source.shape, dtype=update.dtype, device=update.device)

    def job(matrix: Tensor, target: Tensor, scratch: Workspace) -> None:
        wide_enough = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
        x = scratch.take("input", tuple(matrix.shape), matrix, plan.dtype)
        normalize_into(wide_enough, x, eps_mode)
        same = plan.dtype == target.dtype
        factor = iterate(x, plan, coefficients, scratch, out=target if same else None)
        if factor is not target:
            target.copy_(factor)

    pieces = [(source, result)] if plan.batched else list(zip(source, result, strict=True))
    run_side_by_side([functools.partial(job, matrix, target) for matrix, target in pieces], workspace)
    return result.view(update.shape)


# `polar` as a torch.library op. restart, panels: -1 means "auto", 0 means None.


@torch.library.custom_op("leanstep::polar", mutates_args=())
def _polar_op(
    update: Tensor, coefficients: list[float], eps_mode: str, method: str, restart: int, panels: int,
    compute_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    factor = polar(
        update,
        coefficients=triples_of(coefficients),
        eps_mode=eps_mode,
        method=method,
        restart="auto" if restart < 0 else restart or None,
        panels="auto" if panels < 0 else panels,
        compute_dtype=compute_dtype or "auto",
    )
    return factor.contiguous()


@_polar_op.register_fake
def _(update, coefficients, eps_mode, method, restart, panels, compute_dtype):
    return update.new_empty(update.shape)


def triples_of(numbers: Sequence[float]) -> list[tuple[float, float, float]]:
    """Return (a, b, c) per step from the flat list of numbers."""
    return [(a, b, c) for a, b, c in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)]


def _auto_or(choice: int | str | None) -> int:
    return -1 if choice == "auto" else choice or 0  # type: ignore[return-value]


def _dtype_or_none(choice: torch.dtype | str) -> torch.dtype | None:
    return None if isinstance(choice, str) else choice
