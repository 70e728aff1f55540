"""What a user calls: cross_entropy with its gradient, and linear_cross_entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from isograd.core import functional
from isograd.core.call import replayed
from isograd.core.faults import named
from isograd.errors import InvalidProblemError
from isograd.losses import cross_entropy as steps
from isograd.losses import linear_cross_entropy as linear
from isograd.losses.cross_entropy import Options
from isograd.losses.linear_cross_entropy import LinearOptions
from isograd.typing import (
    ArrayT,
    CrossEntropyOptions,
    DataT,
    LinearCrossEntropyOptions,
    Number,
    Reduction,
    ScalarT,
    SupportsDLPack,
)

if TYPE_CHECKING:
    from isograd.tape.variable import Variable


def _taken(operation: str, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The arguments that were given as NumPy arrays or tensors, and the way back for results."""
    present = {name: value for name, value in given.items() if value is not None}
    taken, restore = functional.inputs(operation, **present)
    return dict.fromkeys(given) | dict(zip(present, taken, strict=True)), restore


def _array(name: str, value: Any) -> dict[str, Any]:
    """An argument that may also be a number, if it is none."""
    return {} if value is None or isinstance(value, (int, float, np.number)) else {name: value}


@overload
def cross_entropy(
    logits: ArrayT,
    targets: SupportsDLPack,
    weight: SupportsDLPack | None = ...,
    *,
    return_gradient: Literal[False] = ...,
    return_state: Literal[False] = ...,
    **options: Unpack[CrossEntropyOptions],
) -> ArrayT: ...
@overload
def cross_entropy(
    logits: DataT,
    targets: SupportsDLPack,
    weight: SupportsDLPack | None = ...,
    *,
    return_gradient: Literal[False] = ...,
    return_state: Literal[True],
    **options: Unpack[CrossEntropyOptions],
) -> tuple[DataT, DataT]: ...
@overload
def cross_entropy(
    logits: DataT,
    targets: SupportsDLPack,
    weight: SupportsDLPack | None = ...,
    *,
    return_gradient: Literal[True],
    return_state: Literal[False] = ...,
    dloss: SupportsDLPack | Number | None = ...,
    out: DataT | None = ...,
    **options: Unpack[CrossEntropyOptions],
) -> tuple[DataT, DataT]: ...
@replayed
def cross_entropy(
    logits: Any,
    targets: Any,
    weight: Any = None,
    *,
    axis: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    count: SupportsDLPack | Number | None = None,
    return_gradient: bool = False,
    return_state: bool = False,
    dloss: Any = None,
    out: Any = None,
) -> Any:
    """Cross entropy of logits and targets: `-w_t log softmax(x)_t` for every row of classes, then a reduction.

    logits: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an array
    with DLPack or a tape variable. axis: of the classes; as in torch the second one, of rank 1 the only one. targets:
    class indices (int32, int64, uint32) of the logits' shape without that axis, or probabilities of the logits' shape
    and dtype: `-Σ_j w_j y_j log softmax(x)_j`. weight: of the classes, in the logits' dtype or the work type.

    ignore_index: rows with this target have loss and gradient 0. label_smoothing: ε from 0 to 1; the target
    distribution is `(1 - ε) y + ε / classes`. z_loss: z, which adds `z · log(Σ exp x)²`. reduction: "mean", over the
    weights of the targets that are not ignored (probabilities: over the rows), "sum", or "none" for the losses of the
    rows. count: what the mean divides by instead, a number other than 0, or an array of one without dimensions, which
    on a GPU is not waited for; with the count of a whole batch the gradients of its parts have the bits that they have
    in one piece.

    return_gradient: return (loss, gradient of the logits), computed in one pass. dloss: the gradient of the loss (1).
    out: where the gradient goes; the logits themselves are accepted, which then hold it. return_state: return (loss,
    state); `cross_entropy_backward` takes the state, four numbers a row, and needs to sum nothing again.

    The loss is float32, for float64 logits float64. Rows with NaN or +inf, or of -inf alone, give NaN. The same bits in
    every order of rows and classes (`docs/arithmetic.md`, rule 14); `CrossEntropyPlan` says how far off.

    Raises IndexOutOfRangeError, naming the place, for a target that is no class, InvalidProblemError for shapes, axes
    and options that make no sense, UnsupportedError for another dtype.
    """
    name = "cross_entropy"
    options = Options(axis, ignore_index, label_smoothing, z_loss, reduction, count)
    tape = functional.tape_of(logits, targets, weight)
    if return_gradient and (return_state or tape is not None):
        other = "return_state" if return_state else "a tape variable"
        raise InvalidProblemError(f"{name}: return_gradient and {other} exclude each other")
    if not return_gradient and (dloss is not None or out is not None):
        raise InvalidProblemError(f"{name}: dloss and out say where a gradient comes from; pass return_gradient=True")
    if tape is not None:
        if return_state:
            raise InvalidProblemError(f"{name}: return_state is for arrays; the tape keeps the state itself")
        return tape.cross_entropy(logits, targets, weight, **options._asdict())
    arguments = {"logits": logits, "targets": targets, "weight": weight}
    if not return_gradient:
        taken, restore = _taken(name, arguments)
        given = steps.problem(name, **taken, options=options)
        losses, state = steps.forward(given)
        loss = restore(steps.reduced(given, losses))
        return (loss, restore(state)) if return_state else loss
    taken, restore = _taken(name, arguments | _array("dloss", dloss))
    dloss = taken.pop("dloss", dloss)
    given = steps.problem(name, **taken, options=options)
    dlosses = steps.row_gradients(given, dloss)
    with named(name, dlogits="out"):
        losses, dlogits = steps.fused(given, dlosses, out)
    return restore(steps.reduced(given, losses)), dlogits if out is not None else restore(dlogits)


@overload
def cross_entropy_backward(
    dloss: SupportsDLPack | Number | None,
    logits: NDArray[ScalarT],
    targets: SupportsDLPack,
    weight: SupportsDLPack | None = ...,
    *,
    state: SupportsDLPack | None = ...,
    out: NDArray[ScalarT] | None = ...,
    **options: Unpack[CrossEntropyOptions],
) -> NDArray[ScalarT]: ...
@overload
def cross_entropy_backward(
    dloss: SupportsDLPack | Number | None,
    logits: DataT,
    targets: SupportsDLPack,
    weight: SupportsDLPack | None = ...,
    *,
    state: SupportsDLPack | None = ...,
    out: DataT | None = ...,
    **options: Unpack[CrossEntropyOptions],
) -> DataT: ...
@replayed
def cross_entropy_backward(
    dloss: Any,
    logits: Any,
    targets: Any,
    weight: Any = None,
    *,
    state: Any = None,
    axis: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    count: SupportsDLPack | Number | None = None,
    out: Any = None,
) -> Any:
    """The gradient of cross entropy for the logits: for every row `g ((Σ_j q_j + 2z lse) softmax(x) - q)`.

    q is the (smoothed, weighted) target distribution and g the gradient of the row's loss. dloss: the gradient of the
    reduced loss, a number or an array of the loss's shape and dtype. state: what `cross_entropy` returned for the
    same arguments and `return_state`; without it the rows are summed again. out: where the gradient goes; the logits
    themselves are accepted. Other arguments, bits and errors as for `cross_entropy`, whose gradient this equals.
    """
    name = "cross_entropy_backward"
    arguments = {"logits": logits, "targets": targets, "weight": weight, "state": state}
    taken, restore = _taken(name, arguments | _array("dloss", dloss))
    dloss, state = taken.pop("dloss", dloss), taken.pop("state")
    options = Options(axis, ignore_index, label_smoothing, z_loss, reduction, count)
    given = steps.problem(name, **taken, options=options)
    dlosses = steps.row_gradients(given, dloss)
    with named(name, dlogits="out"):
        dlogits = steps.fused(given, dlosses, out)[1] if state is None else steps.backward(given, dlosses, state, out)
    return dlogits if out is not None else restore(dlogits)


@overload
def linear_cross_entropy(  # type: ignore[overload-overlap]  # arrays alone match here
    hidden: DataT,
    weight: DataT,
    targets: SupportsDLPack,
    bias: DataT | None = ...,
    *,
    return_gradient: Literal[False] = ...,
    **options: Unpack[LinearCrossEntropyOptions],
) -> DataT: ...
@overload
def linear_cross_entropy(
    hidden: DataT,
    weight: DataT,
    targets: SupportsDLPack,
    bias: None = ...,
    *,
    return_gradient: Literal[True],
    dloss: SupportsDLPack | Number | None = ...,
    **options: Unpack[LinearCrossEntropyOptions],
) -> tuple[DataT, DataT, DataT]: ...
@overload
def linear_cross_entropy(
    hidden: DataT,
    weight: DataT,
    targets: SupportsDLPack,
    bias: DataT,
    *,
    return_gradient: Literal[True],
    dloss: SupportsDLPack | Number | None = ...,
    **options: Unpack[LinearCrossEntropyOptions],
) -> tuple[DataT, DataT, DataT, DataT]: ...
@overload
def linear_cross_entropy(
    hidden: Variable | NDArray[Any],
    weight: Variable | NDArray[Any],
    targets: SupportsDLPack,
    bias: Variable | NDArray[Any] | None = ...,
    *,
    return_gradient: Literal[False] = ...,
    **options: Unpack[LinearCrossEntropyOptions],
) -> Variable: ...
@replayed
def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    targets: Any,
    bias: Any = None,
    *,
    class_weight: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    count: SupportsDLPack | Number | None = None,
    chunk: int | None = None,
    preference: str | None = None,
    return_gradient: bool = False,
    dloss: Any = None,
) -> Any:
    """Cross entropy of `hidden @ weight^T + bias` and targets, without ever holding more than a chunk of the logits.

    hidden: [..., features], float16, bfloat16, float32 or float64: a NumPy array, a torch tensor or a tape variable.
    weight: [classes, features], bias: [classes], both of that dtype. targets: class indices, [...]. class_weight: as
    `weight` of `cross_entropy`, and so are the other options. chunk: rows whose logits are held at a time, or as many
    logits of all rows for some of the classes. preference: the name of a kernel (`isograd kernels`).

    return_gradient: return (loss, dhidden, dweight), and dbias where there is a bias. dloss: the gradient of the loss.

    The products are NumPy's on the CPU and torch's on a GPU. The results are the same on every run on one machine, but
    their bits depend on chunk, batch, hardware and the library that multiplies; the plan's guarantee says so.
    `preference="order_free"` takes the products of rule 10 (`docs/arithmetic.md`), on the CPU at about the same cost in
    16 bits and some twenty times that in float32 and float64, on a GPU in 16 bits: then the bits are those of `matmul`,
    an addition and `cross_entropy` one after the other, whatever the chunk and everywhere. On a GPU gradients take up
    to twice the weight's memory besides.

    Raises IndexOutOfRangeError, naming the place, for a target that is no class, InvalidProblemError for shapes,
    dtypes and options that do not match, UnsupportedError for another dtype or a kernel that is not registered.
    """
    name = "linear_cross_entropy"
    options = LinearOptions(ignore_index, label_smoothing, z_loss, reduction, count, chunk, preference)
    if (tape := functional.tape_of(hidden, weight, bias)) is not None:
        if return_gradient:
            raise InvalidProblemError(f"{name}: return_gradient and a tape variable exclude each other")
        return tape.linear_cross_entropy(
            hidden, weight, targets, bias, class_weight=class_weight, **options._asdict()
        )  # fmt: skip
    if not return_gradient and dloss is not None:
        raise InvalidProblemError(f"{name}: dloss says where a gradient comes from; pass return_gradient=True")
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, "class_weight": class_weight}
    taken, restore = _taken(name, arguments | _array("dloss", dloss))
    dloss = taken.pop("dloss", dloss)
    given = linear.problem(name, **taken, options=options)
    if not return_gradient:
        return restore(linear.reduced(given, linear.forward(given)))
    dlosses = linear.row_gradients(given, dloss)
    with named(name):
        losses, dhidden, *rest = linear.gradient(given, dlosses)
    dhidden = functional.reshaped(name, "dhidden", dhidden, (*given.row_shape, given.fields[1]))
    return tuple(restore(a) for a in (linear.reduced(given, losses), dhidden, *rest))
