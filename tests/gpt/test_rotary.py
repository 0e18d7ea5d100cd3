"""Rotary tables and YaRN against the vectors, and what must stay invariant."""

from __future__ import annotations

import json

import pytest
import torch
from gpt.golden import array, load

from leanstep.gpt.rotary import Rotary, rotate

CPU = torch.device("cpu")


def factors(rotary: Rotary, rows: list[int], paired: bool):
    """The vectors' layout: cos, and sin with the sign of odd dimensions, features repeated in pairs."""
    table = rotary.head_table(max(rows) + 1, paired, torch.float32, CPU)[rows].reshape(len(rows), -1)
    cos, sin = table.real.repeat_interleave(2, -1), -table.imag.repeat_interleave(2, -1)
    return cos, sin * torch.tensor([1.0, -1.0]).repeat(sin.shape[-1] // 2)


@pytest.mark.parametrize("case", range(4))
def test_vectors(case: int):
    golden = load("rotary_yarn")
    c = golden["cases"][case]
    rotary = Rotary(c["head_dim"], 1024.0, 0.1)
    half = c["head_dim"] // 2

    def check(want: dict) -> None:
        frequencies = rotary.frequencies.repeat_interleave(2)
        assert torch.allclose(frequencies, torch.tensor(want["angular_freq"])[:half], rtol=1e-6)
        assert not any(want["angular_freq"][half:])
        assert abs(rotary.attention_scale - want["attn_scale"]) < 1e-12
        cos, sin = factors(rotary, c["rows"], c["paired"])
        assert (cos - array(want["factor1"])).abs().max() < golden["tolerance"]
        assert (sin - array(want["factor2"])).abs().max() < golden["tolerance"]

    check(c)
    x = array(c["x"])[0]
    if not c["paired"]:
        turned = rotate(x, rotary.head_table(x.shape[0], False, torch.float32, CPU))
        assert (turned - array(c["rotary_x"])[0]).abs().max() < golden["tolerance"]
    else:
        # Width 2D: an even head and the odd head after it, side by side.
        heads = x.reshape(x.shape[0], -1, c["head_dim"])
        turned = rotate(heads, rotary.head_table(x.shape[0], True, torch.float32, CPU)).reshape(x.shape)
        assert (turned - array(c["rotary_x"])[0]).abs().max() < golden["tolerance"]
    for step in c["yarn"]:
        rotary.rescale(step["old"], step["new"])
        check(step)


def test_only_half_of_a_head_turns_and_lengths_stay():
    x = torch.randn(9, 4, 16)
    turned = rotate(x, Rotary(16, 1024.0, 0.1).head_table(9, False, torch.float32, CPU))
    assert torch.equal(turned[..., 8:], x[..., 8:]) and torch.equal(turned[0], x[0])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)


def test_scores_depend_on_distance_only():
    q, k = torch.randn(2, 16, dtype=torch.float64)
    table = Rotary(16, 1024.0, 0.1).head_table(40, False, torch.float64, CPU)
    at = [rotate(x.expand(40, 1, 16), table)[:, 0] for x in (q, k)]
    scores = at[0] @ at[1].T
    assert torch.allclose(scores.diagonal(-3), scores[3, 0].expand(37))


def test_tables_grow_and_state_is_exact():
    rotary = Rotary(16, 1024.0, 0.1)
    short = rotary.table(5, torch.float32, CPU)
    long = rotary.table(100, torch.float32, CPU)
    assert torch.equal(long[:5], short)
    for paired in (False, True):
        table = rotary.head_table(9, paired, torch.float32, CPU)
        full = rotary.full_table(9, 4, paired, torch.float32, CPU)
        assert torch.equal(full, torch.stack([table[:, h % table.shape[1]] for h in range(4)], dim=1))
    rotary.rescale(48, 112)
    other = Rotary(16, 1024.0, 0.1)
    other.load_state_dict(json.loads(json.dumps(rotary.state_dict())))
    assert torch.equal(other.table(100, torch.float32, CPU), rotary.table(100, torch.float32, CPU))
    assert other.attention_scale == rotary.attention_scale
    with pytest.raises(ValueError, match="frequencies"):
        other.load_state_dict({"frequencies": [1.0], "attention_scale": 0.1})
    with pytest.raises(ValueError, match="window"):
        other.rescale(0, 5)
