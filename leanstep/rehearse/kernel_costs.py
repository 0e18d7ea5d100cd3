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


def alignment(*pairs: tuple[int, int]) -> int:
    """Largest of 16, 8, 4, 2 bytes that divides every (elements, bytes per element)."""
    worst = min((math.gcd(n * width, 16) for n, width in pairs), default=16)
    return max(2, worst)


# What one load from memory brings.
_SECTOR_BYTES = 32
# Copies into these dtypes that have a vectorised kernel of their own; other casts go element by element.
_NARROWING = {("float32", "bfloat16"), ("float32", "float16")}

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
COPIED_FIRST = frozenset("masked_fill index_fill masked_scatter slice_scatter select_scatter".split())
OPTIMIZER = ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")


def kernels(
    name: str, ins: Sequence[Shape], outs: Sequence[Shape], info: Mapping[str, Any] | None = None
) -> list[Kernel]:
    """Kernels of one ATen call.

    Args:
        name: without namespace and overload: "mm", "add_", "_foreach_mul".
        ins, outs: tensors of the device that it reads and writes, in the order of the schema.
        info: what shapes cannot tell: causal, lists (tensor lists among the arguments), layout ("bthd"),
            beta (of addmm), tf32 (fp32 products may use it), accumulate (of index_put), out_size (of conv),
            dim (of softmax; the last one without it).
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
    if name in SOFTMAX:
        return [_softmax(ins, outs, info)]
    if name in NORM or "batch_norm" in name:
        return _normalization(name, ins, outs)
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
        aligned = alignment((row, ins[0].width))
        elements = 1.8 * chosen / max(1, ins[0].width)
        return [Kernel("gather", 2 * chosen + indices, 0.0, dtype, alignment=aligned, elements=elements)]
    if name in REDUCE:
        passes = {"sort": 8, "topk": 3, "median": 8, "kthvalue": 3, "_unique2": 8}.get(name, 1)
        kept = max(1, outs[0].numel if outs else 1)
        if passes == 1 and ins and ins[0].numel // kept > CHUNK_ELEMENTS:
            passes, read = 2, read / 2  # few long sums: a second stage adds up the blocks' parts
        return [Kernel("reduce", passes * read + written, 0.0, dtype, launches=passes)]
    if name in COPIED_FIRST and ins and outs:
        # Out of place: the first argument is copied, then changed in place.
        return [
            _pointwise("copy_", ins[:1], outs[:1], dtype),
            _pointwise(name, [outs[0], *ins[1:]], outs, dtype),
        ]
    return [_pointwise(name, ins, outs, dtype)]


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
    """Implicit GEMM; backward is one for the data (not in the first layer) and one for the weight.

    Matrix units want channels last: tensors in NCHW order are turned before and after.
    """
    backward = name == "convolution_backward"
    x, w = (ins[1], ins[2]) if backward else (ins[0], ins[1])
    y = ins[0] if backward else outs[0] if outs else None
    size = y.size if y is not None else info.get("out_size") or (x.size[0], w.size[0], *x.size[2:])
    result = math.prod(size) * (y.width if y is not None else x.width)
    groups = max(1, x.size[1] // max(1, w.size[1]))
    rows, taps, channels = (
        math.prod(size) // max(1, size[1]),
        w.numel // max(1, w.size[0]),
        w.size[0] // groups,
    )
    flops, moved = 2.0 * rows * w.size[0] * taps, x.nbytes + w.nbytes + result
    dtype = _matrix_dtype(x.dtype, {"tf32": info.get("conv_tf32")})
    found = [Kernel("conv", moved, flops, dtype, (groups, rows, channels, taps))]
    turned, launches = moved, 4  # input, filter, result, and a result to clear
    if backward:
        of_weight = Kernel("conv", moved, flops, dtype, (groups, channels, taps, rows))
        of_data = Kernel("conv", moved, flops, dtype, (groups, rows, taps, channels))
        found = [of_weight] if x.size[1] <= 4 else [of_data, of_weight]
        turned, launches = len(found) * moved, 4 * len(found)
    if not (len(x.stride) > 2 and x.stride[1] == 1 and x.size[1] > 1):
        elements = turned / x.width
        found.append(Kernel("strided", 2 * turned, 0.0, x.dtype, launches=launches, elements=elements))
    return found


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


def _softmax(ins: Sequence[Shape], outs: Sequence[Shape], info: Mapping[str, Any]) -> Kernel:
    x = ins[0]
    length = max(1, x.size[info.get("dim", -1)] if x.size else 1)
    moved = sum(t.nbytes for t in ins) + sum(t.nbytes for t in outs)
    sizes = (max(1, x.numel // length), length)
    return Kernel("softmax", moved, 0.0, x.dtype, sizes, alignment=alignment((length, x.width)))


def _normalization(name: str, ins: Sequence[Shape], outs: Sequence[Shape]) -> list[Kernel]:
    """sizes = (blocks, elements that a block walks one step after the other, all its passes counted)."""
    backward = "backward" in name
    x = ins[1] if backward and len(ins) > 1 else ins[0]
    moved = sum(t.nbytes for t in ins) + sum(t.nbytes for t in outs)
    if "batch_norm" in name:
        channels = x.size[1] if len(x.size) > 1 else 1
        each = x.numel // max(1, channels)
        # torch's own kernels: a block a channel, one element a thread and step; libraries take four.
        library = "cudnn" in name or "miopen" in name
        length = each * (2 if backward else 1) // (4 if library else 1)
        launches = 1 if backward or library else 3
        # Statistics first, then a second pass over the input.
        return [Kernel("batch_norm", moved + x.nbytes, 0.0, x.dtype, (channels, max(1, length)), launches)]
    weights = [t for t in ins[1:] if 1 < t.numel < x.numel]
    passes = 4 if backward else 2
    if "group_norm" in name:
        statistics = next((t for t in ins[2:] if len(t.size) == 2), None) if backward else None
        rows = statistics.numel if statistics else max(1, x.size[0] * 32 if x.numel > x.size[0] * 32 else 1)
        scaled = any(len(t.size) == 1 for t in weights)
        launches = (3 if backward else 2) + (2 if backward else 1) * scaled
        return [Kernel("norm", moved, 0.0, x.dtype, (rows, passes * x.numel // rows), launches)]
    per_row = [t for t in ins[2:] if backward and len(t.size) == len(x.size) and t.numel < x.numel]
    inner = max((t.numel for t in weights if t not in per_row), default=0)
    if per_row:
        rows = per_row[0].numel
    elif inner:
        rows = x.numel // inner
    else:
        rows = outs[-1].numel if len(outs) > 1 else x.numel // max(1, x.size[-1] if x.size else 1)
    rows = max(1, rows)
    found = [Kernel("norm", moved, 0.0, x.dtype, (rows, passes * x.numel // rows))]
    if backward and inner:  # the weight's gradient sums over rows in a kernel of its own
        found.append(Kernel("norm", 2 * x.nbytes, 0.0, x.dtype, launches=2 if "rms" in name else 1))
    return found


def _pointwise(name: str, ins: Sequence[Shape], outs: Sequence[Shape], dtype: str) -> Kernel:
    """One pass. Gapless operands of one size and dtype move 16 bytes a thread; all else computes addresses.

    `elements` is weighted by the dimensions that are left after merging neighbours: each costs a division.
    """
    moved = float(sum(t.nbytes for t in ins) + sum(t.nbytes for t in outs))
    tensors = [t for t in (*ins, *outs) if t.numel > 1]
    if not tensors:
        return Kernel("pointwise", moved, 0.0, dtype)
    size = max((t.size for t in tensors), key=math.prod)
    count = math.prod(size)
    if "pool" in name:  # every window visits its inputs, every input its windows
        return Kernel("strided", moved, 0.0, dtype, elements=(4.0 if "backward" in name else 2.25) * count)
    if name in ("cat", "stack"):
        total = sum(t.numel for t in outs) or sum(t.numel for t in ins)
        return Kernel("broadcast", moved, 0.0, dtype, elements=1.8 * total)
    strides = [_expanded(t, size) for t in tensors]
    lead = strides[-1] if outs and outs[-1].numel == count else strides[0]
    order = sorted((i for i, n in enumerate(size) if n > 1), key=lambda i: (-lead[i], i))
    left = _dimensions_left(size, strides, order)
    smaller = any(t.numel < count for t in tensors)
    waste = 0.0
    for tensor, stride in zip(tensors, strides, strict=True):
        # Neighbouring threads load from different sectors; the cache serves most of them again.
        if order and tensor.numel == count and stride[order[-1]] > 1:
            waste += tensor.nbytes * max(0.0, _SECTOR_BYTES / tensor.width / 2.5 - 1)
    floats = {t.dtype for t in tensors if "float" in t.dtype}
    mixed = len(floats) > 1 or (bool(floats) and any(t.dtype.startswith("int") for t in tensors))
    if left <= 1 and not smaller and not waste:
        narrowing = len(ins) == 1 and len(outs) == 1 and (ins[0].dtype, outs[0].dtype) in _NARROWING
        if not mixed or narrowing:
            return Kernel("pointwise", moved, 0.0, dtype)
        return Kernel("cast", moved, 0.0, dtype, elements=1.2 * count)
    elements = count * (1 + 0.15 * max(0, left - 2)) * (1.2 if mixed else 1.0)
    kind = "broadcast" if smaller and not waste else "strided"
    return Kernel(kind, moved + waste, 0.0, dtype, elements=elements)


def _expanded(tensor: Shape, size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides over the common size: 0 along dimensions that the tensor lacks or repeats."""
    missing = len(size) - len(tensor.size)
    if missing < 0 or any(n not in (1, m) for n, m in zip(tensor.size, size[missing:], strict=True)):
        # Not broadcast against each other (a reshaping copy): as if in order.
        return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    own = tuple(0 if n == 1 else s for n, s in zip(tensor.size, tensor.stride, strict=True))
    return (0,) * missing + own


def _dimensions_left(size: tuple[int, ...], strides: Sequence[tuple[int, ...]], order: Sequence[int]) -> int:
    """Dimensions left when neighbours that every operand walks without a gap become one."""
    left = 0
    for i, j in zip(order, (*order[1:], None), strict=True):
        if j is None or any(stride[i] != stride[j] * size[j] for stride in strides):
            left += 1
    gapped = bool(order) and any(stride[order[-1]] > 1 for stride in strides)
    return max(left, 2) if gapped else left


# Kernels that are not ATen's.
Cost = Callable[[Mapping[str, Any]], "Kernel | Sequence[Kernel] | None"]
_costs: dict[str, Cost] = {}


def register_cost(name: str, cost: Cost) -> None:
    """Price a Triton kernel or custom op exactly.

    Args:
        name: of the kernel's function, or "namespace::op".
        cost: takes the launch's arguments by name (tensors as `Shape`, the rest as passed; "grid" is the
            grid) and returns one Kernel or several; None: it is another kernel of that name. Replaces an
            earlier one.
    """
    if not callable(cost):
        raise TypeError(f"cost of {name!r}: expected a function of the launch's arguments, got {cost!r}")
    _costs[name] = cost


def registered_cost(name: str, arguments: Mapping[str, Any]) -> tuple[Kernel, ...] | None:
    """What the registered function says of this launch, or None when there is none."""
    cost = _costs.get(name)
    said = None if cost is None else cost(arguments)
    if said is None:
        return None
    return (said,) if isinstance(said, Kernel) else tuple(said)


def one_pass(name: str, tensors: Sequence[Shape]) -> Kernel:
    """A kernel that nobody knows: every tensor argument moves once."""
    widest = max(tensors, key=lambda t: t.nbytes, default=None)
    return Kernel(
        "triton", sum(t.nbytes for t in tensors), 0.0, widest.dtype if widest else "float32", name=name
    )
