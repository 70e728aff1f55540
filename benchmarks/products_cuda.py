"""The order-free product of 16-bit integers on a GPU beside cuBLAS in bfloat16 and torch._int_mm, in one run.

    python benchmarks/products_cuda.py [--tiles] [--json FILE]

TFLOP/s are those of the product that is asked for, 2 M N K; torch._int_mm multiplies matrices of one byte, of which the
product needs four, and its figure is a quarter of what it reaches. With slicing, both operands are cut anew. Bits are
compared with those of the CPU first. --tiles times every tile of a list at the first and the last size.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_times import measure

import isograd.torch as igt
from isograd.cli.bench_cuda import environment
from isograd.products import cuda
from isograd.products.tiles import HOPPER, HOPPER_TALL, Tiles

SIZES = ((8192, 8192, 8192), (16384, 4096, 4096), (16384, 14336, 4096), (4096, 4096, 16384))
_TRITON = (
    (128, 256, 128, 8, 3), (128, 256, 128, 8, 4), (256, 128, 128, 8, 3), (256, 128, 128, 8, 4),
    (128, 128, 128, 8, 4), (128, 128, 128, 4, 3), (128, 256, 64, 8, 6), (256, 128, 64, 8, 6),
)  # fmt: skip
TILES = [
    *[HOPPER._replace(group=group, stages=stages) for stages in (4, 3) for group in (4, 8, 16)],
    *[HOPPER_TALL._replace(group=group) for group in (4, 8, 16)],
    HOPPER._replace(columns=128, stages=6),
    *[Tiles(rows, columns, depth, 8, True, warps, stages) for rows, columns, depth, warps, stages in _TRITON],
    Tiles(128, 256, 128, 16, True, 8, 3),
]


def check_bits() -> None:
    """Compare products with the CPU's: small, many tiles, and a long contracted axis."""
    for m, k, n in ((300, 520, 270), (2100, 520, 4100), (128, 70_000, 64)):
        a, b = (torch.randn(s).bfloat16() for s in ((m, k), (k, n)))
        if not torch.equal(igt.matmul(a.cuda(), b.cuda()).cpu(), igt.matmul(a, b)):
            raise SystemExit(f"the product {m} x {n} x {k} differs from the CPU's")


class Problem:
    """Operands of c = a b, a [m, k] and b [k, n], the transpose of a weight."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self.a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        self.b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
        self.c = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.shape = cuda._shape(self.a, self.b, self.c)
        self.lines = cuda.sliced(self.a, -1), cuda.sliced(self.b, -2)
        self.work = 2 * m * n * k / 1e9

    def multiplied(self, tile: Tiles | None = None) -> Callable[[], None]:
        """The product of what was cut before."""
        return lambda: cuda.multiplied(*self.lines, self.shape, self.c, tile)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """What is timed."""
        x, y = (torch.randint(-128, 128, t.shape, device="cuda", dtype=torch.int8) for t in (self.a, self.b.t()))
        return {
            "product": self.multiplied(),
            "slicing": lambda: (cuda.sliced(self.a, -1), cuda.sliced(self.b, -2)),
            "slicing, transposed": lambda: (cuda.sliced(self.a.t(), -1), cuda.sliced(self.b.t(), -2)),
            "with slicing": lambda: cuda.product(self.a, self.b, self.c),
            "cuBLAS bfloat16": lambda: torch.mm(self.a, self.b),
            "_int_mm / 4": lambda: [torch._int_mm(x, y.t()) for _ in range(4)],
        }


def main() -> None:
    """Measure and print; --json writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="time every tile of a list")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    check_bits()
    found: dict[str, Any] = {"environment": environment(), "sizes": {}}
    for m, n, k in SIZES:
        problem = Problem(m, n, k)
        times = measure(problem.calls(), rounds=7, least=0.1)
        entry: dict[str, Any] = {"milliseconds": times}
        entry["TFLOP/s"] = {name: problem.work / t for name, t in times.items() if not name.startswith("slicing")}
        if options.tiles and (m, n, k) in (SIZES[0], SIZES[-1]):
            tiles = measure({str(tuple(t)): problem.multiplied(t) for t in TILES}, rounds=5, least=0.1)
            entry["tiles, TFLOP/s"] = {name: problem.work / t for name, t in tiles.items()}
        found["sizes"][f"{m} x {n} x {k}"] = entry
        print(f"{m} x {n} x {k}")
        for kind, values in entry.items():
            for name, value in values.items():
                print(f"  {kind[:7]:8} {name:42} {value:9.3f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
