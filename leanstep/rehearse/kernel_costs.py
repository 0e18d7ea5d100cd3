"""What one call below autograd asks of the device, as `Kernel` records. Knows shapes, no device and no torch.

The same function serves the rehearsal (fake tensors) and the calibration (shapes read from traces).
A Triton kernel is priced by a registered cost function, else as one pass over its tensor arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from leanstep.rehearse.events import Kernel

# Elements of one block's chunk, and chunks and tensors of one launch, in torch's multi-tensor kernels.
CHUNK_ELEMENTS, CHUNKS_PER_LAUNCH, TENSORS_PER_LAUNCH = 65_536, 320, 60


class Shape(NamedTuple):
    """A tensor as a kernel sees it: sizes and strides in elements, bytes per element."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    width: int
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        """Bytes that must come from memory: an expanded dimension is read once."""
        return self.width * math.prod(n for n, s in zip(self.size, self.stride, strict=True) if s != 0)

    @property
    def is_dense(self) -> bool:
        expected = 1
        pairs = zip(self.size, self.stride, strict=True)
        for n, s in sorted((pair for pair in pairs if pair[0] != 1), key=lambda pair: (pair[1], pair[0])):
            if s != expected:
                return False
            expected *= n
        return True

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions from the slowest to the fastest."""
        pairs = enumerate(zip(self.size, self.stride, strict=True))
        return tuple(i for _, i in sorted((-s, i) for i, (n, s) in pairs if n > 1))


def alignment(*pairs: tuple[int, int]) -> int:
    """Largest of 16, 8, 4, 2 bytes that divides every (elements, bytes per element)."""
    worst = min((math.gcd(n * width, 16) for n, width in pairs), default=16)
    return max(2, worst)


# No kernel: views, metadata, memory without contents. The host pays for the call.
FREE = frozenset(
    "view t transpose slice select unsqueeze squeeze expand detach alias permute as_strided split "
    "split_with_sizes unbind _unsafe_view _reshape_alias lift_fresh unfold diagonal view_as_complex "
    "view_as_real _conj chunk narrow empty empty_like new_empty empty_strided new_empty_strided device "
    "is_same_size numel sym_size sym_stride sym_numel size stride resolve_conj resolve_neg set_ resize_ "
    "_local_scalar_dense is_pinned item _has_compatible_shallow_copy_type record_stream dim "
    "is_contiguous swapaxes movedim real imag wait_tensor _neg_view expand_as view_as reshape "
    "unsafe_split sym_storage_offset storage_offset _version prim_layout layout empty_permuted "
    "unsafe_chunk _nested_view".split()
)
# name -> positions of the two factors
GEMM = {
    **{"mm": (0, 1), "bmm": (0, 1), "_scaled_mm": (0, 1), "_int_mm": (0, 1), "_grouped_mm": (0, 1)},
    **{"addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2), "_addmm_activation": (1, 2)},
}
FILL = frozenset(
    "zeros zero_ fill_ full zeros_like ones_like full_like new_zeros new_full new_ones ones arange "
    "normal_ uniform_ randn rand randint bernoulli_ scalar_tensor random_ exponential_ eye linspace "
    "randperm rand_like randn_like trunc_normal_ zero fill tril_indices triu_indices log_normal_ "
    "cauchy_ geometric_".split()
)
GATHER = frozenset(
    "embedding index_select gather index take masked_select nonzero nll_loss_forward nll_loss2d_forward "
    "_unsafe_index take_along_dim".split()
)
SCATTER = frozenset(
    "embedding_dense_backward index_add index_add_ scatter_add scatter_add_ index_put index_put_ "
    "_index_put_impl_ scatter scatter_ index_copy_ index_copy _unsafe_index_put scatter_reduce "
    "scatter_reduce_ nll_loss_backward nll_loss2d_backward select_scatter slice_scatter masked_scatter "
    "masked_scatter_".split()
)
SOFTMAX = frozenset(
    "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data logsumexp".split()
)
NORM = frozenset(
    "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
    "_fused_rms_norm _fused_rms_norm_backward".split()
)
REDUCE = frozenset(
    "sum mean amax amin aminmax max min argmax argmin var var_mean std std_mean linalg_vector_norm norm "
    "prod any all cumsum cumprod logcumsumexp sort topk multinomial count_nonzero mv addmv dot vdot "
    "nansum bincount histc searchsorted bucketize median kthvalue _unique2 unique_dim "
    "unique_consecutive isin".split()
)
OPTIMIZER = ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")


def kernels(
    name: str, ins: Sequence[Shape], outs: Sequence[Shape], info: Mapping[str, Any] | None = None
) -> list[Kernel]:
    """Kernels of one ATen call.

    Args:
        name: without namespace and overload: "mm", "add_", "_foreach_mul".
        ins, outs: tensors of the device that it reads and writes, in the order of the schema.
        info: what shapes cannot tell: causal, lists (tensor lists among the arguments), layout ("bthd"),
            beta (of addmm), tf32 (fp32 products may use it), accumulate (of index_put), out_size (of conv).
    """
    info = info or {}
    if name in FREE or not (ins or outs):
        return []
    name = name.removesuffix("_copy") if name.removesuffix("_copy") in FREE else name
    if name in GEMM:
        return [_gemm(name, ins, outs, info)]
    if "attention" in name:
        return [_attention(name, ins, info)]
    if "convolution" in name:
        return _conv(name, ins, outs, info)
    if name.startswith(OPTIMIZER):
        return [_multi_tensor(ins, outs, info)]
    if name in SCATTER:
        return _scatter(name, ins, outs, info)
    if name in SOFTMAX or name in NORM or "batch_norm" in name:
        return _rowwise(name, ins, outs)
    read, written = sum(t.nbytes for t in ins), sum(t.nbytes for t in outs)
    dtype = outs[0].dtype if outs else ins[0].dtype
    if name in FILL:
        return [Kernel("fill", written or read, 0.0, dtype)]
    if name in GATHER:
        # Only the selected elements are read, as many as are written, and the indices.
        indices = sum(t.nbytes for t in ins if t.dtype.startswith(("int", "bool")))
        chosen = outs[0].nbytes if outs else 0
        if name.startswith("nll_loss"):  # mean over what was gathered: one element for each target
            chosen = len(ins) > 1 and ins[1].numel * ins[0].width
        row = outs[0].size[-1] if outs and outs[0].size else 1
        return [Kernel("gather", 2 * chosen + indices, 0.0, dtype, alignment=alignment((row, ins[0].width)))]
    if name in REDUCE:
        passes = {"sort": 8, "topk": 3, "median": 8, "kthvalue": 3, "_unique2": 8}.get(name, 1)
        return [Kernel("reduce", passes * read + written, 0.0, dtype, launches=1 if passes == 1 else passes)]
    return [_pointwise(ins, outs, dtype)]


def _gemm(name: str, ins: Sequence[Shape], outs: Sequence[Shape], info: Mapping[str, Any]) -> Kernel:
    first, second = GEMM[name]
    a, b = ins[first], ins[second]
    batch = a.size[0] if len(a.size) == 3 else b.size[0] if len(b.size) == 3 else 1
    m, k, n = a.size[-2], a.size[-1], b.size[-1]
    width = outs[0].width if outs else a.width
    result = batch * m * n
    moved = a.numel * a.width + b.numel * b.width + result * width
    if (
        first == 1 and len(ins[0].size) >= 2 and info.get("beta", 1) != 0
    ):  # a matrix to add to, not a bias row
        moved += ins[0].nbytes
    if name == "_grouped_mm" and len(a.size) == 2:  # rows of A are shared out among the groups
        batch, result = 1, m * n
        moved = a.numel * a.width + b.numel * b.width + result * width
    leading = [(max(t.stride[-2:]) if min(t.size[-2:]) > 1 else max(t.size[-2:]), t.width) for t in (a, b)]
    aligned = alignment(*leading, (n, width)) if n > 8 and m > 8 else 16
    return Kernel(
        "gemm", moved, 2.0 * batch * m * n * k, _matrix_dtype(a.dtype, info), (batch, m, n, k), 1, aligned
    )


def _matrix_dtype(dtype: str, info: Mapping[str, Any]) -> str:
    if dtype.startswith("float8"):
        return "float8"
    return "tf32" if dtype == "float32" and info.get("tf32") else dtype


def attention_kernel(
    q: Shape, k: Shape, *, backward: bool, share: float = 1.0, efficient: bool = False, layout: str = "bhtd"
) -> Kernel:
    """A fused attention kernel: q, k, v, o move, T x S never does.

    Args:
        q, k: [B, H, T, D] (layout "bhtd"), [B, T, H, D] ("bthd") or [tokens, H, D] ("thd", packed documents).
        share: part of the T x S scores that is computed: 0.5 for causal, the density of a block mask.
    """
    if layout == "thd":
        batch, (t, heads, d), s = 1, q.size, k.size[0]
    elif layout == "bthd":
        (batch, t, heads, d), s = q.size, k.size[1]
    else:
        (batch, heads, t, d), s = q.size, k.size[2]
    products = 5 if backward else 2
    # Backward: q, k, v, o, do and three gradients, dq by way of fp32.
    moved = (q.nbytes + k.nbytes) * (4.5 if backward else 2)
    kind = ("attention_bwd" if backward else "attention") + ("_efficient" if efficient else "")
    flops = 2.0 * products * batch * heads * t * s * d * share
    return Kernel(kind, moved, flops, q.dtype, (batch * heads, t, s, d))


def _attention(name: str, ins: Sequence[Shape], info: Mapping[str, Any]) -> Kernel:
    backward = "backward" in name
    q, k = (ins[1], ins[2]) if backward else (ins[0], ins[1])
    layout = info.get("layout") or ("thd" if len(q.size) == 3 else "bhtd")
    t, s = {"bhtd": (2, 2), "bthd": (1, 1), "thd": (0, 0)}[layout]
    share = 0.5 if info.get("causal") and q.size[t] == k.size[s] else 1.0
    efficient = not ("flash" in name or "cudnn" in name)
    return attention_kernel(q, k, backward=backward, share=share, efficient=efficient, layout=layout)


def _conv(name: str, ins: Sequence[Shape], outs: Sequence[Shape], info: Mapping[str, Any]) -> list[Kernel]:
    """Implicit GEMM; backward is one for the data (not in the first layer) and one for the weight."""
    if name == "convolution_backward":
        grad, x, w = ins[0], ins[1], ins[2]
        rows, taps, channels = grad.numel // max(1, grad.size[1]), w.numel // max(1, w.size[0]), grad.size[1]
        flops, moved = 2.0 * rows * channels * taps, grad.nbytes + x.nbytes + w.nbytes
        dtype = _matrix_dtype(x.dtype, {"tf32": info.get("conv_tf32")})
        of_weight = Kernel("conv", moved, flops, dtype, (1, channels, taps, rows))
        of_data = Kernel("conv", moved, flops, dtype, (1, rows, taps, channels))
        return [of_weight] if x.size[1] <= 4 else [of_data, of_weight]
    x, w = ins[0], ins[1]
    size = outs[0].size if outs else info.get("out_size") or (x.size[0], w.size[0], *x.size[2:])
    width = outs[0].width if outs else x.width
    rows, taps = math.prod(size) // max(1, size[1]), w.numel // max(1, w.size[0])
    moved = x.nbytes + w.nbytes + math.prod(size) * width
    dtype = _matrix_dtype(x.dtype, {"tf32": info.get("conv_tf32")})
    return [Kernel("conv", moved, 2.0 * rows * w.size[0] * taps, dtype, (1, rows, w.size[0], taps))]


def _multi_tensor(ins: Sequence[Shape], outs: Sequence[Shape], info: Mapping[str, Any]) -> Kernel:
    """One pass over all tensors of a _foreach_ call or a fused optimizer."""
    moved = sum(t.nbytes for t in ins) + sum(t.nbytes for t in outs)
    tensors = max(1, len(ins) // max(1, info.get("lists", 1)))
    lead = ins[:tensors] or outs
    chunks = sum(-(-t.numel // CHUNK_ELEMENTS) for t in lead)
    launches = max(1, -(-chunks // CHUNKS_PER_LAUNCH), -(-tensors // TENSORS_PER_LAUNCH))
    return Kernel("multi", moved, 0.0, lead[0].dtype, (), launches)


def _scatter(name: str, ins: Sequence[Shape], outs: Sequence[Shape], info: Mapping[str, Any]) -> list[Kernel]:
    written = sum(t.nbytes for t in outs)
    dtype = outs[0].dtype if outs else ins[0].dtype
    if name == "embedding_dense_backward":  # zeros, then a sort of the indices and a sum by row
        rows = ins[1].numel
        return [
            Kernel("fill", written, 0.0, dtype),
            Kernel("scatter", 2 * ins[0].nbytes + 24 * rows, 0.0, dtype, (), 5),
        ]
    if name.startswith("nll_loss"):  # zeros, then one element for each target
        rows = ins[2].numel if len(ins) > 2 else 1
        return [Kernel("fill", written, 0.0, dtype), Kernel("scatter", rows * (8 + ins[1].width), 0.0, dtype)]
    source = max((t.nbytes for t in ins[1:] if not t.dtype.startswith("int")), default=0) or sum(
        t.nbytes for t in ins[1:]
    )
    copied = 0 if name.endswith("_") else 2 * ins[0].nbytes
    indices = sum(t.numel for t in ins[1:] if t.dtype.startswith("int"))
    if info.get("accumulate"):  # sorted first, so that equal indices add up in a fixed order
        return [Kernel("scatter", 3 * source + copied + 24 * indices, 0.0, dtype, (), 6)]
    return [Kernel("scatter", 3 * source + copied, 0.0, dtype)]


def _rowwise(name: str, ins: Sequence[Shape], outs: Sequence[Shape]) -> list[Kernel]:
    moved = sum(t.nbytes for t in ins) + sum(t.nbytes for t in outs)
    dtype, x = outs[0].dtype if outs else ins[0].dtype, ins[0]
    if "batch_norm" in name:
        channels = x.size[1] if len(x.size) > 1 else 1
        return [Kernel("batch_norm", 1.5 * moved, 0.0, dtype, (channels,), 2)]
    row = x.size[-1] if x.size else 1
    aligned = alignment((row, x.width))
    if name in ("native_layer_norm_backward", "_fused_rms_norm_backward"):
        rows = ins[2].numel if len(ins) > 2 else x.numel // max(1, row)
        of_weight = sum(t.nbytes for t in ins[:2])
        return [
            Kernel("norm", moved, 0.0, dtype, (rows,), alignment=aligned),
            Kernel("norm", of_weight, 0.0, dtype),
        ]
    if "group_norm" in name:
        row = x.numel // max(1, x.size[0] * 32)
    elif name in NORM and len(ins) > 1:
        row = ins[1].numel
    kind = "softmax" if name in SOFTMAX else "norm"
    return [Kernel(kind, moved, 0.0, dtype, (max(1, x.numel // max(1, row)),), alignment=aligned)]


def _pointwise(ins: Sequence[Shape], outs: Sequence[Shape], dtype: str) -> Kernel:
    """One pass. A permuted operand wastes part of each sector, a smaller one costs an index computation."""
    moved = sum(t.nbytes for t in ins) + sum(t.nbytes for t in outs)
    tensors = [t for t in (*ins, *outs) if t.numel > 1]
    if not tensors:
        return Kernel("pointwise", moved, 0.0, dtype)
    widest = max(t.numel for t in tensors)
    full = [t for t in tensors if t.numel == widest]
    kind = "pointwise"
    if len({t.dtype for t in tensors}) > 1:
        kind = "cast"
    if any(t.numel < widest for t in tensors):
        kind = "broadcast"
    aligned = 16
    if any(not t.is_dense for t in full) or len({t.order for t in full}) > 1:
        kind = "strided"
        pitches = [
            (sorted(s for s in t.stride if s > 1)[0], t.width) for t in full if any(s > 1 for s in t.stride)
        ]
        aligned = alignment(*pitches)
    return Kernel(kind, moved, 0.0, dtype, alignment=aligned)


# Kernels that are not ATen's.
Cost = Callable[[Mapping[str, Any]], "Kernel | Sequence[Kernel]"]
_costs: dict[str, Cost] = {}


def register_cost(name: str, cost: Cost) -> None:
    """Price a Triton kernel or custom op exactly.

    Args:
        name: of the kernel's function, or "namespace::op".
        cost: takes the launch's arguments by name (tensors as `Shape`, the rest as passed; "grid" is the
            grid) and returns one Kernel or several. Replaces an earlier one.
    """
    if not callable(cost):
        raise TypeError(f"cost of {name!r}: expected a function of the launch's arguments, got {cost!r}")
    _costs[name] = cost


def registered_cost(name: str, arguments: Mapping[str, Any]) -> tuple[Kernel, ...] | None:
    """What the registered function says of this launch, or None when there is none."""
    cost = _costs.get(name)
    if cost is None:
        return None
    said = cost(arguments)
    return (said,) if isinstance(said, Kernel) else tuple(said)


def one_pass(name: str, tensors: Sequence[Shape]) -> Kernel:
    """A kernel that nobody knows: every tensor argument moves once."""
    widest = max(tensors, key=lambda t: t.nbytes, default=None)
    return Kernel(
        "triton", sum(t.nbytes for t in tensors), 0.0, widest.dtype if widest else "float32", name=name
    )
