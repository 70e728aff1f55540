"""The operators of order-free matrix products, and of what a linear layer adds to them.

    matmul(Tensor input, Tensor other, str precision="", str balance="") -> Tensor
    add_to_rows(Tensor input, Tensor bias) -> Tensor
    sum_of_rows(Tensor input) -> Tensor

`matmul` takes [..., M, K] and [..., K, N] whose batches broadcast; precision is that of `isograd.matmul`, "" for the
dtype's own. balance, for two matrices (rule 10): "" for none; "other", which is a weight then; "tokens", along whose
axis the product is. The gradients of a product that is balanced by a weight are balanced by it and over tokens. The
gradient of an operand that is broadcast is one product, whose contracted axis the batch joins. `add_to_rows` rounds
once, and its gradient for the bias is a sum by rule 4. All are differentiable any number of times. On GPUs there is
"int16" alone, in the kernels of `isograd.products`.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isograd.core import arrays
from isograd.devices.cuda import unavailable
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.numerics import matmul as product
from isograd.numerics import numba_int16
from isograd.numerics.reference import narrow, widen
from isograd.reduction import api as reduction
from isograd.runtime.fenv import default_environment
from isograd.torch import define
from isograd.torch.tensors import (
    empty,
    or_zeros,
    require_device,
    require_same_dtype,
    require_storage,
    usable,
)

Saved = tuple[Any, ...]
Dims = tuple[int | None, ...]
_BALANCES: dict[str, Any] = {
    "": lambda a, b: None,
    "other": lambda a, b: numba_int16.balance_of(b),
    "tokens": numba_int16.balance_between,
}


@functools.cache
def _missing() -> str | None:
    return unavailable()


def on_gpu(operation: str, tensor: Tensor) -> bool:
    """Whether the kernels of GPUs compute this, and not those of the CPU."""
    if tensor.is_cpu:
        return False
    if not tensor.is_cuda:
        raise UnsupportedError(
            f"{operation}: input is on {tensor.device}; accepted: tensors on the CPU or a CUDA device"
        )
    if (missing := _missing()) is not None:
        raise UnsupportedError(f"{operation}: input is on {tensor.device}: {missing}")
    return True


def stacked(op: define.Operator, size: int, in_dims: Dims, args: tuple[Any, ...]) -> tuple[Tensor, int]:
    """Over a batch, one member after the other."""
    members = [
        define.batched(x, d, size) if isinstance(x, Tensor) else [x] * size for x, d in zip(args, in_dims, strict=True)
    ]
    return torch.stack([op(*[x[i] for x in members]) for i in range(size)]), 0


# --- products --------------------------------------------------------------------------------------------------------
def _matmul_fake(input: Tensor, other: Tensor, precision: str = "", balance: str = "") -> Tensor:  # noqa: A002
    require_device("matmul", input=input, other=other)
    require_storage("matmul", input, "input")
    require_same_dtype("matmul", other, "other", input, "input")
    for name, tensor in (("input", input), ("other", other)):
        if tensor.dim() < 2:
            raise InvalidProblemError(
                f"matmul: {name} has shape {tuple(tensor.shape)}; expected two dimensions at least"
            )
    if input.shape[-1] != other.shape[-2]:
        raise InvalidProblemError(
            f"matmul: input has shape {tuple(input.shape)} and other {tuple(other.shape)}; expected as many columns of "
            f"input ({input.shape[-1]}) as rows of other ({other.shape[-2]})"
        )
    if balance not in _BALANCES or (balance and (input.dim() > 2 or other.dim() > 2)):
        raise InvalidProblemError(f"matmul: balance is {balance!r}; accepted: '', for matrices also 'other', 'tokens'")
    product.checked_precision(np.dtype(_numpy_dtype(input)), precision or None)
    try:
        batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise InvalidProblemError(
            f"matmul: the batches of input {tuple(input.shape)} and other {tuple(other.shape)} do not broadcast"
        ) from None
    return empty((*batch, input.shape[-2], other.shape[-1]), input)


def _numpy_dtype(tensor: Tensor) -> Any:
    return arrays.numpy_dtype(str(tensor.dtype).removeprefix("torch."))


def _matmul(input: Tensor, other: Tensor, precision: str = "", balance: str = "") -> Tensor:  # noqa: A002
    out = _matmul_fake(input, other, precision, balance)
    a, b = usable("matmul", "input", input), usable("matmul", "other", other)
    chosen = product.checked_precision(_numpy_dtype(input), precision or None)
    if on_gpu("matmul", input):
        _matmul_on_gpu(a, b, out, chosen, balance)
    else:
        _matmul_on_cpu(arrays.numpy_view(a), arrays.numpy_view(b), arrays.numpy_view(out), chosen, balance)
    return out


def _matmul_on_cpu(a: Any, b: Any, out: Any, precision: str, balance: str) -> None:
    balanced = None
    if balance and precision == "int16":
        with default_environment():
            balanced = _BALANCES[balance](a, b)
    out[...] = product.matmul(a, b, precision, balanced)


def _matmul_on_gpu(a: Tensor, b: Tensor, out: Tensor, precision: str, balance: str) -> None:
    from isograd.products import cuda

    if precision != "int16":
        raise UnsupportedError(
            f"matmul: precision is {precision!r} for {a.dtype} on {a.device}; accepted on GPUs: 'int16', which is the "
            "default of float16 and bfloat16"
        )
    if a.shape[-1] > product.MAX_TERMS:
        raise UnsupportedError(
            f"matmul: the contracted axis has {a.shape[-1]} elements; supported: up to {product.MAX_TERMS}"
        )
    balances = {"": lambda a, b: None, "other": lambda a, b: cuda.balance_of(b), "tokens": cuda.balance_between}
    cuda.product(a, b, out, balances[balance](a, b) if out.numel() and a.shape[-1] else None)


def _save(node: Any, inputs: Saved, out: Tensor) -> Saved:
    node.settings = inputs[2:]
    return inputs[:2]


def _contracted(left: Tensor, right: Tensor, batch: Any, like: Tensor, precision: str, balance: str) -> Tensor:
    """[*batch, R, P] and [*batch, R, Q] to like's [..., P, Q], summed over R and where like was broadcast."""
    kept = (1,) * (len(batch) + 2 - like.dim()) + tuple(like.shape[:-2])
    folded = [d for d in range(len(batch)) if kept[d] != batch[d]]
    others = [d for d in range(len(batch)) if kept[d] == batch[d]]

    def stacked(x: Tensor) -> Tensor:
        full = x.expand(*batch, *x.shape[-2:]).permute(*others, *folded, len(batch), len(batch) + 1)
        rows = math.prod(batch[d] for d in folded) * x.shape[-2]
        return full.reshape(*[batch[d] for d in others], rows, x.shape[-1])

    found: Tensor = MATMUL(stacked(left).mT, stacked(right), precision, balance)
    return found.reshape(like.shape)


def _differentiate(node: Any, saved: Saved, g: Tensor) -> tuple[Tensor | None, ...]:
    (a, b), (precision, balance), batch = saved, node.settings, g.shape[:-2]
    by_weight, over_tokens = ("other", "tokens") if balance == "other" else ("", "")
    da = db = None
    if node.needs_input_grad[0]:
        da = MATMUL(g, b.mT, precision, by_weight) if by_weight else _contracted(g.mT, b.mT, batch, a, precision, "")
    if node.needs_input_grad[1]:
        db = _contracted(a, g, batch, b, precision, over_tokens)
    return da, db


def _push(node: Any, saved: Saved, t_input: Tensor | None, t_other: Tensor | None, *rest: Any) -> Tensor:
    (a, b), settings = saved, node.settings
    parts: list[Tensor] = [] if t_input is None else [MATMUL(t_input, b, *settings)]
    parts += [] if t_other is None else [MATMUL(a, t_other, *settings)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _batch(op: define.Operator, size: int, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    given: Any = (*args, *("", "")[len(args) - 2 :])  # without what has its default
    a, b, precision, balance = given
    if balance == "other" and in_dims[1] is None:
        rows = define.batched(a, in_dims[0], size)
        found = op(rows.flatten(0, 1), b, precision, balance)
        return found.unflatten(0, rows.shape[:2]), 0
    if balance:
        return stacked(op, size, (*in_dims[:2], None, None), (a, b, precision, balance))
    moved = [define.batched(t, d, size) for t, d in zip((a, b), in_dims, strict=False)]
    rank = max(t.dim() for t in moved)
    aligned = [t.reshape(size, *(1,) * (rank - t.dim()), *t.shape[1:]) for t in moved]
    return op(*aligned, precision, balance), 0


MATMUL: define.Operator = define.operator(
    'matmul(Tensor input, Tensor other, str precision="", str balance="") -> Tensor',
    run=_matmul,
    fake=_matmul_fake,
    gradient=define.Gradient(_save, _differentiate, _push),
    batch=_batch,
)


# --- a bias ----------------------------------------------------------------------------------------------------------
def _add_to_rows_fake(input: Tensor, bias: Tensor) -> Tensor:  # noqa: A002
    require_device("add_to_rows", input=input, bias=bias)
    require_storage("add_to_rows", input, "input")
    require_same_dtype("add_to_rows", bias, "bias", input, "input")
    if input.dim() != 2 or bias.shape != input.shape[1:]:
        raise InvalidProblemError(
            f"add_to_rows: input has shape {tuple(input.shape)} and bias {tuple(bias.shape)}; expected a matrix and "
            "one number for each of its columns"
        )
    return empty(input.shape, input)


def _add_to_rows(input: Tensor, bias: Tensor) -> Tensor:  # noqa: A002
    out = _add_to_rows_fake(input, bias)
    rows, row = usable("add_to_rows", "input", input), usable("add_to_rows", "bias", bias)
    if on_gpu("add_to_rows", input):
        from isograd.products import cuda

        cuda.add_to_rows(rows, row, out)
        return out
    x, b = arrays.numpy_view(rows), arrays.numpy_view(row)
    with default_environment(), np.errstate(all="ignore"):
        arrays.numpy_view(out)[...] = narrow(widen(x) + widen(b), x.dtype)
    return out


def _batch_rows(op: define.Operator, size: int, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
    if in_dims[1] is not None:
        return stacked(op, size, in_dims, args)
    x = define.batched(args[0], in_dims[0], size)
    return op(x.flatten(0, 1), args[1]).unflatten(0, x.shape[:2]), 0


ADD_TO_ROWS: define.Operator = define.operator(
    "add_to_rows(Tensor input, Tensor bias) -> Tensor",
    run=_add_to_rows,
    fake=_add_to_rows_fake,
    gradient=define.Gradient(
        lambda node, inputs, out: (out,),
        lambda node, saved, g: (g, SUM_OF_ROWS(g) if node.needs_input_grad[1] else None),
        lambda node, saved, t, t_bias: or_zeros(t, saved[0]) + (0 if t_bias is None else t_bias),
    ),
    batch=_batch_rows,
)


def _sum_of_rows_fake(input: Tensor) -> Tensor:  # noqa: A002
    require_storage("sum_of_rows", input, "input")
    if input.dim() != 2:
        raise InvalidProblemError(f"sum_of_rows: input has shape {tuple(input.shape)}; expected a matrix")
    return empty(input.shape[1:], input)


def _sum_of_rows(input: Tensor) -> Tensor:  # noqa: A002
    out = _sum_of_rows_fake(input)
    if on_gpu("sum_of_rows", input):
        from isograd.reduction import cuda

        return cuda.sum(usable("sum_of_rows", "input", input), 0)
    arrays.numpy_view(out)[...] = reduction.sum(arrays.numpy_view(usable("sum_of_rows", "input", input)), 0)
    return out


def _batch_sum(op: define.Operator, size: int, in_dims: Dims, *args: Tensor) -> tuple[Tensor, int]:
    x = define.batched(args[0], in_dims[0], size)
    return op(x.transpose(0, 1).flatten(1)).unflatten(0, (size, x.shape[2])), 0


def _save_shape(node: Any, inputs: Saved, out: Tensor) -> Saved:
    node.shape = inputs[0].shape
    return ()


SUM_OF_ROWS: define.Operator = define.operator(
    "sum_of_rows(Tensor input) -> Tensor",
    run=_sum_of_rows,
    fake=_sum_of_rows_fake,
    gradient=define.Gradient(
        _save_shape,
        lambda node, saved, g: (g.expand(node.shape),),
        lambda node, saved, t: SUM_OF_ROWS(t),
    ),
    batch=_batch_sum,
)
