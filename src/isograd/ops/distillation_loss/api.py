"""What a user calls: distillation_loss and its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from numpy.typing import NDArray

from isograd.core import call
from isograd.ops.distillation_loss.operation import DISTILLATION_LOSS, DISTILLATION_LOSS_BACKWARD
from isograd.typing import BatchReduction, DataT, ScalarT, SupportsDLPack

if TYPE_CHECKING:
    from isograd.tape.variable import Variable


_distillation_loss, _backward = call.function(DISTILLATION_LOSS), call.function(DISTILLATION_LOSS_BACKWARD)


@overload
def distillation_loss(
    student: Variable,
    teacher: Variable | NDArray[Any],
    temperature: float = ...,
    indices: SupportsDLPack | None = ...,
    reduction: BatchReduction = ...,
) -> Variable: ...
@overload
def distillation_loss(
    student: DataT,
    teacher: DataT,
    temperature: float = ...,
    indices: SupportsDLPack | None = ...,
    reduction: BatchReduction = ...,
) -> DataT: ...
def distillation_loss(
    student: Any, teacher: Any, temperature: float = 1.0, indices: Any = None, reduction: str = "batchmean"
) -> Any:
    """`T^2 * sum_j p_j (log p_j - log q_j)`, p = softmax(teacher / T) and q = softmax(student / T) over the last axis.

    student: logits, float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an
    array with DLPack or a tape variable. teacher: logits of the same shape; its dtype may be another one with the same
    work type. temperature: T. reduction of the losses of the rows: "batchmean" over the first dimension, "mean" over
    all rows, "sum", or "none" for the losses themselves, of shape `student.shape[:-1]`.

    indices: with the indices of k classes a row, distinct ones (int32, int64 or uint32, shape `[..., k]`), the teacher
    holds the logarithms of their probabilities under `softmax(teacher / T)` instead, and all other classes are one
    bucket with the rest of the probability, the student's likewise.

    The loss has the work type and the arithmetic of its rows, for 16-bit logits too. Where a teacher's probability is 0
    the term is 0. A row with NaN or +inf or of -inf alone, or with a log-probability above 1/2, gives NaN. The teacher
    gets no gradient.

    Raises IndexOutOfRangeError for an index that is no class (on the CPU; on a GPU the row's loss is NaN),
    InvalidProblemError for repeated indices and for arguments that do not match, UnsupportedError for another dtype.
    """
    return _distillation_loss((student, teacher, indices), (temperature, reduction))


@overload
def distillation_loss_backward(
    dloss: SupportsDLPack,
    student: NDArray[ScalarT],
    teacher: NDArray[Any],
    temperature: float = ...,
    indices: SupportsDLPack | None = ...,
    reduction: BatchReduction = ...,
    *,
    out: NDArray[ScalarT] | None = ...,
) -> NDArray[ScalarT]: ...
@overload
def distillation_loss_backward(
    dloss: SupportsDLPack,
    student: DataT,
    teacher: DataT,
    temperature: float = ...,
    indices: SupportsDLPack | None = ...,
    reduction: BatchReduction = ...,
    *,
    out: DataT | None = ...,
) -> DataT: ...
def distillation_loss_backward(
    dloss: Any,
    student: Any,
    teacher: Any,
    temperature: float = 1.0,
    indices: Any = None,
    reduction: str = "batchmean",
    *,
    out: Any = None,
) -> Any:
    """The gradient of the distillation loss for the student's logits: `dloss * T * (q - p)`.

    dloss: the gradient of the loss, of its shape and dtype; any strides. out: where the gradient goes; student itself
    is accepted. The other arguments and errors as for `distillation_loss`. With indices, a class that the teacher does
    not name gets `q` less its share, by the student, of the teacher's rest.
    """
    return _backward((dloss, student, teacher, indices), (temperature, reduction), (), out)
