"""Operators with one index for a row: rows selected, rows added onto rows, embeddings.

    index_select(Tensor input, int dim, Tensor index) -> Tensor
    index_select_backward(Tensor grad, int dim, Tensor index, SymInt[] size) -> Tensor
    index_add(Tensor input, int dim, Tensor index, Tensor source) -> Tensor
    embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1) -> Tensor
    embedding_backward(Tensor grad, Tensor indices, SymInt num_embeddings, SymInt padding_idx=-1) -> Tensor

Linear as those of `ops_gather`, with the order-free sums of `isograd.embedding_backward`. As in torch, an index is not
negative; a `padding_idx` below zero stands for none.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.core.faults import named
from isograd.errors import InvalidProblemError
from isograd.gather.plans import IndexSelectPlan, IndexSumPlan
from isograd.torch import define, members
from isograd.torch.tensors import (
    NAMES,
    Shape,
    empty,
    like,
    normalized_dim,
    require_device,
    require_same_dtype,
    require_storage,
    run,
    usable,
    usable_index,
    zeros_or,
)

# What the arguments of plans are called here.
_NAMES = {"indices": "index", "indices_shape": "index", "shape": "input", "axis": "dim"}


def _require_vector(operation: str, index: Tensor) -> None:
    if index.dim() > 1:
        raise InvalidProblemError(f"{operation}: index has shape {tuple(index.shape)}; expected one dimension")


def _rows(num: int, x: Tensor, indices: Tensor) -> tuple[Shape, Shape, str, str, bool]:
    """The fields of a descriptor over rows, for x with or without its first dimension; no negative indices."""
    return (num, *x.shape[1:]), indices.shape, NAMES[x.dtype], NAMES[indices.dtype], False


def _index_select_fake(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    require_device("index_select", input=input, index=index)
    require_storage("index_select", input, "input")
    dim = normalized_dim("index_select", dim, input.shape)
    _require_vector("index_select", index)
    if input.dim() == 0:
        _require_length("index_select", index, 1)
        return empty((), input)
    return empty((*input.shape[:dim], index.numel(), *input.shape[dim + 1 :]), input)


def _require_length(operation: str, index: Tensor, length: int) -> None:
    if index.numel() != length:
        raise InvalidProblemError(f"{operation}: index has shape {tuple(index.shape)}; expected {length} elements")


def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    y = _index_select_fake(input, dim, index)
    weight, indices = usable("index_select", "input", input), usable_index("index_select", "index", index)
    if y.numel() == 0:
        return y
    dim = normalized_dim("index_select", dim, weight.shape)
    weight = weight.movedim(dim, 0)
    rows = (y if y.dim() else y.view(1)).movedim(dim, 0)
    with named("index_select", at=dim, **_NAMES):
        run(IndexSelectPlan, y.device, _rows(weight.shape[0], weight, indices), weight=weight, indices=indices, y=rows)
    return y


def _index_select_backward_fake(grad: Tensor, dim: int, index: Tensor, size: Shape) -> Tensor:
    name = "index_select_backward"
    require_device(name, grad=grad, index=index)
    require_storage(name, grad, "grad")
    _require_vector(name, index)
    _require_rows(name, grad, "grad", dim, index, size)
    return empty(size, grad)


def _require_rows(operation: str, source: Tensor, name: str, dim: int, index: Tensor, size: Shape) -> None:
    """Raise unless source has the given size but for one element of index along dim."""
    dim = normalized_dim(operation, dim, torch.Size(size))
    expected = (*size[:dim], index.numel(), *size[dim + 1 :]) if len(size) else ()
    if tuple(source.shape) != expected:
        raise InvalidProblemError(f"{operation}: {name} has shape {tuple(source.shape)}; expected {expected}")
    if not len(size):
        _require_length(operation, index, 1)


def _index_select_backward(grad: Tensor, dim: int, index: Tensor, size: Shape) -> Tensor:
    name = "index_select_backward"
    dx = _index_select_backward_fake(grad, dim, index, size)
    values, indices = usable(name, "grad", grad), usable_index(name, "index", index)
    if values.numel() == 0:
        return dx.zero_()
    out = dx if dx.dim() else dx.view(1)
    dim = normalized_dim(name, dim, out.shape)
    values, out = values.movedim(dim, 0), out.movedim(dim, 0)
    with named(name, at=dim, **_NAMES):
        run(IndexSumPlan, dx.device, _rows(out.shape[0], values, indices), indices=indices, values=values, out=out)
    return dx


def _index_add_fake(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:  # noqa: A002
    require_device("index_add", input=input, index=index, source=source)
    require_storage("index_add", input, "input")
    require_same_dtype("index_add", source, "source", input, "input")
    _require_vector("index_add", index)
    _require_rows("index_add", source, "source", dim, index, input.shape)
    return empty(input.shape, input)


def _index_add(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:  # noqa: A002
    result = _index_add_fake(input, dim, index, source)
    x, indices, values = (
        usable("index_add", "input", input),
        usable_index("index_add", "index", index),
        usable("index_add", "source", source),
    )
    if values.numel() == 0:
        return result.copy_(input)
    out = result if result.dim() else result.view(1)
    dim = normalized_dim("index_add", dim, out.shape)
    x, values, out = x.movedim(dim, 0), values.movedim(dim, 0), out.movedim(dim, 0)
    fields = (*_rows(x.shape[0], x, indices), True)
    with named("index_add", at=dim, **_NAMES):
        run(IndexSumPlan, x.device, fields, indices=indices, values=values, x=x, out=out)
    return result


def _embedding_fake(weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    require_device("embedding", weight=weight, input=indices)
    require_storage("embedding", weight, "weight")
    if weight.dim() != 2:
        raise InvalidProblemError(f"embedding: weight has shape {tuple(weight.shape)}; expected two dimensions")
    return empty((*indices.shape, weight.shape[1]), weight)


def _embedding(weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    y = _embedding_fake(weight, indices, padding_idx)
    table, places = usable("embedding", "weight", weight), usable_index("embedding", "input", indices)
    if y.numel() == 0:
        return y
    rows = y if indices.dim() else y.unsqueeze(0)
    with named("embedding", indices="input", indices_shape="input"):
        run(IndexSelectPlan, y.device, _rows(table.shape[0], table, places), weight=table, indices=places, y=rows)
    return y


def _embedding_backward_fake(grad: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int = -1) -> Tensor:
    name = "embedding_backward"
    require_device(name, grad=grad, indices=indices)
    require_storage(name, grad, "grad")
    if tuple(grad.shape[:-1]) != tuple(indices.shape) or grad.dim() == 0:
        raise InvalidProblemError(
            f"{name}: grad has shape {tuple(grad.shape)} and indices {tuple(indices.shape)}; expected one row for each"
        )
    return empty((num_embeddings, grad.shape[-1]), grad)


def _embedding_backward(grad: Tensor, indices: Tensor, num_embeddings: int, padding_idx: int = -1) -> Tensor:
    name = "embedding_backward"
    dweight = _embedding_backward_fake(grad, indices, num_embeddings, padding_idx)
    values, places = usable(name, "grad", grad), usable_index(name, "indices", indices)
    if values.numel() == 0:
        return dweight.zero_()
    if not indices.dim():
        values = values.unsqueeze(0)
    fields = (dweight.shape, places.shape, NAMES[values.dtype], NAMES[places.dtype], False, False)
    skipped = None if padding_idx < 0 else padding_idx
    with named(name, indices_shape="indices"):
        run(IndexSumPlan, dweight.device, (*fields, skipped), indices=places, values=values, out=dweight)
    return dweight


def _differentiate_embedding_backward(node: Any, saved: tuple[Tensor], g: Tensor) -> tuple[Tensor]:
    (indices,) = saved
    rows = EMBEDDING(g, indices, node.padding_idx)
    if node.padding_idx >= 0:
        rows = rows.masked_fill((indices == node.padding_idx).unsqueeze(-1), 0)
    return (rows,)


def _batch_rows(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """index_select, its gradient and index_add over a batch."""
    places = [i for i in (0, 3) if i < len(args) and isinstance(args[i], Tensor)]
    operands = [define.batched(args[i], in_dims[i], size) for i in places]
    gradient = len(args) == 4 and len(places) == 1
    shape = torch.Size(args[3]) if gradient else operands[0].shape[1:]
    sizes = [size, *(shape or (1,))]
    operands = [t.unsqueeze(1) if t.dim() == 1 else t for t in operands]
    dim = normalized_dim(op.__name__, args[1], shape) + 1
    if in_dims[2] is None:
        first, *others = operands
        out = op(first, dim, args[2], *([sizes] if gradient else others))
    else:  # members one behind the other along dim, each with its own part of the index
        bound = sizes.pop(dim)
        first, *others = [t.movedim(dim, 1).flatten(0, 1) for t in operands]
        index = members.placed(members.lines(args[2].movedim(in_dims[2], 0)), bound)
        out = op(first, 0, index.flatten(), *([[size * bound, *sizes[1:]]] if gradient else others))
        length = bound if len(args) == 4 else index.shape[1]
        out = members.parted(out, size, length).movedim(1, dim)
    return (out if shape else out.squeeze(1)), 0


def _batch_embedding(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
) -> tuple[Tensor, int]:
    index = define.batched(indices, in_dims[1], size)
    if in_dims[0] is None:
        return op(weight, index, padding_idx), 0
    table = weight.movedim(in_dims[0], 0)
    rows = op(table.flatten(0, 1), members.placed(index, table.shape[1]))
    if padding_idx >= 0:  # of every member, which have no gradient
        rows = torch.where((index.long() == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return rows, 0


def _batch_embedding_backward(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    grad: Tensor,
    indices: Tensor,
    num_embeddings: int,
    padding_idx: int = -1,
) -> tuple[Tensor, int]:
    index = define.batched(indices, in_dims[1], size)
    places, rows = members.placed(index, num_embeddings), size * num_embeddings
    padded = padding_idx >= 0
    if padded:  # what belongs to padding goes into one more row
        places = places.masked_fill(index.long() == padding_idx, rows)
    dweight = op(define.batched(grad, in_dims[0], size), places, rows + padded)
    return members.parted(dweight[:rows], size, num_embeddings), 0


def _save_index_add(node: Any, inputs: tuple[Any, ...], out: Tensor) -> tuple[Tensor]:
    input, node.dim, index, source = inputs  # noqa: A001
    node.likes = like(input), like(source)
    return (index,)


def _save_index_select(node: Any, inputs: tuple[Any, ...], y: Tensor) -> tuple[Tensor]:
    input, node.dim, index = inputs  # noqa: A001
    node.size = input.shape
    return (index,)


def _save_index_select_backward(node: Any, inputs: tuple[Any, ...], dx: Tensor) -> tuple[Tensor]:
    _, node.dim, index, node.size = inputs
    return (index,)


def _save_embedding(node: Any, inputs: tuple[Any, ...], y: Tensor) -> tuple[Tensor]:
    weight, indices, node.padding_idx = inputs
    node.num = weight.shape[0]
    return (indices,)


def _save_embedding_backward(node: Any, inputs: tuple[Any, ...], dweight: Tensor) -> tuple[Tensor]:
    _, indices, node.num, node.padding_idx = inputs
    return (indices,)


INDEX_SELECT: define.Operator = define.operator(
    "index_select(Tensor input, int dim, Tensor index) -> Tensor",
    run=_index_select,
    fake=_index_select_fake,
    gradient=define.Gradient(
        _save_index_select,
        lambda node, saved, g: (INDEX_SELECT_BACKWARD(g, node.dim, saved[0], node.size),),
        lambda node, saved, t, *rest: INDEX_SELECT(t, node.dim, saved[0]),
    ),
    batch=_batch_rows,
)
INDEX_SELECT_BACKWARD: define.Operator = define.operator(
    "index_select_backward(Tensor grad, int dim, Tensor index, SymInt[] size) -> Tensor",
    run=_index_select_backward,
    fake=_index_select_backward_fake,
    gradient=define.Gradient(
        _save_index_select_backward,
        lambda node, saved, g: (INDEX_SELECT(g, node.dim, saved[0]),),
        lambda node, saved, t, *rest: INDEX_SELECT_BACKWARD(t, node.dim, saved[0], node.size),
    ),
    batch=_batch_rows,
)
INDEX_ADD: define.Operator = define.operator(
    "index_add(Tensor input, int dim, Tensor index, Tensor source) -> Tensor",
    run=_index_add,
    fake=_index_add_fake,
    gradient=define.Gradient(
        _save_index_add,
        lambda node, saved, g: (
            g,
            None,
            None,
            INDEX_SELECT(g, node.dim, saved[0]) if node.needs_input_grad[3] else None,
        ),
        lambda node, saved, t_input, _, __, t_source: INDEX_ADD(
            zeros_or(t_input, node.likes[0]), node.dim, saved[0], zeros_or(t_source, node.likes[1])
        ),
    ),
    batch=_batch_rows,
)
EMBEDDING: define.Operator = define.operator(
    "embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1) -> Tensor",
    run=_embedding,
    fake=_embedding_fake,
    gradient=define.Gradient(
        _save_embedding,
        lambda node, saved, g: (EMBEDDING_BACKWARD(g, saved[0], node.num, node.padding_idx),),
        lambda node, saved, t, *rest: EMBEDDING(t, saved[0], node.padding_idx),
    ),
    batch=_batch_embedding,
)
EMBEDDING_BACKWARD: define.Operator = define.operator(
    "embedding_backward(Tensor grad, Tensor indices, SymInt num_embeddings, SymInt padding_idx=-1) -> Tensor",
    run=_embedding_backward,
    fake=_embedding_backward_fake,
    gradient=define.Gradient(
        _save_embedding_backward,
        _differentiate_embedding_backward,
        lambda node, saved, t, *rest: EMBEDDING_BACKWARD(t, saved[0], node.num, node.padding_idx),
    ),
    batch=_batch_embedding_backward,
)
