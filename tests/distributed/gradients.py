"""Gradients that hurt, for the tests of GradientSum's kernels."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

DTYPES: dict[str, Any] = {
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64,
}  # fmt: skip
# The default, a narrower range, the ends of what is accepted.
SETTINGS = ((-48, 14), (-20, 12), (-100, -38), (60, 122))
_WORDS = {2: np.int16, 4: np.int32, 8: np.int64}


def gradient(dtype: str, n: int, seed: int, special: bool = False) -> Any:
    """Magnitudes of all sorts, ties between multiples of every quantum, numbers at the ranges' ends, subnormals."""
    random = np.random.default_rng(seed)
    exponents = random.integers(-110, 60, n) if dtype != "float16" else random.integers(-24, 15, n)
    x = np.ldexp(random.choice([1.0, 1.25, 1.5, 1.75, 1 + 2.0**-7, 2 - 2.0**-10], n), exponents)
    x *= random.choice([-1.0, 1.0], n)
    x[::3] = random.standard_normal(x[::3].size) * 0.01
    x[::7] = (random.integers(-9, 9, x[::7].size) + 0.5) * 2.0 ** random.choice([-48, -20, 0])
    with np.errstate(all="ignore"):
        x[4::11] = np.nextafter(np.float32(2.0**14), np.float32(0)) * random.choice([-1, 1])
        x = x.astype(DTYPES[dtype])
    if special and n > 4:
        x[:5] = [np.nan, np.inf, -np.inf, -0.0, np.finfo(np.float32).tiny / 3]
    return x


def totals(n: int) -> Any:
    """Integers of every length, ties of their rounding to either work type among them."""
    random = np.random.default_rng(n)
    x = random.integers(-(1 << 62), 1 << 62, n) >> random.integers(0, 62, n)
    x[::5] = (x[::5] & ~0xFFFFFFFFFF) | 0x8000000000
    return x.astype(np.int64)


def as_torch(x: Any) -> torch.Tensor:
    name = "bfloat16" if x.dtype == ml_dtypes.bfloat16 else x.dtype.name
    return torch.from_numpy(x.view(_WORDS[x.dtype.itemsize]).copy()).view(getattr(torch, name))
