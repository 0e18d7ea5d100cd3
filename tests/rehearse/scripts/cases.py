"""Every row of the named benchmarks, once, at its smallest size. Prints {"benchmark, row": trouble or ""}."""

import importlib
import json
import sys
import time
import traceback

found = {}
for name in sys.argv[1:]:
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    params = benchmark.params("tiny")
    for row in benchmark.rows:
        key, started = f"{name}, {row.name}", time.perf_counter()
        if row.missing(params, "cuda"):
            continue
        try:
            row.build(benchmark.workload(params, benchmark.bench_dtype, "cuda"))()
            found[key] = ""
        except Exception as trouble:
            found[key] = f"{type(trouble).__name__}: {trouble}"[:300]
            traceback.print_exc()
        print(key, f"{time.perf_counter() - started:.1f} s", found[key][:100], file=sys.stderr, flush=True)
print(json.dumps(found))
