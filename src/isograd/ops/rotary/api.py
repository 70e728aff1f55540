"""What a user calls: rotary and its gradient."""

from __future__ import annotations

from isograd.core import call
from isograd.ops.rotary.operation import ROTARY, ROTARY_BACKWARD
from isograd.typing import Array, ArrayT, DataT

_rotary, _backward = call.function(ROTARY), call.function(ROTARY_BACKWARD)


def rotary(x: ArrayT, cos: Array, sin: Array, interleaved: bool = False) -> ArrayT:
    """Rotary position embeddings (Su et al., 2021): pairs of the last axis of x, rotated by an angle for each.

    x: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an array with
    DLPack or a tape variable; the result is of the same kind. cos, sin: of x's shape but for the last size r, at most
    half of x's, in float32 (float64 for float64), and any strides: rows of `rotary_table` at the positions, broadcast
    over heads without a copy. interleaved: pairs are neighbours instead of i and r + i. What lies behind the first
    2 r elements is copied.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin), products and sums rounded in the work type and the results to
    x's type once (rule 21 of `docs/arithmetic.md`). cos and sin get no gradient.

    Raises InvalidProblemError for shapes or dtypes that do not match, UnsupportedError for another dtype.
    """
    result: ArrayT = _rotary((x, cos, sin), (interleaved,))
    return result


def rotary_backward(dy: DataT, cos: Array, sin: Array, interleaved: bool = False) -> DataT:
    """The gradient of rotary: the rotation by the negative angles.

    dy: the gradient of the result, of its shape and dtype; any strides. cos, sin, interleaved: as rotary got them.

    Raises InvalidProblemError for shapes or dtypes that do not match, UnsupportedError for another dtype.
    """
    result: DataT = _backward((dy, cos, sin), (interleaved,))
    return result
