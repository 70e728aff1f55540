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


def _table(name: str, table: Any, argument: str, x: Tensor, positions: Tensor | None, dim: int) -> Tensor:
    """Rows of a table at the positions, as they are broadcast over x without its last dimension."""
    require_tensor(name, table, argument)
    length = x.shape[dim]
    if table.dim() != 2 or (positions is None and table.shape[0] < length):
        raise InvalidProblemError(
            f"{name}: {argument} has shape {tuple(table.shape)}; expected two dimensions, positions and pairs"
            + (f", with at least {length} positions" if positions is None else "")
        )
    if positions is None:
        found = table[:length]
    elif torch.compiler.is_compiling():
        found = embedding(positions, table)
    else:
        with named(name, input="positions", weight=argument):
            found = embedding(positions, table)
    shape = [1] * x.dim()
    shape[dim], shape[-1] = length, table.shape[-1]
    if found.dim() == 3:
        shape[0] = found.shape[0]
    result: Tensor = found.to(work_dtype(x.dtype)).view(shape).expand(*x.shape[:-1], table.shape[-1])
    return result


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
    positions: rows of the table, int64 or int32 [L] or [B, L]; without, the first L. interleaved: pairs are neighbours,
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
