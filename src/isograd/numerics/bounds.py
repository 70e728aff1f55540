"""What error bounds are made of.

Notation: u is half an ulp of 1 in the type computed in (2**-24, or 2**-53 for float64), q the quantum of a sum, n the
number of its terms, η half of the smallest subnormal. Where a result or an intermediate term overflows, a bound is
infinite.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import constants as c

Floats = NDArray[Any]

# precision, exponent of the smallest normal number, largest finite number
_FORMATS = {
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, 3.3895313892515355e38),
    "float32": (24, -126, 3.4028234663852886e38),
    "float64": (53, -1022, 1.7976931348623157e308),
}
LARGEST = {dtype: limits[2] for dtype, limits in _FORMATS.items()}


def ulp(x: Floats, dtype: str) -> Floats:
    """The spacing of the numbers of `dtype` around x, which is given in a wider type."""
    precision, least, _ = _FORMATS[dtype]
    _, exponent = np.frexp(np.abs(x))
    return np.asarray(np.ldexp(np.ones_like(x), np.maximum(exponent - 1, least) - precision + 1))


def limits(dtype: str) -> tuple[float, int, Any, float]:
    """(u, bits of the quantum, η, largest finite number) of the work type."""
    if dtype == "float64":
        # 2**-1075 needs a wider type than binary64; where there is none, so does the error it bounds.
        return 2.0**-53, c.QUANTUM_BITS + c.LIMB_SHIFT_64, np.ldexp(np.longdouble(1), -1075), LARGEST["float64"]
    return 2.0**-24, c.QUANTUM_BITS, 2.0**-150, LARGEST["float32"]


def sum_error(terms: Floats, dtype: str, axis: Any = None) -> Floats:
    """Count · q / 2 of an order-free sum, q from the largest term or the next binade; infinite where one overflows."""
    _, bits, _, largest = limits(dtype)
    top = np.max(np.abs(terms), axis=axis, initial=0) * (1 + 2.0**-20)
    count = terms.size if axis is None else terms.shape[axis]
    _, exponent = np.frexp(top)
    q = np.ldexp(np.ones_like(top), np.maximum(exponent - 1, -1022 if dtype == "float64" else -126) - bits)
    return np.where(top <= largest, count * q / 2, np.where(np.isinf(top), 0, np.inf))


def stored_error(y: Floats, dtype: str) -> Floats:
    """What the last rounding to a 16-bit type costs."""
    return ulp(y, dtype) / 2 if dtype in ("float16", "bfloat16") else np.zeros_like(y)
