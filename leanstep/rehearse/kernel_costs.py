"""The kernels of one call below autograd, as `Kernel` records: from shapes alone, without device or torch.

The same function serves the rehearsal (fake tensors) and the calibration (shapes read from traces).
A Triton kernel is priced by a registered cost function, else as one pass over its tensor arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from leanstep.flops import MATMULS, attention_flops, convolution_flops, matmul_sizes, operand_type
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
        """Bytes that must be read from memory: an expanded dimension is read once."""
        return self.width * math.prod(n for n, s in zip(self.size, self.stride, strict=True) if s != 0)


def alignment(*pairs: tuple[int, int]) -> int:
    """Return the largest of 16, 8, 4, 2 bytes that divides every (elements, bytes per element)."""
    worst = min((math.gcd(n * width, 16) for n, width in pairs), default=16)
    return max(2, worst)


# Bytes of one load from memory.
_SECTOR_BYTES = 32
# Copies into these dtypes that have a vectorised kernel of their own; other casts go element by element.
_NARROWING = {("float32", "bfloat16"), ("float32", "float16")}

# No kernel: views, metadata, uninitialized memory. The call costs host time only.
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
# Product -> positions of the two factors. A matrix times a vector is priced as a reduction.
GEMM = {name: at for name, at in MATMULS.items() if name not in ("mv", "addmv", "addbmm", "linear")}
GEMM |= {"_int_mm": (0, 1), "_grouped_mm": (0, 1)}
FILL = frozenset(
    "zeros zero_ fill_ full zeros_like ones_like full_like new_zeros new_full new_ones ones arange "
    "normal_ uniform_ randn rand randint bernoulli_ scalar_tensor random_ exponential_ eye linspace "
    "randperm rand_like randn_like trunc_normal_ zero fill tril_indices triu_indices log_normal_ "
    "cauchy_ geometric_".split()
)
GATHER = frozenset(
    "embedding index_select gather index take masked_select nonzero _unsafe_index take_along_dim".split()
)
SCATTER = frozenset(
    "index_add index_add_ scatter_add scatter_add_ index_put index_put_ _index_put_impl_ scatter scatter_ "
    "index_copy_ index_copy _unsafe_index_put scatter_reduce scatter_reduce_ select_scatter slice_scatter "
    "masked_scatter masked_scatter_".split()
)
SOFTMAX = frozenset(
    "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data logsumexp".split()
)
ROW_NORM = frozenset(
    "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward".split()
)
REDUCE = frozenset(
    "sum mean amax amin aminmax max min argmax argmin var var_mean std std_mean linalg_vector_norm norm "
    "prod any all cumsum cumprod logcumsumexp sort topk multinomial count_nonzero mv addmv dot vdot "
    "nansum bincount histc searchsorted bucketize median kthvalue _unique2 unique_dim "
    "unique_consecutive isin".split()
)
# Slots per address of an embedded element: divisions by the row length, in 64 bits. Liger's rows on
# A100 (torch 2.4) take 3.5, rows of H100 traces 2.4 to 3.1. torch since 2.8 may load aligned rows as vectors.
_EMBEDDED = 3.0
# Rows that a thread of embedding backward sums into one part, and slots per element of its loop.
_ROWS_PER_PART, _PART_ELEMENT = 10, 2.5
# Multiplications of a 3 x 3 filter that tiles of 4 x 4 results save, transforms included.
_WINOGRAD = 1.5
# Out of place: the first argument is copied, then updated in place.
COPIED_FIRST = frozenset(("masked_fill", "index_fill"))
MULTI_TENSOR = ("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")


class Call(NamedTuple):
    """One ATen call: its name without namespace and overload, device tensors in the order of the schema."""

    name: str
    ins: Sequence[Shape]
    outs: Sequence[Shape]
    info: Mapping[str, Any]

    @property
    def read(self) -> int:
        return sum(t.nbytes for t in self.ins)

    @property
    def written(self) -> int:
        return sum(t.nbytes for t in self.outs)

    @property
    def dtype(self) -> str:
        return self.outs[0].dtype if self.outs else self.ins[0].dtype

    @property
    def backward(self) -> bool:
        return "backward" in self.name


def kernels(
    name: str, ins: Sequence[Shape], outs: Sequence[Shape], info: Mapping[str, Any] | None = None
) -> list[Kernel]:
    """Return the kernels of one ATen call.

    Args:
        name: without namespace and overload: "mm", "add_", "_foreach_mul".
        ins, outs: device tensors that it reads and writes, in the order of the schema.
        info: what shapes cannot tell: causal, lists (tensor lists among the arguments), layout ("bthd"),
            beta (of addmm), tf32 (fp32 products may use it), accumulate (of index_put), out_size (of conv),
            dim (of softmax; the last one without it), windows (of a pool, that hold an element), traced (the
            call ran on a device under this name).
    """
    if name in FREE or not (ins or outs):
        return []
    return _cost_of(name)(Call(name, ins, outs, info or {}))


def _cost_of(name: str) -> Callable[[Call], list[Kernel]]:
    exact = _ATEN_COSTS.get(name)
    if exact is not None:
        return exact
    for part, cost in _ATEN_COSTS_BY_PART.items():
        if part in name:
            return cost
    return _multi_tensor if name.startswith(MULTI_TENSOR) else _pointwise


# Products


def _gemm(call: Call) -> list[Kernel]:
    first, second = GEMM[call.name]
    a, b = call.ins[first], call.ins[second]
    sizes = matmul_sizes(call.name, a.size, b.size)
    batch, m, k, n = sizes
    width = call.outs[0].width if call.outs else a.width
    moved = a.numel * a.width + b.numel * b.width + batch * m * n * width
    # A matrix to add to, not a bias row.
    if first == 1 and len(call.ins[0].size) >= 2 and call.info.get("beta", 1) != 0:
        moved += call.ins[0].nbytes
    leading = [(max(t.stride[-2:]) if min(t.size[-2:]) > 1 else max(t.size[-2:]), t.width) for t in (a, b)]
    # A product may be written to rows that are longer than n (`out=`).
    out = call.outs[0] if call.outs and len(call.outs[0].size) > 1 and m > 1 else None
    leading.append((n if out is None else max(out.stride[-2:]), width))
    return [
        Kernel(
            "gemm",
            moved,
            float(sizes.flops),
            operand_type(a.dtype, call.info.get("tf32", False)),
            (batch, m, n, k),
            alignment=alignment(*leading) if n > 8 and m > 8 else 16,
        )
    ]


def attention_kernel(
    q: Shape, k: Shape, *, backward: bool, share: float = 1.0, variant: str = "", layout: str = "bhtd"
) -> Kernel:
    """Price a fused attention kernel: it moves q, k, v and o, never T x S.

    Args:
        q, k: [B, H, T, D] (layout "bhtd"), [B, T, H, D] ("bthd") or [tokens, H, D] ("thd", packed documents).
        share: part of the T x S scores that is computed: 0.5 for causal, the density of a block mask.
        variant: "" (FlashAttention 2, flex), "efficient" (xformers') or "hopper" (FlashAttention 3).
    """
    if layout == "thd":
        batch, (t, heads, d), s = 1, q.size, k.size[0]
    elif layout == "bthd":
        (batch, t, heads, d), s = q.size, k.size[1]
    else:
        (batch, heads, t, d), s = q.size, k.size[2]
    # Backward: q, k, v, o, do and three gradients, dq by way of fp32.
    moved = (q.nbytes + k.nbytes) * (4.5 if backward else 2)
    flops = attention_flops(batch * heads * t * s * share, d, d, backward=backward)
    return Kernel(
        ("attention_bwd" if backward else "attention") + (f"_{variant}" if variant else ""),
        moved,
        flops.model + flops.repeated,
        q.dtype,
        (batch * heads, t, s, d),
        repeated=flops.repeated,
    )


def _attention(call: Call) -> list[Kernel]:
    q, k = call.ins[1:3] if call.backward else call.ins[:2]
    layout = call.info.get("layout") or ("thd" if len(q.size) == 3 else "bhtd")
    rows = {"bhtd": 2, "bthd": 1, "thd": 0}[layout]
    share = 0.5 if call.info.get("causal") and q.size[rows] == k.size[rows] else 1.0
    variant = "" if "flash" in call.name or "cudnn" in call.name else "efficient"
    return [attention_kernel(q, k, backward=call.backward, share=share, variant=variant, layout=layout)]


def _convolution(call: Call) -> list[Kernel]:
    """Implicit GEMM; backward is one for the data (not in the first layer) and one for the weight.

    Matrix units need channels last: tensors in NCHW order are transposed before and after. In fp32 nothing is
    transposed, and a 3 x 3 filter of stride 1 takes fewer multiplications (Winograd) for result and data.
    """
    ins, outs = call.ins, call.outs
    backward = call.name == "convolution_backward"
    x, w = (ins[1], ins[2]) if backward else (ins[0], ins[1])
    y = ins[0] if backward else outs[0] if outs else None
    size = y.size if y is not None else call.info.get("out_size") or (x.size[0], w.size[0], *x.size[2:])
    result_bytes = math.prod(size) * (y.width if y is not None else x.width)
    groups = max(1, x.size[1] // max(1, w.size[1]))
    rows = math.prod(size) // max(1, size[1])
    taps, channels = w.numel // max(1, w.size[0]), w.size[0] // groups
    moved = x.nbytes + w.nbytes + result_bytes
    flops = float(convolution_flops(rows * w.size[0], w.size))
    dtype = operand_type(x.dtype, call.info.get("conv_tf32", False))
    on_matrix_units = dtype not in ("float32", "float64")
    winograd = not on_matrix_units and w.size[2:] == (3, 3) and size[2:] == x.size[2:]
    multiplied = round(rows / _WINOGRAD) if winograd else rows
    convolutions = [Kernel("conv", moved, flops, dtype, (groups, multiplied, channels, taps))]
    if backward:
        of_weight = Kernel("conv", moved, flops, dtype, (groups, channels, taps, rows))
        of_data = Kernel("conv", moved, flops, dtype, (groups, multiplied, taps, channels))
        convolutions = [of_weight] if x.size[1] <= 4 else [of_data, of_weight]
    channels_last = len(x.stride) > 2 and x.stride[1] == 1 and x.size[1] > 1
    if on_matrix_units and not channels_last:
        # Per product: input, filter, result, and a result to clear.
        transposed, launches = len(convolutions) * moved, 4 * len(convolutions)
        elements = transposed / x.width
        convolutions.append(
            Kernel("strided", 2 * transposed, 0.0, x.dtype, launches=launches, elements=elements)
        )
    return convolutions


# Several tensors, indices


def _multi_tensor(call: Call) -> list[Kernel]:
    """One pass over all tensors of a _foreach_ call or a fused optimizer."""
    tensors = max(1, len(call.ins) // max(1, call.info.get("lists", 1)))
    lead = call.ins[:tensors] or call.outs
    chunks = sum(-(-t.numel // CHUNK_ELEMENTS) for t in lead)
    launches = max(1, -(-chunks // CHUNKS_PER_LAUNCH), -(-tensors // TENSORS_PER_LAUNCH))
    return [Kernel("multi", call.read + call.written, 0.0, lead[0].dtype, (), launches)]


def _fill(call: Call) -> list[Kernel]:
    return [Kernel("fill", call.written or call.read, 0.0, call.dtype)]


def _gather(call: Call) -> list[Kernel]:
    """Only the selected elements are read, as many as are written, and the indices."""
    divided = _EMBEDDED if call.name == "embedding" else 1.8
    ins, outs = call.ins, call.outs
    indices = sum(t.nbytes for t in ins if t.dtype.startswith(("int", "bool")))
    selected = outs[0].nbytes if outs else 0
    row = outs[0].size[-1] if outs and outs[0].size else 1
    return [
        Kernel(
            "gather",
            2 * selected + indices,
            0.0,
            call.dtype,
            alignment=alignment((row, ins[0].width)),
            elements=divided * selected / max(1, ins[0].width),
        )
    ]


def _scatter(call: Call) -> list[Kernel]:
    ins = call.ins
    floats = [t.nbytes for t in ins[1:] if not t.dtype.startswith("int")]
    source = max(floats, default=0) or sum(t.nbytes for t in ins[1:])
    copied = 0 if call.name.endswith("_") else 2 * ins[0].nbytes
    if not call.info.get("accumulate"):
        return [Kernel("scatter", 3 * source + copied, 0.0, call.dtype)]
    # Sorted first, so that equal indices add up in a fixed order.
    indices = sum(t.numel for t in ins[1:] if t.dtype.startswith("int"))
    return [Kernel("scatter", 3 * source + copied + 24 * indices, 0.0, call.dtype, (), 6)]


def _embedding_backward(call: Call) -> list[Kernel]:
    """Zeros, a sort of the indices, sums over parts of equal indices, and sums over these parts."""
    gradient, rows = call.ins[0], max(1, call.ins[1].numel)
    width, table = max(1, gradient.numel // rows), call.outs[0].size[0] if call.outs else rows
    distinct = table * -math.expm1(-rows / max(1, table))  # of random indices
    parts = distinct + rows / _ROWS_PER_PART
    moved = gradient.nbytes + 24 * rows + 8 * parts * width
    elements = _PART_ELEMENT * (rows + parts) * width
    return [
        Kernel("fill", call.written, 0.0, call.dtype),
        Kernel("scatter", moved, 0.0, call.dtype, (), 5, elements=elements),
    ]


def _nll_loss(call: Call) -> list[Kernel]:
    """One element per target. One warp computes the mean or sum over a list of targets."""
    ins = call.ins
    rows = ins[1].numel if len(ins) > 1 else 1
    moved = rows * (8 + ins[0].width)
    is_list = call.name == "nll_loss_forward" and bool(call.outs) and call.outs[0].numel == 1
    if is_list and rows > 1:
        return [Kernel("one_warp", moved, 0.0, call.dtype, (rows,))]
    return [Kernel("gather", moved, 0.0, call.dtype, elements=1.8 * rows)]


def _nll_loss_backward(call: Call) -> list[Kernel]:
    """Zeros, then one element per target."""
    ins = call.ins
    rows = ins[2].numel if len(ins) > 2 else 1
    return [
        Kernel("fill", call.written, 0.0, call.dtype),
        Kernel("scatter", rows * (8 + ins[1].width), 0.0, call.dtype),
    ]


# Rows


def _softmax(call: Call) -> list[Kernel]:
    x = call.ins[0]
    length = max(1, x.size[call.info.get("dim", -1)] if x.size else 1)
    sizes = (max(1, x.numel // length), length)
    aligned = alignment((length, x.width))
    return [Kernel("softmax", call.read + call.written, 0.0, x.dtype, sizes, alignment=aligned)]


def _reduce(call: Call) -> list[Kernel]:
    passes = {"sort": 8, "topk": 3, "median": 8, "kthvalue": 3, "_unique2": 8}.get(call.name, 1)
    read, results = call.read, max(1, call.outs[0].numel if call.outs else 1)
    if passes == 1 and call.ins and call.ins[0].numel // results > CHUNK_ELEMENTS:
        passes, read = 2, read / 2  # few long sums: a second stage adds up the blocks' parts
    return [Kernel("reduce", passes * read + call.written, 0.0, call.dtype, launches=passes)]


# Normalisations: sizes = (blocks, elements that one block reads in turn, over all its passes).


def _normalized(call: Call) -> Shape:
    """The input of the layer, in forward and backward."""
    return call.ins[1] if call.backward and len(call.ins) > 1 else call.ins[0]


def _batch_norm(call: Call) -> list[Kernel]:
    x = _normalized(call)
    channels = x.size[1] if len(x.size) > 1 else 1
    each = x.numel // max(1, channels)
    # cuDNN spreads a channel over many blocks. torch's own kernels (bf16) have one block per channel and one
    # element per thread and iteration; MIOpen takes four.
    own, miopen = x.dtype == "bfloat16" or call.info.get("traced", False), "miopen" in call.name
    length = each * (2 if call.backward else 1) // (4 if miopen else 1)
    sizes = (channels, max(1, length)) if own or miopen else ()
    launches = 3 if own and not (miopen or call.backward) else 1
    # Statistics first, then a second pass over the input.
    moved = call.read + call.written + x.nbytes
    return [Kernel("batch_norm", moved, 0.0, x.dtype, sizes, launches)]


def _group_norm(call: Call) -> list[Kernel]:
    x = _normalized(call)
    statistics = next((t for t in call.ins[2:] if len(t.size) == 2), None) if call.backward else None
    if statistics:
        rows = statistics.numel
    else:
        rows = x.size[0] * 32 if x.numel > x.size[0] * 32 else 1
    scaled = any(len(t.size) == 1 for t in _row_weights(call, x))
    launches = 3 + 2 * scaled if call.backward else 2 + scaled
    # One element per thread and iteration, where a row's norm takes four.
    return [_norm_kernel(call, x, max(1, rows), launches, slower=4)]


def _row_norm(call: Call) -> list[Kernel]:
    """Layer norm and RMS norm."""
    x = _normalized(call)
    statistics = [
        t for t in call.ins[2:] if call.backward and len(t.size) == len(x.size) and t.numel < x.numel
    ]
    inner = max((t.numel for t in _row_weights(call, x) if t not in statistics), default=0)
    if statistics:
        rows = statistics[0].numel
    elif inner:
        rows = x.numel // inner
    elif len(call.outs) > 1:
        rows = call.outs[-1].numel
    else:
        rows = x.numel // max(1, x.size[-1] if x.size else 1)
    norms = [_norm_kernel(call, x, max(1, rows))]
    if call.backward and inner:  # the weight's gradient sums over rows in a kernel of its own
        launches = 2 if "rms" in call.name else 1
        norms.append(Kernel("norm", 2 * x.nbytes, 0.0, x.dtype, launches=launches))
    return norms


def _row_weights(call: Call, x: Shape) -> list[Shape]:
    return [t for t in call.ins[1:] if 1 < t.numel < x.numel]


def _norm_kernel(call: Call, x: Shape, rows: int, launches: int = 1, slower: int = 1) -> Kernel:
    passes = 4 if call.backward else 2
    sizes = (rows, slower * passes * x.numel // rows)
    # Statistics first, then the operands again: the cache has about two thirds of them.
    again = 0.33 * x.nbytes * (2 if call.backward else 1)
    return Kernel("norm", call.read + call.written + again, 0.0, x.dtype, sizes, launches)


# Elementwise


class Access(NamedTuple):
    """How a pass addresses its operands.

    elements: of the largest operand. dimensions: left after merging neighbours that every operand reads
    without a gap. broadcasts: an operand is smaller. wasted_bytes: of sectors that a thread uses in part.
    """

    elements: int
    dimensions: int
    broadcasts: bool
    wasted_bytes: float


def _pointwise(call: Call) -> list[Kernel]:
    """One pass.

    Gapless operands of one size and dtype move 16 bytes per thread; all else computes addresses. `elements`
    is weighted by the dimensions that are left after merging neighbours: each costs a division.
    """
    moved, tensors = float(call.read + call.written), _arrays(call)
    if not tensors:
        return [Kernel("pointwise", moved, 0.0, call.dtype)]
    access, mixed = _access(tensors, call.outs), _has_mixed_types(tensors)
    if access.dimensions <= 1 and not access.broadcasts and not access.wasted_bytes:
        if mixed and not _narrows(call):
            return [Kernel("cast", moved, 0.0, call.dtype, elements=1.2 * access.elements)]
        return [Kernel("pointwise", moved, 0.0, call.dtype)]
    elements = access.elements * (1 + 0.15 * max(0, access.dimensions - 2)) * (1.2 if mixed else 1.0)
    kind = "broadcast" if access.broadcasts and not access.wasted_bytes else "strided"
    return [Kernel(kind, moved + access.wasted_bytes, 0.0, call.dtype, elements=elements)]


def _copied_first(call: Call) -> list[Kernel]:
    if not (call.ins and call.outs):
        return _pointwise(call)
    copy = Call("copy_", call.ins[:1], call.outs[:1], call.info)
    change = call._replace(ins=[call.outs[0], *call.ins[1:]])
    return _pointwise(copy) + _pointwise(change)


def _pool(call: Call) -> list[Kernel]:
    """Every window reads its inputs, every input its windows: 2.25 windows for 3 x 3 with stride 2."""
    tensors = _arrays(call)
    if not tensors:
        return _pointwise(call)
    visits = call.info.get("windows") or 2.25
    elements = visits * (1.78 if call.backward else 1.0) * max(t.numel for t in tensors)
    return [Kernel("strided", float(call.read + call.written), 0.0, call.dtype, elements=elements)]


def _cat(call: Call) -> list[Kernel]:
    if not _arrays(call):
        return _pointwise(call)
    elements = 1.8 * (sum(t.numel for t in call.outs) or sum(t.numel for t in call.ins))
    return [Kernel("broadcast", float(call.read + call.written), 0.0, call.dtype, elements=elements)]


def _arrays(call: Call) -> list[Shape]:
    """Return the operands with more than one element."""
    return [t for t in (*call.ins, *call.outs) if t.numel > 1]


def _access(tensors: Sequence[Shape], outs: Sequence[Shape]) -> Access:
    size = max((t.size for t in tensors), key=math.prod)
    count = math.prod(size)
    strides = [_expanded(t, size) for t in tensors]
    lead = strides[-1] if outs and outs[-1].numel == count else strides[0]
    order = sorted((i for i, n in enumerate(size) if n > 1), key=lambda i: (-lead[i], i))
    wasted = 0.0
    for tensor, stride in zip(tensors, strides, strict=True):
        # Neighbouring threads load from different sectors; the cache serves most of them again.
        if order and tensor.numel == count and stride[order[-1]] > 1:
            wasted += tensor.nbytes * max(0.0, _SECTOR_BYTES / tensor.width / 2.5 - 1)
    broadcasts = any(t.numel < count for t in tensors)
    return Access(count, _dimensions_left(size, strides, order), broadcasts, wasted)


def _has_mixed_types(tensors: Sequence[Shape]) -> bool:
    floats = {t.dtype for t in tensors if "float" in t.dtype}
    return len(floats) > 1 or (bool(floats) and any(t.dtype.startswith("int") for t in tensors))


def _narrows(call: Call) -> bool:
    one_each = len(call.ins) == 1 and len(call.outs) == 1
    return one_each and (call.ins[0].dtype, call.outs[0].dtype) in _NARROWING


def _expanded(tensor: Shape, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides over the common size: 0 along dimensions that the tensor lacks or repeats."""
    missing = len(size) - len(tensor.size)
    if missing < 0 or any(n not in (1, m) for n, m in zip(tensor.size, size[missing:], strict=True)):
        # Not broadcast against each other (a reshaping copy): as if in order.
        return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    own = tuple(0 if n == 1 else s for n, s in zip(tensor.size, tensor.stride, strict=True))
    return (0,) * missing + own


def _dimensions_left(size: tuple[int, ...], strides: Sequence[tuple[int, ...]], order: Sequence[int]) -> int:
    """Return the dimensions left after merging neighbours that every operand reads without a gap."""
    left = 0
    for i, j in zip(order, (*order[1:], None), strict=True):
        if j is None or any(stride[i] != stride[j] * size[j] for stride in strides):
            left += 1
    gapped = bool(order) and any(stride[order[-1]] > 1 for stride in strides)
    return max(left, 2) if gapped else left


_ATEN_COSTS: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(GEMM, _gemm),
    **dict.fromkeys(SCATTER, _scatter),
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "nll_loss2d_backward": _nll_loss_backward,
    **dict.fromkeys(SOFTMAX, _softmax),
    **dict.fromkeys(ROW_NORM, _row_norm),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm,
    **dict.fromkeys(FILL, _fill),
    **dict.fromkeys(GATHER, _gather),
    **dict.fromkeys(REDUCE, _reduce),
    **dict.fromkeys(COPIED_FIRST, _copied_first),
    "cat": _cat,
    "stack": _cat,
}
# Families whose many members share a part of their names.
_ATEN_COSTS_BY_PART: dict[str, Callable[[Call], list[Kernel]]] = {
    "attention": _attention,
    "convolution": _convolution,
    "batch_norm": _batch_norm,
    "pool": _pool,
}


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


def has_cost(name: str) -> bool:
    """Whether a cost is registered under this name."""
    return name in _costs


def registered_cost(name: str, arguments: Mapping[str, Any]) -> tuple[Kernel, ...] | None:
    """Return the kernels that the registered function computes for this launch; None if there is none."""
    cost = _costs.get(name)
    said = None if cost is None else cost(arguments)
    if said is None:
        return None
    return (said,) if isinstance(said, Kernel) else tuple(said)


def one_pass(name: str, tensors: Sequence[Shape]) -> Kernel:
    """Price an unknown kernel: every tensor argument is read or written once."""
    widest = max(tensors, key=lambda t: t.nbytes, default=None)
    return Kernel(
        "triton", sum(t.nbytes for t in tensors), 0.0, widest.dtype if widest else "float32", name=name
    )
