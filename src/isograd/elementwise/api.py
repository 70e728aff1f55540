"""exp, log, sigmoid and silu with the same bits on every machine; NumPy's own differ between processors.

NumPy arrays of float16, bfloat16, float32 or float64 of any shape and strides; the result is a new C-contiguous array
of the same shape and dtype. Anything else raises InvalidProblemError (no array, shapes or dtypes that differ) or
UnsupportedError (another dtype).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd import parallel
from isograd.elementwise import numba_kernels
from isograd.errors import InvalidProblemError
from isograd.fenv import default_environment
from isograd.numerics.storage import address, kernel_type, require_array

_GRAIN = 1 << 15  # elements of one chunk: some 50 microseconds of work


def _run(kernel: Any, *inputs: NDArray[Any]) -> NDArray[Any]:
    contiguous = [np.ascontiguousarray(x) for x in inputs]
    y = np.empty(inputs[0].shape, inputs[0].dtype)
    parallel.for_ranges(kernel, y.size, _GRAIN, kernel_type(y.dtype), *map(address, contiguous), address(y))
    return y


def _require_like(operation: str, dy: Any, argument: str, x: Any) -> None:
    require_array(operation, "dy", dy)
    require_array(operation, argument, x)
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise InvalidProblemError(
            f"{operation}: dy is {dy.dtype} {dy.shape}; expected dtype and shape of {argument}, {x.dtype} {x.shape}"
        )


def scale(x: NDArray[Any], factor: float, out: NDArray[Any]) -> None:
    """Write into `out`, in C order, the products of x and a number: it and they in the work type, then rounded."""
    with default_environment(), np.errstate(all="ignore"):
        number = np.float64(factor) if x.dtype == np.float64 else np.float32(factor)
    x = np.ascontiguousarray(x)
    arguments = (kernel_type(x.dtype), number, address(x), address(out))
    parallel.for_ranges(numba_kernels.scale, x.size, _GRAIN, *arguments)


def exp(x: NDArray[Any]) -> NDArray[Any]:
    """The exponential, at most 1.05 ulp off before the rounding to a 16-bit type."""
    return _run(numba_kernels.exp, require_array("exp", "x", x))


def log(x: NDArray[Any]) -> NDArray[Any]:
    """The natural logarithm, at most 1.05 ulp off before the rounding to a 16-bit type.

    It is -inf at 0 and NaN below.
    """
    return _run(numba_kernels.log, require_array("log", "x", x))


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    """The logistic function 1 / (1 + exp(-x)).

    With u = 2^-24 (float64: 2^-53) off by at most 4.2 u of the value plus 2^-149 (2^-1074), plus half an ulp of a
    16-bit result.
    """
    return _run(numba_kernels.sigmoid, require_array("sigmoid", "x", x))


def sigmoid_backward(dy: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """The gradient of sigmoid for the upstream gradient dy: dy * y * (1 - y), y = sigmoid(x) as stored.

    dy has the shape and dtype of y. Off by at most 3.1 u of the value plus 2^-149 (2^-1074), plus half an ulp of a
    16-bit result.
    """
    _require_like("sigmoid_backward", dy, "y", y)
    return _run(numba_kernels.sigmoid_backward, dy, y)


def silu(x: NDArray[Any]) -> NDArray[Any]:
    """The product x * sigmoid(x); -0 at -inf.

    With u = 2^-24 (float64: 2^-53) the result is off by at most 5.2 u |silu(x)| + (1 + |x|) 2^-149 (float64: 2^-1074),
    plus half an ulp of a 16-bit result. The last term covers a sigmoid that is subnormal.
    """
    return _run(numba_kernels.silu, require_array("silu", "x", x))


def silu_backward(dy: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    """The gradient of silu(x) for the upstream gradient dy: dy * s * (1 + x * (1 - s)), s = sigmoid(x).

    dy has the shape and dtype of x. With u = 2^-24 (float64: 2^-53) the result is off by at most
    10 u |dy| s (1 + |x| (1 - s)) + (1 + |x|) (1 + |dy|) 2^-149 (float64: 2^-1074), plus half an ulp of a 16-bit result.
    """
    _require_like("silu_backward", dy, "x", x)
    return _run(numba_kernels.silu_backward, dy, x)
