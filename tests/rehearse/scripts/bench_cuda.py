"""`python -m benchmarks.NAME --device cuda` on a simulated device: its control flow, its clocks, its JSON.

bench_cuda.py FOLDER: writes the objects there. Parity means nothing here, since values are assumed.
"""

import importlib
import sys
from pathlib import Path

import torch

from benchmarks.harness import main
from leanstep.measure import timing

timing.WARM_S = 0.0
folder = Path(sys.argv[1])
torch.zeros(1, device="cuda")
common = ["--device", "cuda:0", "--dtype", "bf16", "--size", "tiny", "--budget", "0.01"]
for name, rows in {
    "logprob_linear": "leanstep,verl-triton,cut-cross-entropy,limit",
    "transpose_add": "leanstep,limit",
}.items():
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    try:
        main(benchmark, ["--impl", rows, *common, "--json", str(folder / f"{name}.json")])
    except SystemExit as ended:
        assert ended.code == 1  # parity of assumed values
