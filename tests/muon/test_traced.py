"""Products, polar factor, momentum and a whole step in torch.compile(fullgraph=True): the numbers of eager.

Kernels run in Triton's interpreter on CPU tensors, behind the ops that a graph holds. A second set of tests
traces the branches that only a GPU takes, with fake CUDA tensors.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from leanstep.muon import momentum_polar, polar, reference, transpose_add, transpose_copy
from leanstep.muon import step as page

kernel = pytest.importorskip("leanstep.muon.kernel")
pytestmark = pytest.mark.interpreter
TILES = (32, 32, 32)


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    # Dynamo does not trace the suite's own new_empty.
    monkeypatch.undo()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def traced(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


LAYOUTS = {
    "contiguous": lambda rows, cols: torch.randn(rows, cols),
    "transposed": lambda rows, cols: torch.randn(cols, rows).T,
    "padded rows": lambda rows, cols: torch.randn(rows, cols + 3)[:, :cols],
    "strided": lambda rows, cols: torch.randn(2 * rows, 3 * cols)[::2, ::3],
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
# Functions that call the kernels, which are traced in every layout.
two_layouts = pytest.mark.parametrize("layout", ["contiguous", "strided"])


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
@pytest.mark.parametrize("wrapper", ["kernel", "public"])
def test_transposes(layout, target, wrapper):
    src, dst = LAYOUTS[layout](35, 70), LAYOUTS[target](70, 35)
    own = (kernel.transpose_copy, kernel.transpose_add)
    copy, add = own if wrapper == "kernel" else (transpose_copy, transpose_add)

    def both(src, dst):
        copy(src * 2.0, dst)
        add(src, dst)
        return dst.sum()

    expected = 3 * src.T
    for function in (both, traced(both)):
        got = dst.clone() if target == "contiguous" else torch.empty_like(dst).copy_(dst)
        assert torch.equal(function(src, got), got.sum())
        torch.testing.assert_close(got, expected)


def test_a_transpose_of_any_length_is_one_graph():
    torch._dynamo.utils.counters.clear()
    compiled = traced(lambda src, dst: kernel.transpose_add(src, dst), dynamic=True)
    for rows in range(2, 20):
        src, dst = torch.randn(rows, 9), torch.zeros(9, rows)
        compiled(src, dst)
        assert torch.equal(dst, src.T)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@two_layouts
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_and_polar(layout, nesterov):
    grad, start = LAYOUTS[layout](40, 24), LAYOUTS[layout](40, 24)
    results = []
    for function in (momentum_polar, traced(momentum_polar)):
        buffer = torch.empty_like(start).copy_(start)
        factor = function(grad, buffer, 0.9, nesterov=nesterov, compute_dtype=torch.float32)
        results.append((factor, buffer))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)
    factor, buffer = results[0]
    update, advanced = reference.nesterov(grad.double(), start.double(), 0.9)
    truth = reference.polar(update if nesterov else advanced)
    torch.testing.assert_close(buffer.double(), advanced, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(factor.double(), truth, rtol=1e-3, atol=1e-4)


def test_momentum_and_polar_of_a_bank_and_of_nothing():
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


NUMBERS = {"rate": 0.02, "decay": 0.1, "momentum": 0.9, "beta2": 0.95}
OPTIONS = {
    "nesterov": True, "variance": "long", "cautious": True, "mode": "nearest", "dtype": torch.float32,
    "eps_mode": "relative", "coefficients": reference.POLAR_EXPRESS,
}  # fmt: skip


@pytest.mark.parametrize("go", [None, 1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"variance": "off"}, {"cautious": False, "eps_mode": "absolute"}])
def test_the_whole_step_is_one_graph(go, dtype, changes):
    """As on a GPU: numbers are tensors, and the device decides whether anything changes."""
    rows, cols = 20, 33

    def tensors():
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        weights = [draw(2, rows, cols).to(dtype), draw(1, rows, cols).to(dtype)]
        grads, momenta = ([draw(*w.shape) for w in weights] for _ in range(2))
        if go == 0:
            grads[1][0, 3, 3] = torch.nan
        seconds = [None if changes.get("variance") == "off" else draw(len(w), 1, cols).abs() for w in weights]
        residuals = [
            torch.zeros(w.shape, dtype=torch.int16) if dtype == torch.bfloat16 else None for w in weights
        ]
        return weights, grads, momenta, seconds, residuals, [torch.tensor([1.0, 2.0]).view(2, 1, 1), None]

    options = {**OPTIONS, **changes}
    eager, compiled, untouched = tensors(), tensors(), tensors()
    page.step_matrices(*eager, None, **NUMBERS, **options)
    numbers = {key: torch.tensor(value) for key, value in NUMBERS.items()}
    device_go = None if go is None else torch.tensor(go)
    traced(torch.no_grad()(page.step_matrices))(*compiled, device_go, **numbers, **options)
    for got, want in zip(compiled, untouched if go == 0 else eager, strict=True):
        for a, b in zip(got, want, strict=True):
            # Low bits are compared with the weight that they complete.
            if a is not None and a.dtype != torch.int16:
                torch.testing.assert_close(
                    a, b, atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, equal_nan=True
                )


@pytest.mark.parametrize("go", [None, 1.0, 0.0])
def test_adam_is_one_graph(go):
    def tensors():
        generator = torch.Generator().manual_seed(0)
        shapes = [(5, 7), (9,), ()]
        weights, grads, firsts = ([torch.randn(s, generator=generator) for s in shapes] for _ in range(3))
        seconds = [torch.rand(s, generator=generator) for s in shapes]
        if go == 0:
            grads[0][0, 0] = torch.inf
        return weights, grads, firsts, seconds, [None] * 3, [torch.tensor(3.0) for _ in shapes]

    options = {"betas": (0.9, 0.99), "eps": 1e-10, "cautious": True, "mode": "nearest"}
    eager, compiled, untouched = tensors(), tensors(), tensors()
    page.step_adam(*eager, None, lr=0.01, decay=0.005, **options)
    numbers = {"lr": torch.tensor(0.01), "decay": torch.tensor(0.005)}
    device_go = None if go is None else torch.tensor(go)
    traced(torch.no_grad()(page.step_adam))(*compiled, device_go, **numbers, **options)
    for got, want in zip(compiled[:4], (untouched if go == 0 else eager)[:4], strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5, equal_nan=True)


GPU_CALLS = {
    "xxt": lambda x, y: kernel.xxt(x, x.new_empty(64, 64)),
    "xtx": lambda x, y: kernel.xtx(x, x.new_empty(32, 32)),
    "ba_caa": lambda x, y: kernel.ba_caa(y, y.new_empty(32, 32), 0.5, 2.0),
    "transpose_copy of the kernel": lambda x, y: kernel.transpose_copy(x, x.new_empty(32, 64)),
    "transpose_add of the kernel": lambda x, y: kernel.transpose_add(x, x.new_zeros(32, 64)),
    "transpose_copy": lambda x, y: transpose_copy(x),
    "transpose_add": lambda x, y: transpose_add(x, x.new_zeros(32, 64)),
    "polar": lambda x, y: polar(x),
}


@pytest.mark.parametrize("name", GPU_CALLS)
def test_the_branch_of_a_gpu_traces(name):
    """Fake CUDA tensors: what Dynamo sees of a GPU's branch, without the GPU."""
    nodes = []

    def backend(graph, _inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with FakeTensorMode():
        x = torch.empty(64, 32, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(32, 32, device="cuda", dtype=torch.bfloat16)
        torch.compile(GPU_CALLS[name], fullgraph=True, backend=backend)(x, y)
    assert any(node.startswith("leanstep.") for node in nodes), nodes


def test_the_ops_are_registered_as_torch_wants_them():
    ops = torch.ops.leanstep
    x, square = torch.randn(17, 9), torch.randn(9, 9)
    samples = [
        (ops.symmetric_product.default, (x, torch.zeros(17, 17), "xxt", list(TILES), 1.0, 0.0)),
        (ops.symmetric_product.default, (x.T, torch.zeros(17, 17).T, "xtx", list(TILES), 1.0, 0.0)),
        (ops.symmetric_product.default, (square @ square.T, square.clone(), "ba_caa", [], 0.5, 2.0)),
        (ops.transpose_tiles.default, (x, torch.zeros(9, 17), True)),
        (ops.transpose_tiles.default, (x.T, torch.zeros(17, 9), False)),
    ]
    for op, arguments in samples:
        torch.library.opcheck(op, arguments)
