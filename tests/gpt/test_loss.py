"""The one-pass head loss against the vectors and the plain formula."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from gpt.golden import array, load
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.gpt import loss
from leanstep.gpt.loss import ahead_targets, head_loss, multiplies_8_bits
from leanstep.gpt.reference import softcap_loss
from leanstep.logprob.engine import tiles

CAP = (23.0, 5.0, 7.5)


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("tile_rows", [1, 5, 100])
def test_vectors(case: int, tile_rows: int):
    golden = load("softcap_mtp")
    c = golden["cases"][case]
    logits = array(c["logits"]).requires_grad_()
    # An identity head makes hidden states and logits the same thing.
    head, targets = torch.eye(logits.shape[1]), torch.tensor(c["targets"])
    loss = head_loss(logits, head, targets, mtp=tuple(c["mtp_weights"]), softcap=CAP, tile_rows=tile_rows)
    want = array(c["losses"]).double().sum()
    assert abs(loss.item() - want) < golden["tolerance"] * len(c["targets"])
    (loss * c["grad_output"]).backward()
    assert (logits.grad - array(c["grad_logits"])).abs().max() < golden["tolerance"]


@pytest.mark.parametrize("vocab", [1, 131, 136])
@pytest.mark.parametrize("softcap", [CAP, None], ids=["cap", "no cap"])
def test_the_route_of_a_gpu_takes_a_vocabulary_that_is_no_multiple_of_8(vocab, softcap, monkeypatch):
    hidden, head = torch.randn(41, 24), torch.randn(vocab, 24)
    targets, mtp = torch.randint(-1, vocab, (41,)), (1.0, 0.5)
    results = []
    for route, dtype in ((("cpu",), torch.float64), ((), torch.float32)):
        monkeypatch.setattr(tiles, "CPU_TYPES", route)
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, head)]
        loss = head_loss(*leaves, targets, mtp=mtp, softcap=softcap, transposed=False, tile_rows=7)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for want, got in zip(*results, strict=True):
        assert (got - want).abs().max() <= 1e-5 * max(float(want.abs().max()), 1.0)


def plain_loss(hidden, head, targets, mtp, softcap, transposed):
    return softcap_loss(hidden @ (head if transposed else head.T), targets, mtp, softcap).sum()


@pytest.mark.parametrize("rows", [0, 1, 2, 41, 401])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("softcap", [CAP, (90.0, 5.0, 7.5), None], ids=["cap", "high cap", "no cap"])
def test_no_further_from_float64_than_the_plain_formula(rows: int, transposed: bool, softcap):
    mtp, vocab, dim = (1.0, 0.5, 0.25), 131, 24
    # Non-contiguous hidden states, and some ignored targets.
    hidden = torch.randn(dim, rows).T
    head = torch.randn((dim, vocab) if transposed else (vocab, dim))
    targets = torch.randint(-1, vocab, (rows,))
    results = []
    for function, dtype in (
        (
            lambda *a: head_loss(*a, mtp=mtp, softcap=softcap, transposed=transposed, tile_rows=7),
            torch.float32,
        ),
        (lambda *a: plain_loss(*a, mtp, softcap, transposed), torch.float32),
        (lambda *a: plain_loss(*a, mtp, softcap, transposed), torch.float64),
    ):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (hidden, head)]
        loss = function(*leaves, targets)
        grads = torch.autograd.grad(loss * 0.37, leaves)
        results.append([loss.detach(), *grads])
    for ours, theirs, want in zip(*results, strict=True):
        scale = want.abs().max() if want.numel() else 0
        error, plain = ((x.double() - want).abs().max() if want.numel() else 0.0 for x in (ours, theirs))
        assert error <= 2 * plain + 5e-7 * scale


def test_docstring_equivalence_and_ignored_targets():
    hidden, head = torch.randn(30, 16), torch.randn(16, 50)
    targets = torch.randint(0, 50, (30,))
    targets[::4] = -1
    a, b, c = CAP
    want = F.cross_entropy(
        a * torch.sigmoid((hidden @ head + b) / c), targets, reduction="sum", ignore_index=-1
    )
    assert torch.allclose(head_loss(hidden, head, targets, softcap=CAP), want, rtol=1e-6)
    hidden.requires_grad_()
    head_loss(hidden, head, targets, softcap=CAP).backward()
    assert (hidden.grad[::4] == 0).all() and (hidden.grad[1] != 0).any()


def test_tile_size_does_not_matter_much_and_repeats_exactly():
    hidden, head, targets = torch.randn(100, 16), torch.randn(16, 50), torch.randint(0, 50, (100,))
    losses = [head_loss(hidden, head, targets, softcap=CAP, tile_rows=n) for n in (1, 33, 100, 1000)]
    assert max(losses) - min(losses) < 1e-5 * losses[0]
    assert torch.equal(losses[1], head_loss(hidden, head, targets, softcap=CAP, tile_rows=33))


def test_gradient_is_exact_in_float64():
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    head = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, -1, 8, 2, 2])
    for softcap in (CAP, None):
        assert torch.autograd.gradcheck(
            lambda h, w, cap=softcap: head_loss(h, w, targets, mtp=(1.0, 0.4), softcap=cap, tile_rows=4),
            (hidden, head),
        )


def test_no_gradient_asked_none_computed():
    hidden, head, targets = torch.randn(50, 16), torch.randn(16, 50), torch.randint(0, 50, (50,))
    with torch.no_grad():
        quiet = head_loss(hidden, head, targets, softcap=CAP)
    assert not quiet.requires_grad
    head.requires_grad_()
    loss = head_loss(hidden, head, targets, softcap=CAP)
    loss.backward()
    assert torch.equal(loss, quiet) and head.grad is not None and hidden.grad is None


class CountProducts(TorchDispatchMode):
    """Multiply-adds of all matrix products."""

    flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.flops += a.shape[0] * a.shape[1] * b.shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("softcap", [CAP, None], ids=["cap", "no cap"])
@pytest.mark.parametrize("tile_rows", [None, 40])
def test_three_products_with_gradients_one_without(softcap, tile_rows):
    hidden, head = torch.randn(100, 16, requires_grad=True), torch.randn(16, 50, requires_grad=True)
    targets = torch.randint(0, 50, (100,))
    for products, mode in ((3, torch.enable_grad()), (1, torch.no_grad())):
        with mode, CountProducts() as count:
            loss = head_loss(hidden, head, targets, mtp=(1.0, 0.5), softcap=softcap, tile_rows=tile_rows)
            if loss.requires_grad:
                loss.backward()
        assert count.flops == products * 100 * 16 * 50


def test_the_heads_gradient_has_its_layout():
    hidden, targets = torch.randn(30, 16), torch.randint(0, 50, (30,))
    for shape, transposed in (((16, 50), True), ((50, 16), False)):
        head = torch.randn(shape, requires_grad=True)
        loss = head_loss(hidden, head, targets, softcap=CAP, transposed=transposed)
        for _ in range(2):  # a second backward through the same graph gives the same numbers
            (grad,) = torch.autograd.grad(0.5 * loss, head, retain_graph=True)
            assert grad.is_contiguous()
        want = torch.autograd.grad(0.5 * plain_loss(hidden, head, targets, (1.0,), CAP, transposed), head)[0]
        assert torch.allclose(grad, want, rtol=1e-4, atol=1e-5)


def test_targets_end_with_the_batch():
    index, weights = ahead_targets(torch.tensor([4, -1, 6]), (1.0, 0.5), torch.float32)
    assert weights.tolist() == [[1.0, 0.0], [0.0, 0.5], [1.0, 0.0]]
    assert index[0].tolist() == [4, 0] and index[1, 1] == 6


def test_bad_input_is_named():
    hidden, head, targets = torch.randn(4, 16), torch.randn(16, 50), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="head: expected 16"):
        head_loss(hidden, head, targets, transposed=False)
    with pytest.raises(ValueError, match="targets"):
        head_loss(hidden, head, targets[:3])
    with pytest.raises(ValueError, match="tile_rows"):
        head_loss(hidden, head, targets, tile_rows=0)


def eighths(x: torch.Tensor) -> torch.Tensor:
    """x rounded to e4m3 under a scale that makes its largest number the largest there is, by hand."""
    scale = x.abs().max() / 448
    scaled = x / scale
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-20))).clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return torch.round(scaled / step) * step * scale


@pytest.fixture
def route_of_a_gpu(monkeypatch):
    """Rows of logits through the kernel, interpreted."""
    kernel = pytest.importorskip("leanstep.gpt.kernel")
    monkeypatch.setattr(loss, "rows_kernel", lambda hidden, head, softcap: kernel)
    monkeypatch.setattr(kernel, "BLOCK", 64)


@pytest.mark.interpreter
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("tile_rows", [None, 7])
@pytest.mark.parametrize("cap", [CAP, (90.0, 5.0, 7.5)], ids=["cap", "high cap"])
def test_the_rows_kernel_is_the_formula(route_of_a_gpu, transposed, tile_rows, cap):
    hidden, head = torch.randn(41, 24), torch.randn(*((24, 131) if transposed else (131, 24)))
    targets, mtp = torch.randint(-1, 131, (41,)), (1.0, 0.5, 0.25)
    leaves = [x.clone().requires_grad_() for x in (hidden, head)]
    wide = [x.double().requires_grad_() for x in (hidden, head)]
    options = {"mtp": mtp, "softcap": cap, "transposed": transposed, "tile_rows": tile_rows}
    found = head_loss(*leaves, targets, **options)
    want = plain_loss(*wide, targets, mtp, cap, transposed)
    grads = torch.autograd.grad(0.7 * found, leaves), torch.autograd.grad(0.7 * want, wide)
    assert abs(found.item() - want.item()) < 1e-5 * abs(want.item())
    for got, truth in zip(*grads, strict=True):
        assert (got - truth).abs().max() < 1e-5 * truth.abs().max()
    with torch.no_grad():
        torch.testing.assert_close(head_loss(*leaves, targets, **options), found.detach())


@pytest.mark.interpreter
@pytest.mark.parametrize("float8", [False, True])
def test_weights_of_tokens_may_be_tensors(route_of_a_gpu, monkeypatch, float8):
    """The same loss and gradients as with numbers: a CUDA graph reads new weights without a new capture."""
    monkeypatch.setattr(loss, "multiplies_8_bits", lambda hidden, head: float8)
    kernel = loss.rows_kernel(None, None, None)

    def rounded_by_torch(u, grad, *rest):
        wide = torch.empty(u.shape)
        kernel.softcap_rows(u.float(), wide, *rest)
        grad.copy_(wide.to(grad.dtype))

    monkeypatch.setattr(loss, "rows_kernel", lambda *_: types.SimpleNamespace(softcap_rows=rounded_by_torch))
    targets = torch.randint(144, (48,))
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((48, 32), (32, 144))]
    found = []
    for mtp in ((1.0, 0.3), tuple(torch.tensor([1.0, 0.3]).unbind())):
        value = head_loss(*leaves, targets, mtp=mtp, softcap=CAP, float8=float8)
        found.append((value, *torch.autograd.grad(value, leaves)))
    for number, tensor in zip(*found, strict=True):
        torch.testing.assert_close(tensor, number)


@pytest.mark.interpreter
def test_a_head_of_8_bits_is_that_of_its_rounded_operands(route_of_a_gpu, monkeypatch):
    """Loss and logit gradients of rounded operands; the gradients are rounded, then multiplied with those."""
    monkeypatch.setattr(loss, "multiplies_8_bits", lambda hidden, head: True)
    kernel, stored = loss.rows_kernel(None, None, None), []

    def in_float32(u, grad, *rest):
        # The interpreter has no 8-bit floats: the kernel writes wide ones, torch rounds them.
        wide = torch.empty(u.shape)
        kernel.softcap_rows(u.float(), wide, *rest)
        stored.append(wide)
        grad.copy_(wide.to(grad.dtype))

    monkeypatch.setattr(loss, "rows_kernel", lambda *_: types.SimpleNamespace(softcap_rows=in_float32))
    hidden, head = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((48, 32), (32, 144)))
    targets = torch.randint(144, (48,))
    found = head_loss(hidden, head, targets, softcap=CAP, float8=True)
    found.backward()
    rounded = [eighths(t.detach().double()) for t in (hidden, head)]
    logits = (rounded[0] @ rounded[1]).requires_grad_()
    want = softcap_loss(logits, targets, (1.0,), CAP).sum()
    (slope,) = torch.autograd.grad(want, logits)
    assert abs(found.item() - want.item()) < 2e-3 * abs(want.item())
    # e5m2 rounds by an eighth at most; nothing overflows.
    assert stored[0].abs().max() <= 57344
    for got, truth in ((hidden.grad, slope @ rounded[1].T), (head.grad, rounded[0].T @ slope)):
        assert (got.double() - truth).norm() < 0.1 * truth.norm()


def test_8_bits_are_taken_where_the_device_has_them(monkeypatch):
    hidden = types.SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.bfloat16, shape=(64, 32))
    head = torch.randn(32, 144)
    for capability, has in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert multiplies_8_bits(hidden, head) is has
    assert not multiplies_8_bits(hidden, torch.randn(24, 150))
    assert not multiplies_8_bits(torch.randn(64, 32), head)
    # On a CPU the option changes nothing.
    given = torch.randn(41, 32), torch.randn(32, 144), torch.randint(144, (41,))
    assert head_loss(*given, softcap=CAP, float8=True) == head_loss(*given, softcap=CAP)
