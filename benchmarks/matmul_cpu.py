"""Rate of the order-free products on a CPU beside NumPy's float32 product, in one run.

    python benchmarks/matmul_cpu.py [--threads N] [--json FILE]

Rounding to integers is included. Figures are GFLOP/s of the equivalent product, the best of five, and ratios to NumPy.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import threadpoolctl

import isograd as ig
from isograd.cli.files import checked_file
from isograd.cli.measure import machine
from isograd.numerics import numba_int16
from isograd.numerics.matmul import matmul

SHAPES = ((2048, 2048, 2048), (4096, 1024, 4096), (512, 4096, 4096))


def seconds(f: Callable[[], Any]) -> float:
    """The best of five runs, after one that compiles."""
    found = []
    for _ in range(6):
        start = time.perf_counter()
        f()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=ig.get_num_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    checked_file(arguments.json, "--json")
    threads = arguments.threads
    ig.set_num_threads(threads)
    found: dict[str, Any] = {"machine": machine(None), "sizes": {}}
    rng = np.random.default_rng(0)
    with threadpoolctl.threadpool_limits(threads):
        for m, k, n in SHAPES:
            x, w = (rng.standard_normal(s).astype(np.float32) for s in ((m, k), (n, k)))
            xb, wb = x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)
            rows = {"NumPy, float32": lambda x=x, w=w: x @ w.T}
            for engine in numba_int16.engine_names():
                rows[f"int16, float32, {engine}"] = lambda x=x, w=w, e=engine: matmul(x, w.T, "int16", engine=e)
            rows["int16, bfloat16"] = lambda x=xb, w=wb: matmul(x, w.T)
            rows["int16, bfloat16, balanced"] = lambda x=xb, w=wb: matmul(x, w.T, balance=numba_int16.balance_of(w.T))
            rows["wide, float32"] = lambda x=x, w=w: matmul(x, w.T)
            print(f"{m} x {k} @ {k} x {n}, {threads} threads")
            rates = {}
            found["sizes"][f"{m} x {n} x {k}"] = {"GFLOP/s": rates}
            beside = 0.0
            for name, f in rows.items():
                rate = 2 * m * k * n / seconds(f) / 1e9
                beside = beside or rate
                rates[name] = rate
                print(f"  {name:32} {rate:7.0f} {rate / beside:6.2f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
