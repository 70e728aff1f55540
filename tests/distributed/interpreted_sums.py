"""Run under TRITON_INTERPRET=1: compare the Triton kernels of GradientSum with the reference in Triton's interpreter.

    python interpreted_sums.py accumulate mean

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


if __name__ == "__main__":
    report({"accumulate": accumulated, "mean": divided})
