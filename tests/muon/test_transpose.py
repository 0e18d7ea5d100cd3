"""Transposed copy and add: every implementation gives the stock result."""

from __future__ import annotations

import pytest
import torch

from leanstep.muon import transpose
from leanstep.muon.transpose import add_blocked, transpose_add, transpose_copy

SHAPES = [(2500, 41), (1, 7), (7, 1), (1025, 3), (0, 4), (4, 0)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_stock_bit_for_bit(shape):
    src, base = torch.randn(shape), torch.randn(shape[::-1])
    before = src.clone()
    assert torch.equal(transpose_copy(src), src.T)
    dst = base.clone()
    assert transpose_add(src, dst) is dst
    assert torch.equal(dst, base + src.T)
    add_blocked(dst, src)
    assert torch.equal(dst, (base + src.T) + src.T)
    assert torch.equal(src, before)


def test_strided_operands_and_mixed_dtypes():
    src = torch.randn(90, 60)[::2, ::3]
    wide = torch.zeros(20, 90)
    transpose_copy(src, wide[:, :45])
    assert torch.equal(wide[:, :45], src.T) and not wide[:, 45:].any()
    dst = torch.ones(20, 45)
    transpose_add(src.bfloat16(), dst)
    assert torch.equal(dst, 1 + src.bfloat16().float().T)


# torch's compiler imports its own deprecated TorchScript modules.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_compiled_version_of_big_tables_agrees(monkeypatch):
    if not transpose._has_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(transpose, "MIN_COMPILED_ELEMENTS", 100)
    src, base = torch.randn(70, 90), torch.randn(90, 70)
    monkeypatch.setattr(transpose, "add_blocked", None)
    dst = base.clone()
    transpose_add(src, dst)
    assert torch.equal(dst, base + src.T)


def test_what_torchs_compiler_cannot_build_runs_blocked(monkeypatch):
    def refuse(dst, src):
        calls.append(1)
        raise torch._dynamo.exc.TorchDynamoException("C++ compile error")

    calls = []
    monkeypatch.setattr(transpose, "_compiled", lambda function: refuse)
    monkeypatch.setattr(transpose, "_refused", set())
    monkeypatch.setattr(transpose, "_has_compiler", lambda: True)
    monkeypatch.setattr(transpose, "MIN_COMPILED_ELEMENTS", 1)
    src, dst = torch.randn(7, 9), torch.zeros(9, 7)
    for _ in range(2):
        assert transpose_add(src, dst) is dst
    assert torch.equal(dst, src.T + src.T) and len(calls) == 1
    assert torch.equal(transpose_copy(src), src.T)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: transpose_copy(torch.zeros(3)), "^src: expected two dimensions"),
        (lambda: transpose_copy(torch.zeros(3, 4), torch.zeros(3, 4)), r"^dst: expected shape \(4, 3\)"),
        (lambda: transpose_add(torch.zeros(3, 4), torch.zeros(3, 4)), r"^dst: expected shape \(4, 3\)"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
