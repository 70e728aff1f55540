"""Run under TRITON_INTERPRET=1: compare the Triton kernels of GradientSum with the reference in Triton's interpreter.

    python interpreted_sums.py accumulate mean parts

Not a test itself: the variable acts when triton is imported.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from gradients import DTYPES, SETTINGS, as_torch, gradient, totals
from interpreter_patches import report

from isograd.core import arrays
from isograd.torch.distributed import reference, triton_launch


def accumulated() -> Iterator[tuple[str, bool]]:
    for dtype in DTYPES:
        for i, (quantum, limit) in enumerate(SETTINGS):
            for n in (5, 4099):
                total, peaks = torch.full((n,), 7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
                right, peak = np.zeros(n, np.int64), 0
                for unit in range(3):
                    g = gradient(dtype, n, 3 * i + unit, special=unit == 1)
                    with np.errstate(all="ignore"):
                        triton_launch.accumulate(as_torch(g), total, peaks, 1, quantum, limit, unit == 0)
                    found = reference.quanta(g, quantum, limit)
                    right, peak = right + found.units, max(peak, found.peak)
                yield f"{dtype} {n} 2^{quantum}", bool((total.numpy() == right).all())
                yield f"{dtype} {n} 2^{quantum}: peak", peaks.tolist() == [0, peak, 0]


def divided() -> Iterator[tuple[str, bool]]:
    for dtype in DTYPES:
        for quantum, _ in SETTINGS:
            for n, units in ((1, 1), (2100, (1 << 24) + 1)):
                total = totals(n)
                right = reference.mean(total, units, quantum, DTYPES[dtype])
                for flag in (0, 1):
                    y = torch.full((n,), 7, dtype=getattr(torch, dtype))
                    with np.errstate(all="ignore"):
                        triton_launch.mean(torch.from_numpy(total), torch.tensor([units, flag, 5]), y, quantum)
                    wanted = np.full(n, np.nan, DTYPES[dtype]) if flag else right
                    yield f"{dtype} {n} / {units} 2^{quantum}", arrays.numpy_view(y).tobytes() == wanted.tobytes()


def of_parts() -> Iterator[tuple[str, bool]]:
    for dtype in DTYPES:
        for i, (quantum, limit) in enumerate(SETTINGS):
            parts = [gradient(dtype, 4099, 3 * i + rank, special=rank == 1) for rank in range(3)]
            found = [reference.quanta(g, quantum, limit) for g in parts]
            right, peak = sum(f.units for f in found), max(f.peak for f in found)
            rows = torch.stack([as_torch(g) for g in parts])
            total, y, z = torch.full((4099,), 7, dtype=torch.int64), torch.ones_like(rows[0]), torch.ones_like(rows[0])
            peaks, header = torch.zeros(3, dtype=torch.int64), torch.tensor([3, 0, 0])
            with np.errstate(all="ignore"):
                triton_launch.accumulate(rows, total, peaks, 1, quantum, limit, True)
                triton_launch.mean_of_parts(rows, header, y, quantum, limit)
                triton_launch.keep(rows[1], z, peaks, 2)
            what = f"{dtype} 2^{quantum}"
            yield f"{what}: sums", bool((total.numpy() == right).all())
            yield f"{what}: peaks", peaks.tolist() == [0, peak, found[1].peak]
            mean = reference.mean(right, 3, quantum, DTYPES[dtype])
            yield f"{what}: mean", arrays.numpy_view(y).tobytes() == mean.tobytes()
            yield f"{what}: copy", arrays.numpy_view(z).tobytes() == parts[1].tobytes()
            row = torch.ones_like(y)
            with np.errstate(all="ignore"):
                triton_launch.mean_of_parts(rows[:1], header, row, quantum, limit)
            mean = reference.mean(found[0].units, 3, quantum, DTYPES[dtype])
            yield f"{what}: one part", arrays.numpy_view(row).tobytes() == mean.tobytes()


if __name__ == "__main__":
    report({"accumulate": accumulated, "mean": divided, "parts": of_parts})
