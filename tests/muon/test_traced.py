"""Every wrapper of a Triton kernel inside torch.compile(fullgraph=True): real Dynamo, the numbers of eager.

Kernels run in Triton's interpreter on CPU tensors, behind the ops that a graph holds. A second set of tests
traces the branches that only a GPU takes, with fake CUDA tensors.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from leanstep.muon import momentum_polar, polar, reference, state, transpose_add, transpose_copy

kernel = pytest.importorskip("leanstep.muon.kernel")
pytestmark = pytest.mark.interpreter
TILES = (32, 32, 32)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[False, True], ids=["torch", "kernels"])
def fused(request, monkeypatch):
    """Select whether a CPU runs the passes of a GPU."""
    monkeypatch.setattr(state, "FUSED_DEVICES", ("cuda", "cpu") if request.param else ("cuda",))


def traced(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


LAYOUTS = {
    "contiguous": lambda rows, cols: torch.randn(rows, cols),
    "transposed": lambda rows, cols: torch.randn(cols, rows).T,
    "padded rows": lambda rows, cols: torch.randn(rows, cols + 3)[:, :cols],
    "strided": lambda rows, cols: torch.randn(2 * rows, 3 * cols)[::2, ::3],
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@layouts
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_symmetric_products(layout, turned):
    x = LAYOUTS[layout](33, 41)
    spd = x[:, :33] @ x[:, :33].T

    def products(x, spd, outs):
        x = x + 0.0 if layout == "contiguous" else x
        kernel.xxt(x, outs[0], tiles=TILES)
        kernel.xtx(x, outs[1], tiles=TILES)
        kernel.ba_caa(spd, outs[2], 0.5, -2.8, tiles=TILES)
        return [out + 0.0 for out in outs]

    def outs():
        tensors = [torch.empty(side, side) for side in (33, 41, 33)]
        return [out.T for out in tensors] if turned else tensors

    eager, compiled = products(x, spd, first := outs()), traced(products)(x, spd, second := outs())
    truths = (x @ x.T, x.T @ x, -2.8 * spd + 0.5 * spd @ spd)
    for got, same, out, compiled_out, truth in zip(eager, compiled, first, second, truths, strict=True):
        assert torch.equal(got, same) and torch.equal(got, out) and torch.equal(got, compiled_out)
        torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max()))


@layouts
@pytest.mark.parametrize("target", ["contiguous", "transposed", "padded rows"])
@pytest.mark.parametrize("wrapper", ["kernel", "public", "public triton"])
def test_transposes(layout, target, wrapper):
    src, dst = LAYOUTS[layout](35, 70), LAYOUTS[target](70, 35)
    more = {"impl": "triton"} if wrapper == "public triton" else {}
    copy, add = (
        (kernel.transpose_copy, kernel.transpose_add)
        if wrapper == "kernel"
        else (transpose_copy, transpose_add)
    )

    def both(src, dst):
        copy(src * 2.0, dst, **more)
        add(src, dst, **more)
        return dst.sum()

    expected = 3 * src.T
    for function in (both, traced(both)):
        got = dst.clone() if target == "contiguous" else torch.empty_like(dst).copy_(dst)
        assert torch.equal(function(src, got), got.sum())
        torch.testing.assert_close(got, expected)


def test_a_transpose_of_any_length_is_one_graph():
    torch._dynamo.utils.counters.clear()
    compiled = traced(lambda src, dst: transpose_add(src, dst, impl="triton"), dynamic=True)
    for rows in range(2, 20):
        src, dst = torch.randn(rows, 9), torch.zeros(9, rows)
        compiled(src, dst)
        assert torch.equal(dst, src.T)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@layouts
@pytest.mark.parametrize("options", [{}, {"method": "gram", "restart": 2}, {"restart": None, "panels": 2}])
def test_polar(layout, options):
    update = LAYOUTS[layout](40, 24)
    function = lambda x: polar(2.0 * x, compute_dtype=torch.float32, **options) + 1.0  # noqa: E731
    assert torch.equal(traced(function)(update), function(update))
    batch = torch.stack([update, -update])
    assert torch.equal(traced(function)(batch), function(batch))


@layouts
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_and_polar(layout, nesterov, fused):
    grad, start = LAYOUTS[layout](40, 24), LAYOUTS[layout](40, 24)
    results = []
    for function in (momentum_polar, traced(momentum_polar)):
        buffer = torch.empty_like(start).copy_(start)
        factor = function(grad, buffer, 0.9, nesterov=nesterov, compute_dtype=torch.float32)
        results.append((factor, buffer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    factor, buffer = results[0]
    update, advanced = reference.nesterov(grad.double(), start.double(), 0.9)
    truth = reference.polar(update if nesterov else advanced)
    torch.testing.assert_close(buffer.double(), advanced, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(factor.double(), truth, rtol=1e-3, atol=1e-4)


def test_momentum_and_polar_of_a_bank_and_of_nothing(fused):
    grad, start = torch.randn(3, 20, 33), torch.randn(3, 20, 33)
    together = start.clone()
    factor = momentum_polar(grad, together, compute_dtype=torch.float32)
    for i in range(3):
        buffer = start[i].clone()
        one = momentum_polar(grad[i], buffer, compute_dtype=torch.float32)
        torch.testing.assert_close(factor[i], one, rtol=1e-4, atol=1e-5)
        assert torch.equal(together[i], buffer)
    assert momentum_polar(torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 4)


def test_momentum_and_polar_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"grad: expected a floating-point tensor \[R, C\]"):
        momentum_polar(torch.randn(3), torch.randn(3))
    with pytest.raises(ValueError, match=r"momentum_buffer: expected torch.float32 \(3, 4\), got"):
        momentum_polar(torch.randn(3, 4), torch.randn(4, 3))
    with pytest.raises(ValueError, match="eps_mode: expected one of"):
        momentum_polar(torch.randn(3, 4), torch.randn(3, 4), eps_mode="none")


GPU_CALLS = {
    "xxt": lambda x, y: kernel.xxt(x, x.new_empty(64, 64)),
    "xtx": lambda x, y: kernel.xtx(x, x.new_empty(32, 32)),
    "ba_caa": lambda x, y: kernel.ba_caa(y, y.new_empty(32, 32), 0.5, 2.0),
    "transpose_copy of the kernel": lambda x, y: kernel.transpose_copy(x, x.new_empty(32, 64)),
    "transpose_add of the kernel": lambda x, y: kernel.transpose_add(x, x.new_zeros(32, 64)),
    "transpose_copy": lambda x, y: transpose_copy(x),
    "transpose_add": lambda x, y: transpose_add(x, x.new_zeros(32, 64)),
    "polar": lambda x, y: polar(x),
    "momentum_polar": lambda x, y: momentum_polar(x, x.new_zeros(64, 32, dtype=torch.float32)),
}


@pytest.mark.parametrize("name", GPU_CALLS)
def test_the_branch_of_a_gpu_traces(name, monkeypatch):
    """Fake CUDA tensors: what Dynamo sees of a GPU's branch, without the GPU."""
    # Dynamo does not trace the suite's own new_empty.
    monkeypatch.undo()
    nodes = []

    def backend(graph, _inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with FakeTensorMode():
        x = torch.empty(64, 32, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(32, 32, device="cuda", dtype=torch.bfloat16)
        torch.compile(GPU_CALLS[name], fullgraph=True, backend=backend)(x, y)
    assert any(node.startswith("leanstep.") for node in nodes), nodes


def test_the_ops_are_registered_as_torch_wants_them(fused):
    ops = torch.ops.leanstep
    x, square = torch.randn(17, 9), torch.randn(9, 9)
    triples = [3.4445, -4.775, 2.0315] * 2
    samples = [
        (ops.symmetric_product.default, (x, torch.zeros(17, 17), "xxt", list(TILES), 1.0, 0.0)),
        (ops.symmetric_product.default, (x.T, torch.zeros(17, 17).T, "xtx", list(TILES), 1.0, 0.0)),
        (ops.symmetric_product.default, (square @ square.T, square.clone(), "ba_caa", [], 0.5, 2.0)),
        (ops.transpose_tiles.default, (x, torch.zeros(9, 17), True)),
        (ops.transpose_tiles.default, (x.T, torch.zeros(17, 9), False)),
        (ops.transpose.default, (x, torch.zeros(9, 17), True)),
        (ops.polar.default, (x, triples, "relative", "auto", -1, -1, torch.float32)),
        (ops.polar.default, (x.T, triples, "absolute", "gram", 1, 2, None)),
        (ops.momentum_polar.default, (x, torch.zeros(17, 9), 0.9, True, triples, "relative", torch.float32)),
        (ops.momentum_polar.default, (x.T, torch.zeros(17, 9).T, 0.9, False, triples, "relative", None)),
    ]
    for op, arguments in samples:
        torch.library.opcheck(op, arguments)
