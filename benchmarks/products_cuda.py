"""The order-free product of 16-bit integers on a GPU beside cuBLAS in bfloat16 and torch._int_mm, in one run.

    python benchmarks/products_cuda.py [--tiles] [--experts] [--json FILE]

TFLOP/s are those of the product that is asked for, 2 M N K; torch._int_mm multiplies matrices of one byte, of which the
product needs four, and its figure is a quarter of what it reaches. With slicing, both operands are cut anew. Bits are
compared with those of the CPU first. Products of experts stand beside torch's grouped product in bfloat16, or a loop of
cuBLAS where there is none. --tiles times every tile of a list at the first and the last size, --experts experts alone.
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
from isograd.torch.ops_grouped import GROUPED_MATMUL, GROUPED_OUTER

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
    """Compare products with the CPU's: small, many tiles, a long contracted axis, and of experts."""
    for m, k, n in ((300, 520, 270), (2100, 520, 4100), (128, 70_000, 64)):
        a, b = (torch.randn(s).bfloat16() for s in ((m, k), (k, n)))
        if not torch.equal(igt.matmul(a.cuda(), b.cuda()).cpu(), igt.matmul(a, b)):
            raise SystemExit(f"the product {m} x {n} x {k} differs from the CPU's")
    x, w, g = (torch.randn(s).bfloat16() for s in ((700, 300), (3, 200, 300), (700, 200)))
    offsets = torch.tensor([0, 300, 301, 700])
    for op, given in ((GROUPED_MATMUL, (x, w.mT, offsets, True)), (GROUPED_OUTER, (x, g, offsets, True))):
        if not torch.equal(op(*[t.cuda() if isinstance(t, torch.Tensor) else t for t in given]).cpu(), op(*given)):
            raise SystemExit("a product of experts differs from the CPU's")


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


# Experts, rows, features, outputs: as in Mixtral, and with many experts as in OLMoE.
EXPERTS = ((8, 16384, 4096, 14336), (64, 32768, 2048, 1024))


class Experts:
    """A grouped layer: x [rows, features], sorted by expert, w [experts, outputs, features]."""

    def __init__(self, experts: int, rows: int, features: int, outputs: int) -> None:
        self.x, self.g = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (features, outputs))
        self.w = torch.randn(experts, outputs, features, device="cuda", dtype=torch.bfloat16)
        # As uneven as a router's: the shares of a softmax.
        shares = torch.randn(experts, generator=torch.Generator().manual_seed(0)).mul(0.5).softmax(0)
        ends = (shares.cumsum(0) * rows).round().long()
        ends[-1] = rows
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends]).cuda()
        self.ends = ends.to(torch.int32).cuda()
        self.counts = ends.diff(prepend=torch.zeros(1, dtype=torch.long)).tolist()
        self.work = 2 * rows * features * outputs / 1e9

    def native(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Torch's product of the rows of every expert."""
        if hasattr(torch, "_grouped_mm"):
            return torch._grouped_mm(x, w, offs=self.ends)
        return torch.cat([part @ one for part, one in zip(x.split(self.counts), w, strict=True)])

    def native_along(self) -> torch.Tensor:
        """Torch's gradient of the weight."""
        if hasattr(torch, "_grouped_mm"):
            return torch._grouped_mm(self.g.t(), self.x, offs=self.ends)
        return torch.stack(
            [g.t() @ x for g, x in zip(self.g.split(self.counts), self.x.split(self.counts), strict=True)]
        )

    def calls(self) -> dict[str, Callable[[], Any]]:
        """What is timed; slicing and balances are included."""
        w = self.w.mT
        return {
            "forward": lambda: GROUPED_MATMUL(self.x, w, self.offsets, True),
            "gradient of x": lambda: GROUPED_MATMUL(self.g, self.w, self.offsets, True),
            "gradient of w": lambda: GROUPED_OUTER(self.x, self.g, self.offsets, True),
            "a loop of igt.linear": lambda: [
                igt.linear(part, one) for part, one in zip(self.x.split(self.counts), self.w, strict=True)
            ],
            "torch, forward": lambda: self.native(self.x, w),
            "torch, gradient of x": lambda: self.native(self.g, self.w),
            "torch, gradient of w": self.native_along,
        }


def time_experts() -> dict[str, Any]:
    """The figures of grouped layers."""
    found = {}
    for experts, rows, features, outputs in EXPERTS:
        problem = Experts(experts, rows, features, outputs)
        times = measure(problem.calls(), rounds=7, least=0.1)
        name = f"{experts} experts, {rows} rows, {features} to {outputs}"
        found[name] = {"milliseconds": times, "TFLOP/s": {call: problem.work / t for call, t in times.items()}}
        show(name, found[name])
    return found


def show(title: str, entry: dict[str, Any]) -> None:
    """Print figures."""
    print(title)
    for kind, values in entry.items():
        for name, value in values.items():
            print(f"  {kind[:7]:8} {name:42} {value:9.3f}", flush=True)


def main() -> None:
    """Measure and print; --json writes all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="time every tile of a list")
    parser.add_argument("--experts", action="store_true", help="time grouped layers alone")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    check_bits()
    found: dict[str, Any] = {"environment": environment(), "sizes": {}}
    for m, n, k in () if options.experts else SIZES:
        problem = Problem(m, n, k)
        times = measure(problem.calls(), rounds=7, least=0.1)
        entry: dict[str, Any] = {"milliseconds": times}
        entry["TFLOP/s"] = {name: problem.work / t for name, t in times.items() if not name.startswith("slicing")}
        if options.tiles and (m, n, k) in (SIZES[0], SIZES[-1]):
            tiles = measure({str(tuple(t)): problem.multiplied(t) for t in TILES}, rounds=5, least=0.1)
            entry["tiles, TFLOP/s"] = {name: problem.work / t for name, t in tiles.items()}
        found["sizes"][f"{m} x {n} x {k}"] = entry
        show(f"{m} x {n} x {k}", entry)
    found["experts"] = time_experts()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
