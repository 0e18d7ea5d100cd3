"""Every implementation of every registered case, once, at its smallest size. Prints {name: trouble or ""}."""

import json
import sys
import time
import traceback

import torch

from leanstep.case import all_cases

wanted = sys.argv[1:]
found = {}
for case in all_cases().values():
    if wanted and case.name not in wanted:
        continue
    params = case.params("tiny")
    for implementation in case.implementations:
        key, started = f"{case.name}, {implementation.name}", time.perf_counter()
        if implementation.missing(params, "cuda"):
            continue
        try:
            implementation.build(case.workload(params, case.bench_dtype, "cuda"))()
            found[key] = ""
        except Exception as trouble:
            found[key] = f"{type(trouble).__name__}: {trouble}"[:300]
            traceback.print_exc()
        print(key, f"{time.perf_counter() - started:.1f} s", found[key][:100], file=sys.stderr, flush=True)
print(json.dumps(found))
print(torch.cuda.max_memory_allocated(), file=sys.stderr)
