"""The actual launches of the public paths compile and fit; Triton's own binder binds their arguments.

All variants are compiled for sm_90. For the devices with the least shared memory, only the products are,
whose stages depend on the device. `make launched-kernels` compiles everything for every target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rehearse.rehearsed import stub_or_skip

pytest.importorskip("triton")

from dev.kernel_checks.aot import SHARED_LIMITS

pytestmark = pytest.mark.timeout(1800)
ROOT = Path(__file__).resolve().parents[3]
COMPILED = """
import json, sys
sys.path.insert(0, {tools!r})
import launched_kernels
launches = launched_kernels.launches_on({device!r}, *{rooms!r})
if {products!r}:
    launches = [one for one in launches if one.kernel.fn.__name__ in ("xxt_kernel", "xtx_kernel")]
print(json.dumps(launched_kernels.compiled_for({target!r}, launches)))
"""


def compiled(target: str, device: str, rooms: tuple[str, ...] = (), products: bool = False) -> dict:
    stub_or_skip()
    values = {"target": target, "device": device, "rooms": rooms, "products": products}
    code = COMPILED.format(tools=str(ROOT / "dev"), **values)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_launched_variant_compiles_for_sm_90():
    row = compiled("sm_90", "h100")
    assert row["complaints"] == []
    assert row["compiled"] == row["variants"] > 30
    assert 0 < row["shared_bytes"] <= row["shared_limit"] == 232_448


@pytest.mark.parametrize(("target", "device"), [("sm_89", "4090"), ("gfx942", "mi300x")])
def test_products_fit_where_shared_memory_is_small(target, device):
    row = compiled(target, device, ("muon",), products=True)
    assert row["complaints"] == [] and row["variants"] >= 4
    assert row["shared_bytes"] <= row["shared_limit"] == SHARED_LIMITS[target] < 110_000
