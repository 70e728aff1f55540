"""What a user calls: kl_div and its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from numpy.typing import NDArray

from isograd.core import call
from isograd.ops.kl_div.operation import KL_DIV, KL_DIV_BACKWARD
from isograd.typing import BatchReduction, DataT, ScalarT, SupportsDLPack

if TYPE_CHECKING:
    from isograd.tape.variable import Variable

_kl_div, _backward = call.function(KL_DIV), call.function(KL_DIV_BACKWARD)


@overload
def kl_div(
    input: Variable, target: Variable | NDArray[Any], reduction: BatchReduction = ..., log_target: bool = ...
) -> Variable: ...
@overload
def kl_div(
    input: NDArray[Any], target: Variable, reduction: BatchReduction = ..., log_target: bool = ...
) -> Variable: ...
@overload
def kl_div(input: DataT, target: DataT, reduction: BatchReduction = ..., log_target: bool = ...) -> DataT: ...
def kl_div(input: Any, target: Any, reduction: str = "mean", log_target: bool = False) -> Any:  # noqa: A002
    """The divergence of a target distribution p from log-probabilities x: `p * (log p - x)`, element by element.

    input: log-probabilities, float16, bfloat16, float32 or float64, rank 0 to 8, any strides. target: probabilities,
    or log-probabilities with `log_target`, of the same shape and dtype. NumPy arrays, torch tensors, arrays with DLPack
    or tape variables. reduction: "mean" over all elements, "batchmean" over the first dimension, "sum", or "none".

    The loss has the work type (float32 for 16 bits). Where p is 0 the term is 0, whatever the input is, unless it is
    NaN; the sum is order-free (`docs/arithmetic.md`, rule 15).

    Raises InvalidProblemError for shapes or dtypes that differ and for another reduction, UnsupportedError for another
    dtype.
    """
    return _kl_div((input, target), (reduction, log_target))


@overload
def kl_div_backward(
    dloss: SupportsDLPack,
    input: NDArray[ScalarT],
    target: NDArray[ScalarT],
    reduction: BatchReduction = ...,
    log_target: bool = ...,
    wrt: Literal["input", "target"] = ...,
) -> NDArray[ScalarT]: ...
@overload
def kl_div_backward(
    dloss: SupportsDLPack,
    input: DataT,
    target: DataT,
    reduction: BatchReduction = ...,
    log_target: bool = ...,
    wrt: Literal["input", "target"] = ...,
) -> DataT: ...
def kl_div_backward(
    dloss: Any,
    input: Any,  # noqa: A002
    target: Any,
    reduction: str = "mean",
    log_target: bool = False,
    wrt: Literal["input", "target"] = "input",
) -> Any:
    """The gradient of kl_div for its input, `-dloss * p`, or with `wrt="target"` for its target.

    dloss: the gradient of the loss, of its shape and dtype; any strides, an expanded one included. The other arguments
    as for `kl_div`. The gradient for a target is `dloss * (log p + 1 - x)`, times p where the target holds logarithms,
    and 0 where p is 0.

    Raises InvalidProblemError for shapes or dtypes that do not match, and for another reduction or `wrt`.
    """
    return _backward((dloss, input, target), (reduction, log_target, wrt))
