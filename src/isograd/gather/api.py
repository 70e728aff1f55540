"""What a user calls: take_along_axis, scatter_sum, segment_sum, embedding, and their gradients.

Indices may be of type int32, int64 or uint32. One that is out of range raises IndexOutOfRangeError, which names its
position and value, before anything is written; on a GPU see `isograd.check`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

from numpy.typing import NDArray

from isograd.core import arrays, functional
from isograd.core.call import replayed
from isograd.core.checks import checked_axis, checked_shape
from isograd.core.faults import named
from isograd.errors import InvalidProblemError
from isograd.gather.plans import (
    IndexSelectDescriptor,
    IndexSelectPlan,
    IndexSumDescriptor,
    IndexSumPlan,
    ScatterSumDescriptor,
    ScatterSumPlan,
    TakeAlongAxisBackwardDescriptor,
    TakeAlongAxisBackwardPlan,
    TakeAlongAxisDescriptor,
    TakeAlongAxisPlan,
)
from isograd.typing import ArrayT, DataT, ScalarT, SupportsDLPack

if TYPE_CHECKING:
    from isograd.tape.variable import Variable

Shape = tuple[int, ...]


def _described(operation: str, name: str, array: Any, indices: Any) -> tuple[str, str, str]:
    """The device, the dtype of an array, and the dtype of its indices."""
    device, dtype = arrays.describe(array, operation, name)
    _, index_dtype = arrays.describe(indices, operation, "indices", True)
    return device, dtype, index_dtype


def _common_shape(operation: str, names: tuple[str, str], a: Shape, b: Shape, axis: int) -> Shape:
    """Two shapes of one rank broadcast in every dimension but the axis, where there is a 1; InvalidProblemError."""
    if len(a) == len(b):
        pairs = [(1, 1) if d == axis else pair for d, pair in enumerate(zip(a, b, strict=True))]
        if all(m == n or 1 in (m, n) for m, n in pairs):
            return tuple([n if m == 1 else m for m, n in pairs])
    raise InvalidProblemError(
        f"{operation}: {names[0]} has shape {a} and {names[1]} {b}; expected the same rank, and sizes that broadcast "
        f"in every dimension but axis {axis}"
    )


def _sized(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


@overload
def take_along_axis(x: NDArray[ScalarT], indices: SupportsDLPack, axis: int = ...) -> NDArray[ScalarT]: ...
@overload
def take_along_axis(x: ArrayT, indices: SupportsDLPack, axis: int = ...) -> ArrayT: ...
@replayed
def take_along_axis(x: Any, indices: Any, axis: int = -1) -> Any:
    """Values along an axis: `v[.., j, ..] = x[.., indices[.., j, ..], ..]`, the stored bits.

    x: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an array with
    DLPack or a tape variable; the result is of the same kind. indices: int32, int64 or uint32, of x's rank, any size
    along the axis (`torch.gather`); the other dimensions broadcast as in `numpy.take_along_axis`. Negative indices
    count from the end.

    Raises InvalidProblemError for shapes that do not match or a wrong axis, UnsupportedError for another dtype, and
    IndexOutOfRangeError.
    """
    name = "take_along_axis"
    if (tape := functional.tape_of(x)) is not None:
        return tape.take_along_axis(x, indices, axis)
    (x, indices), restore = functional.inputs(name, x=x, indices=indices)
    device, dtype, index_dtype = _described(name, "x", x, indices)
    shape = checked_shape(name, "x", x.shape)
    axis = checked_axis(name, axis, shape)
    common = _common_shape(name, ("x", "indices"), shape, tuple(indices.shape), axis)
    x = functional.expanded(x, _sized(common, axis, shape[axis]))
    indices = functional.expanded(indices, _sized(common, axis, indices.shape[axis]))
    shape, chosen = tuple(x.shape), tuple(indices.shape)
    plan = functional.plan(TakeAlongAxisPlan, TakeAlongAxisDescriptor(shape, chosen, dtype, index_dtype, axis), device)
    return restore(functional.run(plan, x=x, indices=indices, v=functional.empty(chosen, dtype, x)))


@overload
def take_along_axis_backward(
    dv: NDArray[ScalarT], indices: SupportsDLPack, shape: Shape, axis: int = ..., *, unique_indices: bool = ...
) -> NDArray[ScalarT]: ...
@overload
def take_along_axis_backward(
    dv: DataT, indices: SupportsDLPack, shape: Shape, axis: int = ..., *, unique_indices: bool = ...
) -> DataT: ...
@replayed
def take_along_axis_backward(
    dv: Any, indices: Any, shape: Shape, axis: int = -1, *, unique_indices: bool = False
) -> Any:
    """Gradient of take_along_axis: dv added onto zeros of x's shape, `dx[.., i, ..] = Σ dv[.., j, ..]` over the j with
    index i.

    dv: gradient of the values. indices: as they were given to `take_along_axis`. shape: of x; a dimension in which x
    was broadcast gets the sum over it. unique_indices: a promise that no line along the axis has an index twice (JAX's
    word), which saves the look for repeated ones; more indices than the axis is long are then an error.

    The sums are order-free: the same bits for every permutation of the sources, off by at most `c·q/2` and half an ulp,
    with c sources and q = 2^-44 (float64: 2^-88) of the power of two below the largest. A NaN or an infinity reaches
    its own destination only. Errors as for `take_along_axis`.
    """
    name = "take_along_axis_backward"
    (dv, indices), restore = functional.inputs(name, dv=dv, indices=indices)
    device, dtype, index_dtype = _described(name, "dv", dv, indices)
    shape = checked_shape(name, "shape", shape)
    axis = checked_axis(name, axis, shape)
    common = _common_shape(name, ("indices", "shape"), tuple(indices.shape), shape, axis)
    chosen = _sized(common, axis, indices.shape[axis])
    if tuple(dv.shape) != chosen:
        raise InvalidProblemError(f"{name}: dv has shape {tuple(dv.shape)}; expected {chosen}, the shape of the values")
    indices = functional.expanded(indices, chosen)
    # The dimensions that x was broadcast in join the axis: their elements have one destination.
    folded = [d for d in range(len(shape)) if d != axis and shape[d] == 1 and common[d] != 1]
    if folded:
        if unique_indices:
            raise InvalidProblemError(
                f"{name}: unique_indices is True, but x of shape {shape} was broadcast to {common}: every element was "
                "chosen several times"
            )
        others = [d for d in range(len(shape)) if d != axis and d not in folded]
        order = (*others, *folded, axis)
        kept = tuple([common[d] for d in others])
        line = math.prod([chosen[d] for d in (*folded, axis)])
        dv = functional.reshaped(name, "dv", functional.permuted(dv, order), (*kept, line))
        indices = functional.reshaped(name, "indices", functional.permuted(indices, order), (*kept, line))
        rows = (*kept, shape[axis])
    else:
        rows = shape
    descriptor = TakeAlongAxisBackwardDescriptor(
        rows, tuple(dv.shape), dtype, index_dtype, -1 if folded else axis, unique_indices
    )
    plan = functional.plan(TakeAlongAxisBackwardPlan, descriptor, device)
    dx = functional.empty(shape, dtype, dv)
    view = dx
    if folded:  # in place of the axes that were folded, each of size 1
        view = functional.reshaped(name, "dx", functional.permuted(dx, order), rows)
    functional.run(plan, indices=indices, dv=dv, dx=view)
    return restore(functional.promised(name, dx))


@overload
def scatter_sum(
    x: NDArray[ScalarT], indices: SupportsDLPack, values: NDArray[ScalarT], axis: int = ...
) -> NDArray[ScalarT]: ...
@overload
def scatter_sum(x: Variable, indices: SupportsDLPack, values: Variable | NDArray[Any], axis: int = ...) -> Variable: ...
@overload
def scatter_sum(x: NDArray[Any], indices: SupportsDLPack, values: Variable, axis: int = ...) -> Variable: ...
@overload
def scatter_sum(x: DataT, indices: SupportsDLPack, values: DataT, axis: int = ...) -> DataT: ...
@replayed
def scatter_sum(x: Any, indices: Any, values: Any, axis: int = -1) -> Any:
    """Add values onto x along an axis: `out[.., i, ..] = x[.., i, ..] + Σ values[.., j, ..]` over the j with index i.

    x: as for `take_along_axis`; it is not changed. Either indices and values have one shape, of x's rank, with any size
    along the axis and sizes that broadcast to x's in the other dimensions (`torch.scatter_add`); or indices have rank 1
    and values have x's shape but for that many slices along the axis (`torch.index_add`), and an index stands for a
    whole slice. Negative indices count from the end.

    The sum S of a destination's values is order-free (see `take_along_axis_backward`) and rounded, then x + S is. A
    destination without sources keeps its bits. Errors as for `take_along_axis`.
    """
    name = "scatter_sum"
    if (tape := functional.tape_of(x, values)) is not None:
        return tape.scatter_sum(x, indices, values, axis)
    (x, indices, values), restore = functional.inputs(name, x=x, indices=indices, values=values)
    device, dtype, index_dtype = _described(name, "x", x, indices)
    shape = checked_shape(name, "x", x.shape)
    axis = checked_axis(name, axis, shape)
    chosen = _sized(shape, axis, indices.shape[-1] if len(indices.shape) else 0)
    out = functional.empty(shape, dtype, x)
    if len(indices.shape) == 1 and len(values.shape) > 1:
        if tuple(values.shape) != chosen:
            raise InvalidProblemError(f"{name}: values has shape {tuple(values.shape)}; expected {chosen}")
        order = (axis, *[d for d in range(len(shape)) if d != axis])
        rows = tuple([shape[d] for d in order])
        descriptor = IndexSumDescriptor(rows, tuple(indices.shape), dtype, index_dtype, True, True)
        views = {key: functional.permuted(a, order) for key, a in (("values", values), ("x", x), ("out", out))}
        with named(name, at=axis, indices_shape="indices", shape="x"):
            functional.run(functional.plan(IndexSumPlan, descriptor, device), indices=indices, **views)
        return restore(functional.promised(name, out))
    common = _common_shape(name, ("indices", "x"), tuple(indices.shape), shape, axis)
    if common != _sized(shape, axis, 1):
        raise InvalidProblemError(
            f"{name}: indices has shape {tuple(indices.shape)}, which does not fit into x {shape}"
        )
    chosen = _sized(shape, axis, indices.shape[axis])
    if len(values.shape) != len(shape) or any(n not in (1, m) for n, m in zip(values.shape, chosen, strict=True)):
        raise InvalidProblemError(f"{name}: values has shape {tuple(values.shape)}; expected {chosen}")
    indices, values = functional.expanded(indices, chosen), functional.expanded(values, chosen)
    descriptor_ = ScatterSumDescriptor(shape, chosen, dtype, index_dtype, axis)
    plan_ = functional.plan(ScatterSumPlan, descriptor_, device)
    return restore(functional.run(plan_, indices=indices, values=values, x=x, out=out))


def _rows(operation: str, argument: str, value: Any) -> int:
    """A number of rows."""
    if (rows := functional.integer(operation, argument, value)) < 0:
        raise InvalidProblemError(f"{operation}: {argument} is {rows}; expected a number from 0 on")
    return rows


def _index_sum(
    name: str, values: Any, indices: Any, num: int, key: str, index_key: str, negative: bool, skipped: int | None
) -> Any:
    """Rows of values [*indices.shape, *rest] summed by index into [num, *rest]."""
    (values, indices), restore = functional.inputs(name, **{key: values, index_key: indices})
    device, dtype = arrays.describe(values, name, key)
    _, index_dtype = arrays.describe(indices, name, index_key, True)
    leading = tuple(indices.shape)
    if tuple(values.shape[: len(leading)]) != leading:
        raise InvalidProblemError(
            f"{name}: {key} has shape {tuple(values.shape)}; expected it to begin with {index_key}'s shape {leading}"
        )
    shape = (num, *values.shape[len(leading) :])
    descriptor = IndexSumDescriptor(shape, leading, dtype, index_dtype, negative, False, skipped)
    with named(name, indices=index_key, indices_shape=index_key, values=key, shape=key):
        plan = functional.plan(IndexSumPlan, descriptor, device)
        out = functional.empty(shape, dtype, values)
        return restore(functional.run(plan, indices=indices, values=values, out=out))


@overload
def segment_sum(values: NDArray[ScalarT], segment_ids: SupportsDLPack, num_segments: int) -> NDArray[ScalarT]: ...
@overload
def segment_sum(values: ArrayT, segment_ids: SupportsDLPack, num_segments: int) -> ArrayT: ...
@replayed
def segment_sum(values: Any, segment_ids: Any, num_segments: int) -> Any:
    """The sum of each segment's rows: `out[s] = Σ values[j]` over the j with segment_ids[j] == s.

    values: [*segment_ids.shape, *rest], kinds and dtypes as for `take_along_axis`. segment_ids: in any order; negative
    ones count from the end. num_segments: rows of the result, [num_segments, *rest]; those without sources are 0.

    The sums are order-free, see `take_along_axis_backward`. Errors as for `take_along_axis`.
    """
    if (tape := functional.tape_of(values)) is not None:
        return tape.segment_sum(values, segment_ids, num_segments)
    num = _rows("segment_sum", "num_segments", num_segments)
    return _index_sum("segment_sum", values, segment_ids, num, "values", "segment_ids", True, None)


def _checked_padding(operation: str, padding_idx: Any, num: int) -> int | None:
    if padding_idx is None:
        return None
    number = functional.integer(operation, "padding_idx", padding_idx)
    if not -num <= number < num:
        raise InvalidProblemError(f"{operation}: padding_idx is {number}; {num} embeddings accept {-num} to {num - 1}")
    return number % num


@overload
def embedding(weight: NDArray[ScalarT], indices: SupportsDLPack, padding_idx: int | None = ...) -> NDArray[ScalarT]: ...
@overload
def embedding(weight: ArrayT, indices: SupportsDLPack, padding_idx: int | None = ...) -> ArrayT: ...
@replayed
def embedding(weight: Any, indices: Any, padding_idx: int | None = None) -> Any:
    """The rows of a table: `y[i..] = weight[indices[i..]]`, the stored bits.

    weight: [num, *rest], kinds and dtypes as for `take_along_axis`. indices: of any shape; negative ones are out of
    range, since a token is no position. padding_idx: the row that gets no gradient (negative: counted from the end);
    the values are not affected, as in torch.

    Errors as for `take_along_axis`.
    """
    if (tape := functional.tape_of(weight)) is not None:
        return tape.embedding(weight, indices, padding_idx)
    return index_select("embedding", weight, indices, False, padding_idx)


def index_select(name: str, weight: Any, indices: Any, negative: bool = True, padding_idx: int | None = None) -> Any:
    """The rows of weight at indices of any shape, in the name of an operation; see `embedding`."""
    (weight, indices), restore = functional.inputs(name, weight=weight, indices=indices)
    device, dtype, index_dtype = _described(name, "weight", weight, indices)
    shape = checked_shape(name, "weight", weight.shape)
    _checked_padding(name, padding_idx, shape[0])
    leading = tuple(indices.shape)
    descriptor = IndexSelectDescriptor(shape, leading, dtype, index_dtype, negative)
    y = functional.empty((*leading, *shape[1:]), dtype, weight)
    with named(name, indices_shape="indices", shape="weight"):
        plan = functional.plan(IndexSelectPlan, descriptor, device)
        return restore(functional.run(plan, weight=weight, indices=indices, y=y))


@overload
def embedding_backward(
    dy: NDArray[ScalarT], indices: SupportsDLPack, num_embeddings: int, padding_idx: int | None = ...
) -> NDArray[ScalarT]: ...
@overload
def embedding_backward(
    dy: DataT, indices: SupportsDLPack, num_embeddings: int, padding_idx: int | None = ...
) -> DataT: ...
@replayed
def embedding_backward(dy: Any, indices: Any, num_embeddings: int, padding_idx: int | None = None) -> Any:
    """Gradient of embedding: the rows of dy summed by index, `dweight[i] = Σ dy[j..]` over the j with index i.

    dy: [*indices.shape, *rest]. num_embeddings: rows of the table. padding_idx: the row whose sources are left out.

    The sums are order-free, see `take_along_axis_backward`; negative indices are out of range. Errors as for
    `take_along_axis`.
    """
    name = "embedding_backward"
    num = _rows(name, "num_embeddings", num_embeddings)
    skipped = _checked_padding(name, padding_idx, num)
    return _index_sum(name, dy, indices, num, "dy", "indices", False, skipped)
