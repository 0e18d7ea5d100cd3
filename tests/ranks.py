"""Gloo ranks with a time-out; each rank imports the test module again, by its path."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing as mp
import pickle
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Run `function(rank, world_size, *args)` on every rank; return the values in rank order.

    The function must be defined at the top level of its module. Values must be picklable (return tensors as
    numpy arrays or plain tensors). A rank that raises, exits or is not done after `timeout` seconds fails.
    Seconds count in which no rank could go on: on a busy machine ranks take longer and do not hang.
    """
    # Ranks are forked from a server that has done nothing but import torch: that import costs two seconds of
    # a core, more than most of these tests. The server's environment is the one of the first call.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor", "numpy"])
    results: Any = context.Queue()
    path = str(Path(inspect.getfile(function)).resolve())
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, store, path, function.__name__, args, results, timeout),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        values: dict[int, Any] = {}
        waited, looked = 0.0, time.monotonic()
        try:
            while len(values) < world_size:
                try:
                    rank, error, value = results.get(timeout=0.2)
                except queue.Empty:
                    dead = [
                        r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in values
                    ]
                    if dead:
                        raise AssertionError(f"ranks {dead} died") from None
                    now = time.monotonic()
                    # All processes may have been stopped: one look counts as a second at most.
                    waited += 0.0 if any(_is_at_work(p.pid) for p in processes) else min(now - looked, 1.0)
                    looked = now
                    if waited > timeout:
                        missing = sorted(set(range(world_size)) - set(values))
                        raise AssertionError(f"ranks {missing} not done after {timeout} s") from None
                    continue
                if error is not None:
                    raise AssertionError(f"rank {rank}:\n{error}")
                values[rank] = pickle.loads(value)
        finally:
            for process in processes:
                process.join(timeout=5 if len(values) == world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [values[rank] for rank in range(world_size)]


def _is_at_work(pid: int | None) -> bool:
    """Return whether a thread of a process runs, or would if it had a core or its data from a disk."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = file.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in "RD":
            return True
    return False


def fully_shard(module, **options) -> None:
    """FSDP2 in a rank, with gradients that are means.

    Asked for a mean, gloo of torch 2.8 adds: FSDP2 then has to add and to divide by itself.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, **options)
    mean = torch.zeros(1)
    dist.reduce_scatter_tensor(mean, torch.ones(dist.get_world_size()), op=dist.ReduceOp.AVG)
    if mean.item() != 1:
        module.set_force_sum_reduction_for_comms(True)


def _rank_main(rank, world_size, store, path, name, args, results, timeout) -> None:
    try:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            # Longer than the caller waits: a rank left alone in a collective must not give up first.
            timeout=timedelta(seconds=timeout + 120),
        )
        module = _load(path)
        value = getattr(module, name)(rank, world_size, *args)
        # Bytes, not tensors: torch would send a handle of memory that ends with this process.
        results.put((rank, None, pickle.dumps(value)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def _load(path: str):
    """Import a test file by its path, under a name that does not collide with the package's modules."""
    sys.path.insert(0, str(Path(__file__).parent))
    name = "ranked_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
