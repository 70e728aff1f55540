"""Elementwise functions with the same bits on every machine; NumPy's own differ between processors.

NumPy arrays of float16, bfloat16, float32 or float64 of any shape and strides; the result is a new C-contiguous array
of the same shape and dtype. Anything else raises InvalidProblemError (no array, shapes or dtypes that differ) or
UnsupportedError (another dtype).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.elementwise import numba_activations, numba_kernels, numba_power
from isograd.errors import InvalidProblemError
from isograd.numerics.reference import narrow, work_dtype
from isograd.numerics.storage import address, kernel_type, require_array
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment

_WORK = 2  # of an element, which takes a nanosecond or two, for `parallel.grain`


def _run(kernel: Any, *inputs: NDArray[Any]) -> NDArray[Any]:
    contiguous = [np.ascontiguousarray(x) for x in inputs]
    y = np.empty(inputs[0].shape, inputs[0].dtype)
    grain = parallel.grain(y.size, _WORK)
    parallel.for_ranges(kernel, y.size, grain, kernel_type(y.dtype), *map(address, contiguous), address(y))
    return y


def _require_like(operation: str, dy: Any, argument: str, x: Any) -> None:
    require_array(operation, "dy", dy)
    require_array(operation, argument, x)
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise InvalidProblemError(
            f"{operation}: dy is {dy.dtype} {dy.shape}; expected dtype and shape of {argument}, {x.dtype} {x.shape}"
        )


def scale(x: NDArray[Any], factor: NDArray[Any], out: NDArray[Any]) -> None:
    """Write into `out`, in C order, the products of x and a number, or one for each of equal parts of x.

    Numbers and products are rounded to the work type, then products to the dtype.
    """
    with default_environment(), np.errstate(all="ignore"):
        factors = np.atleast_1d(factor).astype(work_dtype(x.dtype), order="C")
    x = np.ascontiguousarray(x)
    arguments = (kernel_type(x.dtype), factors, x.size // max(factors.size, 1), address(x), address(out))
    parallel.for_ranges(numba_kernels.scale, x.size, parallel.grain(x.size, 1), *arguments)


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


def tanh(x: NDArray[Any]) -> NDArray[Any]:
    """The hyperbolic tangent, off by at most 3.5 u of the value (u = 2^-24, float64: 2^-53).

    Plus half an ulp of a 16-bit result.
    """
    return _run(numba_activations.tanh, require_array("tanh", "x", x))


def tanh_backward(dy: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """The gradient of tanh for the upstream gradient dy: dy * (1 - y^2), y = tanh(x) as stored.

    dy has the shape and dtype of y. Off by at most 2.1 u of the value plus 2^-149 (2^-1074), plus half an ulp of a
    16-bit result.
    """
    _require_like("tanh_backward", dy, "y", y)
    return _run(numba_activations.tanh_backward, dy, y)


# --- powers ----------------------------------------------------------------------------------------------------------
def _run_binary64(kernel: Any, dtypes: tuple[Any, ...], *inputs: NDArray[Any]) -> NDArray[Any]:
    """A kernel's result in binary64, rounded to one dtype after the other."""
    with default_environment(), np.errstate(all="ignore"):
        wide = np.broadcast_arrays(*[x.astype(np.float64, copy=False) for x in inputs])
        result = _run(kernel, *wide)
        for dtype in dtypes:
            result = narrow(result, dtype)
        return result


def power(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """X to the power y, of one shape after broadcasting; y may also be float64, and the result has the dtype of x.

    Computed in binary64 and rounded once: where the result is a normal number it is off by at most half an ulp and
    2^-20 of one in float32, plus half an ulp of a 16-bit result. In float64 an integer exponent n with |n| <= 64 is a
    product, off by at most |n| u of the value (u = 2^-53; for n < 0 where |x|^-n is a normal number), 0.5 and -0.5 are
    square roots, and any other exponent is off by at most (3 + |y log x|) u of the value plus 2^-1074.

    Values at 0, 1, infinity and NaN are those of IEEE 754's pow, but x ** 0.5 is sqrt(x) at -0 and -inf too.
    """
    return _run_binary64(numba_power.power, (work_dtype(x.dtype), x.dtype), x, y)


def power_backward(dy: NDArray[Any], x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """The gradient of power for x, in the work type: dy * y * x^(y - 1), 0 where y is 0."""
    return _run_binary64(numba_power.power_backward, (work_dtype(x.dtype),), dy, x, y)


def power_backward_exponent(dy: NDArray[Any], x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """The gradient of power for y, in the work type: dy * x^y * log(x), 0 where x^y is 0 and where x and y are."""
    return _run_binary64(numba_power.power_backward_exponent, (work_dtype(x.dtype),), dy, x, y)
