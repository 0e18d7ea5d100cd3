"""One FLOP count: `diagnose` and `rehearse` report the same model FLOPs for the same step."""

from __future__ import annotations

import runpy

import pytest
import torch
from rehearse.rehearsed import SCRIPTS, run_script, stub_or_skip
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from leanstep import diagnose
from leanstep.diagnose.mfu import step_flops
from leanstep.flops import StepFlops, counter_of, operand_type, utilisation
from leanstep.rehearse import what_if
from leanstep.rehearse.devices import DEVICES

SCRIPT = SCRIPTS / "multiplying.py"


def expected_flops(sizes: dict[str, int]) -> StepFlops:
    """Count by hand: linear layers, causal attention, recomputation, the optimizer."""
    width, blocks, vocab = sizes["WIDTH"], sizes["BLOCKS"], sizes["VOCAB"]
    tokens, length = sizes["BATCH"] * sizes["LENGTH"], sizes["LENGTH"]
    first, head = 2 * tokens * width * width, 2 * tokens * width * vocab
    linears = 2 * tokens * width * (3 + 1 + 4 + 4) * width
    scores = 2 * sizes["BATCH"] * width * length * (length + 1) // 2
    block = linears + 2 * scores
    # Recomputation stops when all saved tensors exist again: the last product is not needed.
    again = block - 2 * tokens * 4 * width * width
    matrices = [(width, width), (vocab, width)]
    matrices += blocks * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return StepFlops(
        forward={"float32": first + blocks * block + head},
        backward={"float32": first + 2 * (blocks * block + head)},
        recomputed={"float32": blocks * (again + scores)},
        optimizer={"float32": sum(2 * 2 * rows * rows * columns for rows, columns in matrices)},
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_diagnose_and_rehearse_count_the_same_model_flops(autocast):
    stub_or_skip()
    program = runpy.run_path(str(SCRIPT))
    step = program["build"]("cpu", autocast)
    with diagnose.watch(steps=1, warmup=0) as watch:
        step()
        watch.step()
    diagnosed = step_flops(watch.steps)
    recording = run_script(SCRIPT, *(["autocast"] if autocast else [])).recording
    timing = what_if.update_step(recording, DEVICES["h100"])
    assert timing is not None
    assert timing.flops == diagnosed
    expected = expected_flops(program)
    assert diagnosed.model == expected.model
    if not autocast:
        assert diagnosed == expected
    # The same time gives the same MFU.
    peak = DEVICES["h100"].flops
    assert timing.mfu(DEVICES["h100"]) == utilisation(diagnosed, timing.step_s, peak)
    assert diagnosed.model < diagnosed.all


def test_a_grouped_convolution_counts_its_groups_once():
    """torch's counter takes the weight gradient of `groups` groups that many times."""
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    layer = nn.Conv2d(8, 16, 3, groups=4)
    counter = FlopCounterMode(display=False)
    with counter:
        out = layer(x)
    forward = counter.get_total_flops()
    count = counter_of(torch.ops.aten.convolution_backward.default._schema)
    assert count is not None
    grad = torch.ones_like(out)
    mask = [True, True, True]
    args = (grad, x, layer.weight, [16], [1, 1], [0, 0], [1, 1], False, [0, 0], 4, mask)
    outs = torch.ops.aten.convolution_backward(*args)
    counted = count(args, {}, outs)
    assert counted is not None and counted.flops == 2 * forward


def test_only_torchs_products_have_a_counter():
    assert counter_of(torch.ops.aten.add.Tensor._schema) is None
    assert counter_of(torch.ops.aten.mm.default._schema) is not None
    assert counter_of(torch.ops.aten._scaled_dot_product_flash_attention.default._schema) is not None


def test_operand_types():
    assert operand_type(torch.bfloat16) == "bfloat16"
    assert operand_type(torch.float8_e4m3fn) == operand_type("float8_e5m2") == "float8"
    assert operand_type(torch.float32, tf32=True) == "tf32"
    assert operand_type(torch.float16, tf32=True) == "float16"


def test_a_backward_beyond_twice_the_forward_is_recomputation():
    flops = StepFlops.of({("forward", "bfloat16"): 10, ("backward", "bfloat16"): 30})
    assert (flops.model, flops.recomputed) == (30, {"bfloat16": 10})
    less = StepFlops.of(
        {("forward", "bfloat16"): 10, ("backward", "bfloat16"): 12, ("recompute", "bfloat16"): 4}
    )
    assert (less.model, less.recomputed) == (22, {"bfloat16": 4})
