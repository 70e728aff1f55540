"""The table of rotary embeddings against mpmath."""

import hashlib

import mpmath
import numpy as np
import pytest

from isograd import rotary_table


@pytest.mark.parametrize(("dim", "base"), [(8, 10000.0), (6, 500000.0), (2, 1.0)])
def test_error_is_within_the_bound(dim: int, base: float) -> None:
    length = 2**17
    tables = rotary_table(length, dim, base=base)
    # 355 / 113 and its kin bring an angle next to a multiple of pi / 2.
    positions = [0, 1, 2, 11, 22, 344, 355, 710, 51819, 103638, length - 1]
    with mpmath.workprec(200):
        for p in positions:
            for i in range(dim // 2):
                angle = p * mpmath.power(base, mpmath.mpf(-2 * i) / dim)
                for table, function in zip(tables, (mpmath.cos, mpmath.sin), strict=True):
                    got = table[p, i]
                    bound = float(np.spacing(abs(got))) / 2 + 2.0**-50 + p * 2.0**-62
                    assert abs(mpmath.mpf(float(got)) - function(angle)) <= bound


def test_bits() -> None:
    cos, sin = rotary_table(4096, 64)
    digest = hashlib.sha256(cos.astype("<f4").tobytes() + sin.astype("<f4").tobytes())
    assert digest.hexdigest()[:16] == "5fdee381d0e54dbd"


def test_empty() -> None:
    assert [t.shape for t in rotary_table(0, 8)] == [(0, 4), (0, 4)]
