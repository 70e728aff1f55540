"""Values by index, and sums over repeated indices, in torch's spelling."""

from typing import Any

import torch
from torch import Tensor

from isograd.core import encoder
from isograd.core.checks import real_number
from isograd.core.faults import named
from isograd.errors import InvalidProblemError
from isograd.torch.ops_gather import GATHER, SCATTER_ADD
from isograd.torch.ops_rows import EMBEDDING, INDEX_ADD, INDEX_SELECT
from isograd.torch.ops_scaled import SCALED
from isograd.torch.tensors import checked_index, integer, normalized_dim, refuse, require_dense


def enter(operation: str) -> None:
    """Raise inside an encoder, which records plans and not operators."""
    if not torch.compiler.is_compiling() and encoder.recordings:
        encoder.refuse(operation, "the call is isograd.torch's")


def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:  # noqa: A002
    """`torch.gather`: `out[i][j] = input[index[i][j]][j]` for dim 0, and so on along any `dim`.

    input: float16, bfloat16, float32 or float64, rank 0 to 8, any strides. index: int32, int64 or uint32 of the same
    rank, no larger than input but along dim; negative indices count from the end, repeated ones are welcome.

    The stored bits are copied. The gradient adds repeated indices order-free: it has the same bits on every run and
    device. Differentiable any number of times, in reverse and in forward mode; index has no gradient.

    Raises IndexOutOfRangeError on the CPU for an index out of range; on a GPU that element is NaN and
    `isograd.check()` raises. InvalidProblemError for shapes that do not fit, DeviceMismatchError for two devices,
    UnsupportedError for another dtype or `sparse_grad`.
    """
    enter("gather")
    require_dense("gather", input, "input")
    index = checked_index("gather", index, "index")
    refuse("gather", False, sparse_grad=sparse_grad)
    return GATHER(input, integer("gather", "dim", dim), index)  # type: ignore[no-any-return]


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:  # noqa: A002
    """`torch.take_along_dim`: gather with broadcasting in the dimensions other than `dim`; None flattens both.

    Where input is broadcast its gradient is one order-free sum over all that read an element. Arguments and errors as
    for `gather`.
    """
    if torch.compiler.is_compiling():
        return _take_along_dim(input, indices, dim)
    with named("take_along_dim", index="indices"):
        return _take_along_dim(input, indices, dim)


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None) -> Tensor:  # noqa: A002
    name = "take_along_dim"
    enter(name)
    require_dense(name, input, "input")
    indices = checked_index(name, indices, "indices")
    if dim is None:
        return GATHER(input.reshape(-1), 0, indices.reshape(-1))  # type: ignore[no-any-return]
    if input.dim() != indices.dim():
        raise InvalidProblemError(
            f"{name}: indices has shape {tuple(indices.shape)} and input {tuple(input.shape)}; expected the same rank"
        )
    dim = normalized_dim(name, integer(name, "dim", dim), input.shape)
    shared = []
    sizes = list(indices.shape)
    for d, (size, given) in enumerate(zip(input.shape, indices.shape, strict=True)):
        if d == dim or size == given:
            continue
        if size == 1:
            shared.append(d)
        elif given == 1:
            sizes[d] = size
        else:
            raise InvalidProblemError(
                f"{name}: indices has shape {tuple(indices.shape)} and input {tuple(input.shape)}; they cannot be "
                f"broadcast along dimension {d}"
            )
    if sizes != list(indices.shape):
        indices = indices.expand(sizes)
    if not shared:
        return GATHER(input, dim, indices)  # type: ignore[no-any-return]
    # One line of input serves many lines of indices: they become one long line.
    order = [d for d in range(input.dim()) if d != dim and d not in shared]
    first = len(order)
    order += [*shared, dim]
    lines = GATHER(input.permute(order).flatten(first), first, indices.permute(order).flatten(first))
    spread = lines.unflatten(first, [sizes[d] for d in order[first:]])
    result: Tensor = spread.permute([order.index(d) for d in range(len(order))])
    return result


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:  # noqa: A002
    """`torch.scatter_add`: input, with `src[i][j]` added to element `[index[i][j]][j]` for dim 0, and so on.

    input, src: one dtype and rank. index: no larger than src, nor than input but along dim. All that is added to one
    element is one order-free sum, rounded once and added to it once; an element without sources keeps its bits.

    Differentiable as `gather`, whose dtypes and errors it has. Under CUDA autocast the wider of two dtypes is taken, as
    with torch's own.
    """
    enter("scatter_add")
    require_dense("scatter_add", input, "input")
    index = checked_index("scatter_add", index, "index")
    require_dense("scatter_add", src, "src")
    return SCATTER_ADD(input, integer("scatter_add", "dim", dim), index, src)  # type: ignore[no-any-return]


def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:  # noqa: A002
    """`torch.index_add`: input, with slice i of `alpha * source` added to its slice `index[i]` along `dim`.

    index: one dimension; as in torch, negative indices are out of range. source: as input but along dim. alpha: a
    number; products are rounded to source's dtype. Sums, derivatives and errors as for `scatter_add`.
    """
    enter("index_add")
    require_dense("index_add", input, "input")
    index = checked_index("index_add", index, "index")
    require_dense("index_add", source, "source")
    if torch.compiler.is_compiling():  # alpha may be a symbol, which a sum turns into an input of the graph
        zero = torch.zeros((), dtype=torch.float64, device=source.device)
        source = SCALED(source, zero + real_number("index_add", "alpha", alpha))
    elif alpha != 1:
        factor = torch.full((), real_number("index_add", "alpha", alpha), dtype=torch.float64, device=source.device)
        source = SCALED(source, factor)
    return INDEX_ADD(input, integer("index_add", "dim", dim), index, source)  # type: ignore[no-any-return]


def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    """`torch.index_select`: the slices of input at the places in `index` along `dim`.

    index: one dimension; as in torch, negative indices are out of range. Derivatives and errors as for `gather`.
    """
    enter("index_select")
    require_dense("index_select", input, "input")
    index = checked_index("index_select", index, "index")
    return INDEX_SELECT(input, integer("index_select", "dim", dim), index)  # type: ignore[no-any-return]


def embedding(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding`: the rows of `weight` [num, dim] at the places in `input`, of any shape.

    padding_idx: a row that receives no gradient, counted from the end if negative. The gradient of a row is the
    order-free sum over all its places. Indices below zero are out of range. Derivatives and errors as for `gather`.

    UnsupportedError for max_norm (which changes weight), scale_grad_by_freq and sparse.
    """
    name = "embedding"
    enter(name)
    input = checked_index(name, input, "input")  # noqa: A001
    require_dense(name, weight, "weight")
    refuse(name, None, max_norm=max_norm)
    refuse(name, False, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
    if padding_idx is None:
        return EMBEDDING(weight, input)  # type: ignore[no-any-return]
    row: Any = integer(name, "padding_idx", padding_idx)
    if weight.dim() != 2 or not -weight.shape[0] <= row < weight.shape[0]:
        raise InvalidProblemError(f"{name}: padding_idx is {row} for a weight of shape {tuple(weight.shape)}")
    return EMBEDDING(weight, input, row if row >= 0 else row + weight.shape[0])  # type: ignore[no-any-return]
