"""NorMuon over ranks, compiled as on a GPU: its regions, what ranks exchange, what the host waits for."""

from __future__ import annotations

import pytest
from rehearse.rehearsed import SCRIPTS, run_script

from leanstep.rehearse.events import HostWait, Launch


def third_step(how: str, ranks: int) -> tuple[list[Launch], list[HostWait], int]:
    """Launches of the optimizer and waits of the third step, and the number of compiled regions."""
    pytest.importorskip("triton", reason="Triton is not installed")
    found = run_script(SCRIPTS / "sharded_muon.py", how, device="h100", ranks=ranks)
    assert found.recording.refused is None, found.recording.refused
    step = found.recording.steps[2]
    events = found.recording.events[step.first : step.last]
    launches = [e for e in events if isinstance(e, Launch) and e.phase == "optimizer" and e.kernels]
    return launches, [e for e in events if isinstance(e, HostWait)], len(found.recording.regions)


@pytest.mark.parametrize(("how", "ranks"), [("fsdp", 8), ("fsdp-mesh", 8)])
def test_fsdp2(how, ranks):
    launches, waits, regions = third_step(how, ranks)
    assert not waits
    names = [e.name for e in launches]
    # Momentum, factor and write of three shapes at most, the bank's step and Adam's.
    assert 5 <= regions <= 11 and "triton::xxt_kernel" in names
    exchanges = [k for e in launches for k in e.kernels if k.name == "all_to_all"]
    # Three shapes, there and back, in the dtype of the products.
    assert len(exchanges) == 6 and {k.dtype for k in exchanges} == {"bfloat16"}
    assert not [k for e in launches for k in e.kernels if k.kind == "gemm" and k.dtype == "float32"]
    # A shape is under way before the products of the one before begin.
    order = [name for name in names if name in ("all_to_all", "bmm", "baddbmm", "mm", "triton::xxt_kernel")]
    first = order.index("all_to_all")  # the bank, which needs none, came before
    assert order[first : first + 2] == ["all_to_all", "all_to_all"]


# One exchange for whole parameters, one each for the table and the bank. Four matrices do not divide among
# eight ranks.
@pytest.mark.parametrize(("ranks", "exchanges"), [(2, 3), (8, 2)])
def test_owners(ranks, exchanges):
    launches, waits, regions = third_step("owners", ranks)
    assert not waits
    names = [e.name for e in launches]
    kinds = [k.name for e in launches for k in e.kernels if k.kind == "collective"]
    assert kinds.count("reduce_scatter") == kinds.count("all_gather") == exchanges
    # One for each shape that this rank owns, and Adam's.
    assert 1 <= regions <= 5 and {"triton::xxt_kernel", "triton::xtx_kernel"} & set(names)
