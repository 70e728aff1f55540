"""The operators of order-free products of several experts, each on rows of its own.

    grouped_matmul(Tensor input, Tensor other, Tensor offsets, bool weight=False) -> Tensor
    grouped_outer(Tensor input, Tensor other, Tensor offsets, bool tokens=False) -> Tensor

Rows offsets[e] to offsets[e + 1] are those of expert e. `grouped_matmul` multiplies the rows of input [R, K] by their
expert's matrix of other [E, K, N]. `grouped_outer` multiplies an expert's rows of input [R, M], transposed, by those of
other [R, N], to [E, M, N]. Products are those of 16-bit integers (rule 10), with a balance for each expert: of its
matrix as a weight, or over its tokens. The gradients of either are such products, so both are differentiable any number
of times. On a GPU an operator is one product for all experts, whose offsets nobody waits for.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from isograd.core import arrays, faults
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.numerics import matmul as product
from isograd.numerics import numba_int16
from isograd.runtime.fenv import default_environment
from isograd.torch import define
from isograd.torch.ops_matmul import Dims, Saved, on_gpu, stacked
from isograd.torch.tensors import (
    INDEX_DTYPES,
    empty,
    require_device,
    require_same_dtype,
    require_storage,
    usable,
    usable_index,
)


def _require(name: str, input: Tensor, other: Tensor, offsets: Tensor) -> None:  # noqa: A002
    require_device(name, input=input, other=other, offsets=offsets)
    require_storage(name, input, "input")
    require_same_dtype(name, other, "other", input, "input")
    if input.dtype is torch.float64:
        raise UnsupportedError(f"{name}: input has dtype float64; accepted: float16, bfloat16, float32")
    if offsets.dtype not in INDEX_DTYPES or offsets.dim() != 1 or not offsets.shape[0]:
        raise InvalidProblemError(f"{name}: offsets is {offsets.dtype} with shape {tuple(offsets.shape)}")


def _matmul_fake(input: Tensor, other: Tensor, offsets: Tensor, weight: bool = False) -> Tensor:  # noqa: A002
    _require("grouped_matmul", input, other, offsets)
    fits = input.dim() == 2 and other.dim() == 3 and input.shape[1] == other.shape[1]
    if not fits or offsets.shape[0] != other.shape[0] + 1:
        raise InvalidProblemError(
            f"grouped_matmul: input, other and offsets have shapes {tuple(input.shape)}, {tuple(other.shape)} and "
            f"{tuple(offsets.shape)}; expected [rows, terms], [experts, terms, columns] and [experts + 1]"
        )
    return empty((input.shape[0], other.shape[2]), input)


def _outer_fake(input: Tensor, other: Tensor, offsets: Tensor, tokens: bool = False) -> Tensor:  # noqa: A002
    _require("grouped_outer", input, other, offsets)
    if input.dim() != 2 or other.dim() != 2 or input.shape[0] != other.shape[0]:
        raise InvalidProblemError(
            f"grouped_outer: input and other have shapes {tuple(input.shape)} and {tuple(other.shape)}; expected "
            "matrices with as many rows"
        )
    return empty((offsets.shape[0] - 1, input.shape[1], other.shape[1]), input)


def _ends(name: str, offsets: Tensor, rows: int) -> list[tuple[int, int]]:
    """The rows of each expert, on the CPU."""
    ends = offsets.tolist()
    if ends[0] != 0 or ends[-1] != rows or any(a > b for a, b in itertools.pairwise(ends)):
        raise InvalidProblemError(f"{name}: offsets are {ends} for {rows} rows")
    return list(itertools.pairwise(ends))


def _require_terms(name: str, terms: int) -> None:
    if terms > product.MAX_TERMS:
        raise UnsupportedError(
            f"{name}: the contracted axis has {terms} elements; supported: up to {product.MAX_TERMS}"
        )


def _matmul(input: Tensor, other: Tensor, offsets: Tensor, weight: bool = False) -> Tensor:  # noqa: A002
    name = "grouped_matmul"
    out = _matmul_fake(input, other, offsets, weight)
    a, b, ends = usable(name, "input", input), usable(name, "other", other), usable_index(name, "offsets", offsets)
    _require_terms(name, a.shape[1])
    if on_gpu(name, input):
        from isograd.products import grouped

        clean = grouped.checked_offsets("grouped_linear", ends, a.shape[0])
        grouped.product_of_rows(a, b, clean, out, weight)
        faults.after_launch(input.device)
        return out
    x, w, y = (arrays.numpy_view(t) for t in (a, b, out))
    for e, (start, stop) in enumerate(_ends(name, ends, a.shape[0])):
        with default_environment():
            balance = numba_int16.balance_of(w[e]) if weight else None
        y[start:stop] = product.matmul(x[start:stop], w[e], "int16", balance)
    return out


def _outer(input: Tensor, other: Tensor, offsets: Tensor, tokens: bool = False) -> Tensor:  # noqa: A002
    name = "grouped_outer"
    out = _outer_fake(input, other, offsets, tokens)
    a, b, ends = usable(name, "input", input), usable(name, "other", other), usable_index(name, "offsets", offsets)
    _require_terms(name, a.shape[0])
    if on_gpu(name, input):
        from isograd.products import grouped

        clean = grouped.checked_offsets("grouped_linear", ends, a.shape[0])
        grouped.product_along_rows(a, b, clean, out, tokens)
        faults.after_launch(input.device)
        return out
    x, y, z = (arrays.numpy_view(t) for t in (a, b, out))
    for e, (start, stop) in enumerate(_ends(name, ends, a.shape[0])):
        left, right = x[start:stop].T, y[start:stop]
        with default_environment():
            balance = numba_int16.balance_between(left, right) if tokens else None
        z[e] = product.matmul(left, right, "int16", balance)
    return out


def _save(node: Any, inputs: Saved, out: Tensor) -> Saved:
    node.balanced = inputs[3]
    return inputs[:3]


def _differentiate_matmul(node: Any, saved: Saved, g: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets = saved
    da = GROUPED_MATMUL(g, b.mT, offsets, node.balanced) if node.needs_input_grad[0] else None
    return da, GROUPED_OUTER(a, g, offsets, node.balanced) if node.needs_input_grad[1] else None


def _differentiate_outer(node: Any, saved: Saved, g: Tensor) -> tuple[Tensor | None, ...]:
    a, b, offsets = saved
    da = GROUPED_MATMUL(b, g.mT, offsets) if node.needs_input_grad[0] else None
    return da, GROUPED_MATMUL(a, g, offsets) if node.needs_input_grad[1] else None


def _push(op: define.Operator, node: Any, saved: Saved, t_input: Tensor | None, t_other: Tensor | None) -> Tensor:
    a, b, offsets = saved
    parts: list[Tensor] = [] if t_input is None else [op(t_input, b, offsets, node.balanced)]
    parts += [] if t_other is None else [op(a, t_other, offsets, node.balanced)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _batch(op: define.Operator, size: int, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    return stacked(op, size, (*in_dims, *[None] * (len(args) - len(in_dims))), args)


GROUPED_MATMUL: define.Operator = define.operator(
    "grouped_matmul(Tensor input, Tensor other, Tensor offsets, bool weight=False) -> Tensor",
    run=_matmul,
    fake=_matmul_fake,
    gradient=define.Gradient(
        _save, _differentiate_matmul, lambda node, saved, x, y, *rest: _push(GROUPED_MATMUL, node, saved, x, y)
    ),
    batch=_batch,
)
GROUPED_OUTER: define.Operator = define.operator(
    "grouped_outer(Tensor input, Tensor other, Tensor offsets, bool tokens=False) -> Tensor",
    run=_outer,
    fake=_outer_fake,
    gradient=define.Gradient(
        _save, _differentiate_outer, lambda node, saved, x, y, *rest: _push(GROUPED_OUTER, node, saved, x, y)
    ),
    batch=_batch,
)
