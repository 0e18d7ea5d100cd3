"""Bits of every benchmark: a refactoring shows that no output and no gradient moved.

    python dev/fingerprint.py before.json            # in the old checkout
    python dev/fingerprint.py after.json             # in the new one, on the same machine
    python dev/fingerprint.py --compare before.json after.json

Stores the sha256 of every output and gradient of every benchmark, size and dtype, for the reference and each
fast path, with 1 and 2 threads, with the C++ passes and without; `--most` bounds the input elements of a
workload, `--cases` names the benchmarks. Bits depend on the processor and its libraries: compare files of one
machine only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import BENCHMARKS

# In 16 bits, which some CPUs emulate, and in fp64 larger workloads take minutes.
MOST_ELEMENTS_BESIDES_FP32 = 1e6


def digest(tensor) -> str:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:20]


def one_round(threads: int, most: float, names: list[str]) -> dict[str, str]:
    """Digests with the environment as it is."""
    import torch

    torch.set_num_threads(threads)
    digests: dict[str, str] = {}
    for module in BENCHMARKS:
        benchmark = importlib.import_module(f"benchmarks.{module}").BENCHMARK
        if names and benchmark.name not in names:
            continue
        # A `large` workload alone takes gigabytes, one for a GPU as well.
        for size in [size for size in benchmark.sizes if size not in ("large", "gpu")]:
            for dtype in benchmark.dtypes:
                workload = benchmark.workload(benchmark.params(size), dtype)
                elements = sum(t.numel() for t in workload.tensors.values())
                if elements > (most if dtype == torch.float32 else MOST_ELEMENTS_BESIDES_FP32):
                    continue
                for row in benchmark.rows:
                    if row.kind not in ("reference", "fast") or row.missing(benchmark.params(size)):
                        continue
                    if row.dtypes is not None and dtype not in row.dtypes:
                        continue
                    if "bf16" in row.name and elements > MOST_ELEMENTS_BESIDES_FP32:
                        continue
                    torch.manual_seed(0)
                    outputs = row.build(workload)()
                    # 0.3 called the plain row "reference".
                    impl = "reference" if row.name == "plain" else row.name
                    key = f"{benchmark.name}/{size}/{str(dtype)[6:]}/{impl}"
                    digests.update({f"{key}/{k}": digest(v) for k, v in outputs.items()})
    return digests


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    changed = sorted(k for k in before.keys() & after.keys() if before[k] != after[k])
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    shared = len(before.keys() & after.keys())
    print(f"{shared} in both, {len(changed)} changed, {len(gone)} gone, {len(new)} new")
    for title, keys in (("changed", changed), ("gone", gone), ("new", new)):
        groups = sorted({k.rsplit("/", 1)[0].split(" ", 1)[1] for k in keys})
        for group in groups:
            print(f"  {title}: {group}")
    return 1 if changed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--most", type=float, default=4e6)
    parser.add_argument("--cases", default="")
    parser.add_argument("--round", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(path.read_text()) for path in options.files)
        return compare(before, after)
    if options.round:
        options.files[0].write_text(
            json.dumps(one_round(options.round, options.most, [n for n in options.cases.split(",") if n]))
        )
        return 0
    result: dict[str, str] = {}
    for threads in (2, 1):
        for native in ("1", "0"):
            part = options.files[0].with_suffix(f".{threads}-{native}.part")
            command = [sys.executable, __file__, str(part), "--round", str(threads)]
            command += ["--most", str(options.most), "--cases", options.cases]
            subprocess.run(command, check=True, env={**os.environ, "LEANSTEP_NATIVE": native})
            digests = json.loads(part.read_text())
            part.unlink()
            result.update({f"threads={threads},native={native} {k}": v for k, v in digests.items()})
    options.files[0].write_text(json.dumps(result, indent=0, sort_keys=True))
    print(f"{len(result)} digests in {options.files[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
