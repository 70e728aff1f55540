"""From the losses of rows to a loss: order-free sums, and what a mean divides by.

What is computed here has one element or one a row. On the CPU it is NumPy's, for tensors there too.
"""

import sys
from typing import Any

import numpy as np

from isograd.core import arrays, encoder, functional
from isograd.core.checks import real_number
from isograd.errors import DeviceMismatchError, InvalidProblemError
from isograd.losses.cross_entropy_plans import check_targets
from isograd.reduction import api as sums
from isograd.runtime.fenv import default_environment

REDUCTIONS = ("mean", "sum", "none")


def on_gpu(array: Any) -> bool:
    """Whether an array is a tensor outside the CPU's memory."""
    return arrays.is_tensor(array) and not array.is_cpu


def plain(array: Any) -> Any:
    """A tensor on the CPU as NumPy sees it; everything else as it is."""
    return arrays.numpy_view(array) if arrays.is_tensor(array) and array.is_cpu else array


def counted(operation: str, count: Any) -> float:
    """A plain number that a mean divides by; arrays, which may be on a GPU, are not looked into."""
    number = real_number(operation, "count", count)
    if number == 0:
        raise InvalidProblemError(f"{operation}: count is {count!r}; expected a number other than 0")
    return number


def checked_count(operation: str, value: Any, like: Any) -> Any:
    """What a mean divides by: a number as a float, or None.

    A tensor without dimensions on the GPU of `like` stays one: reading it would wait for the GPU.
    """
    if value is None or not (arrays.is_tensor(value) or isinstance(value, np.ndarray)):
        return None if value is None else counted(operation, value)
    if tuple(value.shape) or not _is_real(value):
        raise InvalidProblemError(
            f"{operation}: count has shape {tuple(value.shape)} and dtype {value.dtype}; expected a number, or an "
            "array of numbers without dimensions"
        )
    if not on_gpu(value):
        return float(value.detach() if arrays.is_tensor(value) else value)
    if not arrays.is_tensor(like) or like.device != value.device:
        place = like.device if arrays.is_tensor(like) else "cpu"
        raise DeviceMismatchError(
            f"{operation}: count is on {value.device} and what is computed on {place}; expected the same or the CPU"
        )
    return value.detach()


def _is_real(array: Any) -> bool:
    if arrays.is_tensor(array):
        return not array.is_complex() and array.dtype is not sys.modules["torch"].bool
    return array.dtype.kind in "iuf"


def scalar(value: Any, work: str, like: Any) -> Any:
    """A number of the work type as an array on the device of `like`, where a tensor is already."""
    if arrays.is_tensor(value):
        torch = sys.modules["torch"]
        return value.to(torch.float64).to(getattr(torch, work))
    with default_environment(), np.errstate(all="ignore"):
        rounded = np.array(value, work)
        if not on_gpu(like):
            return rounded
        torch = sys.modules["torch"]
        return torch.full((), float(rounded), dtype=getattr(torch, work), device=like.device)


def converted(array: Any, work: str) -> Any:
    """An array of a storage type in its work type."""
    if not on_gpu(array):
        return plain(array).astype(work, copy=False)
    return array.to(getattr(sys.modules["torch"], work))


def rounded(array: Any, work: str) -> Any:
    """Real numbers of any dtype as `scalar` rounds them."""
    if on_gpu(array):
        return scalar(array, work, array)
    with default_environment(), np.errstate(all="ignore"):
        return plain(array).astype(np.float64).astype(work)


def like(value: Any, work: str, array: Any) -> Any:
    """A result without dimensions as the kind of `array`, which is a tensor on the CPU at most where it is NumPy's."""
    if not arrays.is_tensor(array) or on_gpu(array):
        return value
    out = functional.empty((), work, array)
    arrays.numpy_view(out)[...] = value
    return out


def row_gradients(
    operation: str, dloss: Any, work: str, array: Any, row_shape: tuple[int, ...], reduction: str, divisor: Any
) -> Any:
    """The gradient of every row's loss from that of the reduced loss, in the rows' shape.

    dloss: a number, None for 1, or an array of the loss's shape. array: what is computed on. divisor: a function that
    returns what a mean divides by.
    """
    if dloss is None or isinstance(dloss, (int, float, np.number)):
        dloss = scalar(1.0 if dloss is None else real_number(operation, "dloss", dloss), work, array)
    _, dtype = arrays.describe(dloss, operation, "dloss")
    if dtype != work:
        raise InvalidProblemError(f"{operation}: dloss has dtype {dtype}; expected {work}")
    accepted = [(), row_shape] if reduction == "none" else [()]
    if tuple(dloss.shape) not in accepted:
        expected = " or ".join(map(str, accepted))
        raise InvalidProblemError(f"{operation}: dloss has shape {tuple(dloss.shape)}; expected {expected}")
    if reduction == "mean":
        encoder.refuse(operation, 'reduction is "mean"')
        dloss = divided(dloss, divisor())
    return functional.expanded(dloss, row_shape)


def reduced(operation: str, losses: Any, work: str, array: Any, reduction: str, divisor: Any) -> Any:
    """The losses after the reduction, of the kind of `array`; `divisor` as above."""
    if reduction == "none":
        return losses
    encoder.refuse(operation, f'reduction is "{reduction}"')
    loss = total(losses)
    return like(divided(loss, divisor()) if reduction == "mean" else loss, work, array)


def checked_reduction(operation: str, name: Any) -> str:
    """The name of a reduction; InvalidProblemError for another."""
    if not isinstance(name, str) or name not in REDUCTIONS:
        accepted = ", ".join(map(repr, REDUCTIONS))
        raise InvalidProblemError(f"{operation}: reduction is {name!r}; accepted: {accepted}")
    return name


def checked_weight(operation: str, argument: str, weight: Any, classes: int, dtype: str, work: str) -> Any:
    """Weights of classes in the work type; InvalidProblemError unless they are of the storage or the work type."""
    _, given = arrays.describe(weight, operation, argument)
    if given not in (dtype, work):
        accepted = dtype if dtype == work else f"{dtype}, {work}"
        raise InvalidProblemError(f"{operation}: {argument} has dtype {given}; accepted: {accepted}")
    if tuple(weight.shape) != (classes,):
        raise InvalidProblemError(f"{operation}: {argument} has shape {tuple(weight.shape)}; expected {(classes,)}")
    recording = encoder.current() if encoder.recordings else None
    if recording is None or given == work:
        return converted(weight, work)
    functional.refuse_gradients(operation, {argument: weight})
    return recording.converted(weight, functional.empty(tuple(weight.shape), work, weight))


def divided(a: Any, b: Any) -> Any:
    """The quotient in the work type, rounded once, its NaN the canonical one."""
    if on_gpu(a):
        from isograd.losses import cross_entropy_cuda

        return cross_entropy_cuda.divided(a, b)
    with default_environment(), np.errstate(all="ignore"):
        quotient = np.asarray(plain(a) / plain(b))
        return np.where(np.isnan(quotient), quotient.dtype.type(np.nan), quotient)


def total(values: Any) -> Any:
    """The order-free sum of all elements."""
    if on_gpu(values):
        from isograd.losses import cross_entropy_cuda

        return cross_entropy_cuda.total(values)
    return sums.sum(plain(values))


def target_total(operation: str, targets: Any, weight: Any, classes: int, ignore_index: int, work: str) -> Any:
    """The number of targets that are not ignored or, given weights of the classes, the order-free sum of theirs."""
    if on_gpu(targets):
        from isograd.losses import cross_entropy_cuda

        return cross_entropy_cuda.target_total(targets, weight, classes, ignore_index, work)
    flat = check_targets(operation, plain(targets), classes, ignore_index)
    kept = flat[flat >= 0]
    return scalar(kept.size, work, kept) if weight is None else sums.sum(plain(weight)[kept])
