"""Upstream's own train_gpt.py (modded-nanogpt, 20dd158) on the device, without its evaluations.

upstream_74.py CHECKOUT: nothing of the checkout is copied here; its text runs with three changes. Its warm-up
is the part that runs: it visits every stage with the step that training would take there. The steps are
those of `STEPS`, and the evaluation before each is left out. Its kernels that multiply are priced as
products; the engine would price them as one pass over their tensors.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from token_files import write_tokens

from leanstep.rehearse import register_cost
from leanstep.rehearse.events import Kernel

# The engine cuts its steps before a backward pass: backward and update of one step, forward of the next. So
# each stage has a step more than the two that count, one without Adam's turn and one with it. 967 unties.
STEPS = (0, 1, 2, 3, 484, 485, 486, 967, 968, 969, 970, 1450, 1451, 1452, 1453)
CHANGES = (
    ("warmup_steps = sorted(", f"warmup_steps = sorted(set({STEPS})) or ("),
    (
        "        inputs, targets, cum_seqlens, bigram_inputs, _ = next(val_loader)\n"
        "        model(inputs, targets, cum_seqlens, bigram_inputs, training_manager.get_forward_args())\n",
        "        pass\n",
    ),
    ("def nvidia_smi():\n", "def nvidia_smi():\n    return ''\n"),
)


def half_product(arguments: Mapping[str, Any]) -> Kernel:
    """XXT, XTX and A A^T: half of the tiles, as leanstep's own are priced."""
    x, out = arguments["A_ptr"], arguments["C_ptr"]
    batch, size = out.numel // out.size[-1] ** 2, out.size[-1]
    inner = x.numel // (batch * size)
    flops = float(batch * size * size * inner)
    return Kernel("gemm", x.nbytes + out.nbytes, flops, x.dtype, (batch, size, size // 2, inner))


def product_with_relu(arguments: Mapping[str, Any]) -> Kernel:
    """A product whose tile is also squared (forward), or multiplied by the slope (backward)."""
    a, b, c, aux = (arguments[name] for name in ("a_desc", "b_desc", "c_desc", "aux_desc"))
    (m, k), n = a.size, b.size[0]
    moved = a.nbytes + b.nbytes + c.nbytes + aux.nbytes
    return Kernel("gemm", moved, 2.0 * m * n * k, a.dtype, (1, m, n, k))


def main(checkout: Path) -> None:
    text = (checkout / "train_gpt.py").read_text(encoding="utf-8")
    for before, after in CHANGES:
        assert text.count(before) == 1, f"checkout: expected commit 20dd158; train_gpt.py lacks {before!r}"
        text = text.replace(before, after)
    for name in ("XXT_kernel", "XTX_kernel", "ba_plus_cAA_kernel"):
        register_cost(name, half_product)
    register_cost("linear_relu_square_kernel", product_with_relu)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data" / "fineweb10B"
        data.mkdir(parents=True)
        write_tokens(data)
        script = Path(folder) / "train_gpt.py"
        script.write_text(text, encoding="utf-8")
        os.environ["DATA_PATH"] = folder
        sys.argv = [str(script)]
        sys.path.insert(0, str(checkout))
        (Path(folder) / "triton_kernels.py").write_text("", encoding="utf-8")  # the script logs its text
        os.chdir(folder)
        # As the main module: Dynamo looks its globals up there.
        exec(compile(text, str(script), "exec"), globals())


main(Path(sys.argv[1]))
