"""rotary in torch's spelling, with tables that are looked up and broadcast, and its derivatives beyond the first."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.core.faults import named
from isograd.errors import InvalidProblemError
from isograd.ops.rotary.operation import ROTARY, ROTARY_BACKWARD
from isograd.torch import bind, sharding
from isograd.torch.indexing import embedding
from isograd.torch.tensors import normalized_dim, or_zeros, require_tensor, work_dtype

Named = Mapping[str, Any]


def _second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradient of the gradient, which is a rotation."""
    return {"dy": _forward.call(grads["dx"], saved["cos"], saved["sin"], *settings)}


def _second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    dy = or_zeros(tangents["dy"], saved["dy"])
    result: Tensor = _backward.call(dy, saved["cos"], saved["sin"], *settings)
    return result


def _tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    result: Tensor = _forward.call(tangents["x"], saved["cos"], saved["sin"], *settings)
    return result


_backward = bind.operator(ROTARY_BACKWARD, derivative=_second, tangent=_second_tangent)
_forward = bind.operator(ROTARY, tangent=_tangent)
_rotary = bind.function(_forward)
for _bound in (_backward, _forward):  # a row does not depend on where it is
    sharding.add(_bound.op.name, _bound.cuts)


def _rows(name: str, table: Tensor, argument: str, x: Tensor, positions: Tensor | None, dim: int) -> Tensor:
    """The rows of a table for every position, or for every position of every sequence."""
    length = x.shape[dim]
    if positions is not None and table.dim() == 2:
        if torch.compiler.is_compiling():
            return embedding(positions, table)
        with named(name, input="positions", weight=argument):
            return embedding(positions, table)
    if positions is None and table.dim() == 2 and table.shape[0] >= length:
        return table[:length]
    batches = (1, x.shape[0]) if dim else (1,)
    if positions is None and table.dim() == 3 and table.shape[0] in batches and table.shape[1] == length:
        return table if dim else table[0]
    accepted = (
        "[P, R / 2]" if positions is not None else f"[P, R / 2] with P at least {length}, or [B, {length}, R / 2]"
    )
    raise InvalidProblemError(f"{name}: {argument} has shape {tuple(table.shape)}; accepted: {accepted}")


def _table(name: str, table: Any, argument: str, x: Tensor, positions: Tensor | None, dim: int) -> Tensor:
    """Rows of a table as they are broadcast over x without its last dimension."""
    require_tensor(name, table, argument)
    rows = _rows(name, table, argument, x, positions, dim).to(work_dtype(x.dtype))
    shape = [1] * x.dim()
    shape[dim], shape[-1] = x.shape[dim], rows.shape[-1]
    if rows.dim() == 3:
        shape[0] = rows.shape[0]
    return rows.view(shape).expand(*x.shape[:-1], rows.shape[-1])


def rotary(
    input: Tensor,  # noqa: A002
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    dim: int = -2,
    interleaved: bool = False,
) -> Tensor:
    """Rotary position embeddings of queries or keys; bits and errors as `isograd.rotary`.

    input: float16, bfloat16, float32 or float64; positions along `dim`, the elements of a head along the last
    dimension, any other dimensions: [B, H, L, D] by default, [B, L, H, D] with dim=-3. cos, sin: a table [P, R / 2],
    R at most D and the rest copied, as `isograd.rotary_table` makes it for P positions; heads share it in the kernel.
    positions: rows of the table, int64 or int32 [L] or [B, L]; without, the first L, or a table that has a row for each
    position already, [B, L, R / 2] or [1, L, R / 2]. interleaved: pairs are neighbours,
    as in RoFormer and GPT-J, instead of elements R / 2 apart, as in Llama and GPT-NeoX.

    Differentiable in input any number of times.

    Raises InvalidProblemError for shapes that do not match, IndexOutOfRangeError for a position that is not in the
    table, UnsupportedError for another dtype.
    """
    name = "rotary"
    require_tensor(name, input, "input")
    if input.dim() < 2:
        raise InvalidProblemError(f"{name}: input has shape {tuple(input.shape)}; expected at least two dimensions")
    place = normalized_dim(name, dim, input.shape)
    if place == input.dim() - 1:
        raise InvalidProblemError(f"{name}: dim is {dim}; accepted: a dimension before the last")
    if positions is not None:
        require_tensor(name, positions, "positions")
        accepted = [(input.shape[place],), *([(input.shape[0], input.shape[place])] if place else [])]
        if tuple(positions.shape) not in accepted:
            raise InvalidProblemError(
                f"{name}: positions has shape {tuple(positions.shape)}; accepted: {' or '.join(map(str, accepted))}"
            )
    tables = [_table(name, t, key, input, positions, place) for key, t in (("cos", cos), ("sin", sin))]
    y: Tensor = _rotary((input, *tables), (interleaved,))
    return y
