"""Checkpoints: exact round trip, atomic writing, torn and foreign files."""

from __future__ import annotations

import json
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from leanstep import files
from leanstep.recipes import checkpoint
from leanstep.recipes.checkpoint import CheckpointError

RUN = {"recipe": "x", "steps": 10}


def assert_same(a, b, path="state"):
    assert type(a) is type(b), f"{path}: {type(a)} became {type(b)}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist(), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert a == b or (a != a and b != b), path


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([torch.bfloat16, torch.int16])
)  # fmt: skip
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(states)
def test_any_nested_state_comes_back_with_its_types(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("c")
    checkpoint.save(directory, 1, state, settings=RUN)
    assert_same(state, checkpoint.load_latest(directory, settings=RUN).state)


def test_tensors_come_back_bit_for_bit(tmp_path):
    base = torch.randn(4, 6)
    state = {
        "weights": base.to(torch.bfloat16),
        "transposed": base.t(),
        "shared": [base, base[1:]],
        "low bits": torch.randint(-32768, 32767, (5,), dtype=torch.int16),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "optimizer": {0: {"step": 7, "exp_avg": base}, 1: {}},
        "a.b": base + 1,
        "a": {"b": base + 2},
    }
    checkpoint.save(tmp_path, 5, state, settings=RUN)
    found = checkpoint.load_latest(tmp_path, settings=RUN)
    assert found.step == 5
    state["transposed"] = state["transposed"].contiguous()
    assert_same(state, found.state)


def test_saving_copies_so_training_may_go_on(tmp_path):
    weight = torch.ones(3)
    path = checkpoint.save(tmp_path, 1, {"w": weight}, settings=RUN)
    weight.zero_()
    assert checkpoint.load(path).state["w"].tolist() == [1, 1, 1]


def test_only_the_newest_stay(tmp_path):
    for step in (3, 1, 20, 100):
        checkpoint.save(tmp_path, step, {}, settings=RUN, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000020.safetensors",
        "step-00000100.safetensors",
    ]


def test_a_damaged_later_file_does_not_cost_the_new_one(tmp_path):
    checkpoint.checkpoint_path(tmp_path, 9).write_bytes(b"damaged")
    for step in (3, 4):
        checkpoint.save(tmp_path, step, {}, settings=RUN, keep=1)
    assert checkpoint.load_latest(tmp_path, settings=RUN).step == 4


def spoil(path, how):
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "cut in the header":
        path.write_bytes(data[:20])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":
        path.write_bytes(bytes(len(data)))
    elif how == "bit flip":
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    elif how == "text":
        path.write_text("not a checkpoint at all, but long enough to have a header")
    elif how == "safetensors of another program":
        from safetensors.torch import save

        path.write_bytes(save({"w": torch.ones(2)}))


@pytest.mark.parametrize(
    "how",
    ["cut", "cut in the header", "empty", "zeros", "bit flip", "text", "safetensors of another program"],
)
def test_a_bad_file_is_reported_and_the_one_before_it_used(tmp_path, how):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"w": torch.full((50,), float(step))}, settings=RUN)
    spoil(checkpoint.checkpoint_path(tmp_path, 2), how)
    said = []
    found = checkpoint.load_latest(tmp_path, settings=RUN, say=said.append)
    assert found.step == 1 and found.state["w"][0] == 1
    assert len(said) == 1 and said[0].startswith("checkpoint step-00000002.safetensors skipped: ")
    assert "\n" not in said[0]


def test_when_nothing_is_usable_the_reason_is_raised(tmp_path):
    assert checkpoint.load_latest(tmp_path / "absent", settings=RUN) is None
    checkpoint.save(tmp_path, 4, {}, settings=RUN)
    with pytest.raises(CheckpointError, match="steps was 10, now 20"):
        checkpoint.load_latest(tmp_path, settings={**RUN, "steps": 20})


def rewrite(path, change):
    """Forge a checkpoint: other tensors or another state, with a checksum that fits."""
    found = checkpoint.load(path)
    header_length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + header_length])["__metadata__"]
    tensors = checkpoint.parse_tensors(path.read_bytes())
    change(header, tensors)
    header["checksum"] = checkpoint._checksum(tensors)
    path.write_bytes(checkpoint.serialise_tensors(tensors, metadata=header))
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, tensors: tensors.pop("model.w"), "tensor model.w is missing"),
        (lambda header, tensors: header.update(state="[" * 10**5), "RecursionError"),
        (lambda header, tensors: header.update(state='{"~dtype": "nothing"}'), "AttributeError"),
        (lambda header, tensors: header.update(state='{"~items": 5}'), "TypeError"),
        (lambda header, tensors: header.update(step="-1"), "step: expected 0 or more, got -1"),
        (lambda header, tensors: header.update(step="7"), "holds step 7, not the step of its name"),
    ],
)
def test_forged_content_is_refused_in_one_line(tmp_path, change, message):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"model": {"w": torch.ones(3)}}, settings=RUN)
    rewrite(checkpoint.checkpoint_path(tmp_path, 2), change)
    said = []
    found = checkpoint.load_latest(tmp_path, settings=RUN, say=said.append)
    assert found.step == 1 and len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("checkpoint step-00000002.safetensors skipped: ") and message in said[0]


TEMPLATE = {
    "weights": {"w": torch.zeros(2, 3)},
    "names": ["a"],
    "clock": 0.5,
    "ranks": [torch.zeros(2)],
    "none": None,
    "optimizer": {},
}
GOOD = {**TEMPLATE, "none": 5, "optimizer": {0: torch.ones(3)}, "ranks": [torch.ones(2), torch.ones(2)]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"weights": {}}, "state.weights.w is missing"),
        ({"weights": {"w": torch.zeros(3, 2)}}, r"state.weights.w: expected .* \(2, 3\), got .* \(3, 2\)"),
        ({"weights": {"w": torch.zeros(6)}}, r"state.weights.w: expected .* \(2, 3\), got .* \(6,\)"),
        ({"weights": {"w": torch.zeros(2, 3).double()}}, "state.weights.w: expected torch.float32"),
        ({"weights": {"w": [0.0]}}, "state.weights.w: expected a tensor, got list"),
        ({"weights": 3}, "state.weights: expected named entries, got int"),
        ({"clock": "soon"}, "state.clock: expected a number, got 'soon'"),
        ({"names": [4]}, r"state.names\[0\]: expected str, got 4"),
        ({"ranks": []}, r"state.ranks: expected a list of entries, got \[\]"),
    ],
)
def test_a_state_must_have_what_a_fresh_one_has(bad, message):
    checkpoint.check_like(TEMPLATE, GOOD)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_like(TEMPLATE, {**GOOD, **bad})


def test_a_number_that_is_not_finite_is_found_by_name():
    state = {"a": torch.ones(3), "b": [torch.tensor(7), {"c": torch.tensor([1.0, 2.0])}], "d": torch.zeros(0)}
    assert checkpoint.find_nonfinite(state, "weights") is None
    for bad in (math.nan, math.inf, -math.inf):
        state["b"][1]["c"][1] = bad
        assert checkpoint.find_nonfinite(state, "weights") == "weights.b.1.c"


def test_moments_of_another_shape_are_refused():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    checkpoint.load_optimizer(optimizer, state)
    state["state"][0]["exp_avg"] = torch.zeros(6)
    with pytest.raises(CheckpointError, match=r"expected exp_avg of shape \(2, 3\), got \(6,\)"):
        checkpoint.load_optimizer(optimizer, state)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"w": torch.ones(2)}, settings=RUN)

    def die(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 1, {"w": torch.zeros(2)}, settings=RUN)
    monkeypatch.undo()
    assert checkpoint.load_latest(tmp_path, settings=RUN).state["w"].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.safetensors"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"w": torch.ones(2)}, settings=RUN)
    half = path.with_name(f".{path.name}.123-0a1b2c3d.partial")
    half.write_bytes(path.read_bytes()[:40])
    assert checkpoint.load_latest(tmp_path, settings=RUN).step == 1
    checkpoint.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.safetensors"]


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"w": torch.ones(2)}, settings=RUN)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 2, {"w": torch.zeros(2)}, settings=RUN)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001.safetensors"]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        checkpoint.save(tmp_path, 1, {}, settings=RUN, keep=0)
    with pytest.raises(ValueError, match="step: expected 0"):
        checkpoint.save(tmp_path, -1, {}, settings=RUN)
    with pytest.raises(TypeError, match=r"cannot save a set at a\.0"):
        checkpoint.save(tmp_path, 1, {"a": [{1}]}, settings=RUN)
    assert list(tmp_path.iterdir()) == []
