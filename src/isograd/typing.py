"""Types of public arguments and results, for annotations.

Array is what an argument may be. ArrayT ties a result to the kind of the argument it is made from: NumPy array, torch
tensor, tape variable, or another array with DLPack; DataT does the same where a tape variable is not accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from isograd.tape.variable import Variable


class SupportsDLPack(Protocol):
    """An array of any library that exports DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """The array as a DLPack capsule."""

    def __dlpack_device__(self) -> Any:
        """The kind and number of the array's device."""


# NumPy arrays and torch tensors are among those with DLPack.
Array: TypeAlias = "SupportsDLPack | Variable"
ArrayT = TypeVar("ArrayT", NDArray[Any], "Tensor", "Variable", SupportsDLPack)
DataT = TypeVar("DataT", NDArray[Any], "Tensor", SupportsDLPack)
ScalarT = TypeVar("ScalarT", bound=np.generic)
Number: TypeAlias = float | np.number[Any]

DType: TypeAlias = Literal["float16", "bfloat16", "float32", "float64"]
Reduction: TypeAlias = Literal["mean", "sum", "none"]
BatchReduction: TypeAlias = Literal["batchmean", "mean", "sum", "none"]
Approximate: TypeAlias = Literal["none", "tanh"]
Scoring: TypeAlias = Literal["softmax", "sigmoid"]
Alignment: TypeAlias = Literal["lower_right", "upper_left"]
Layout: TypeAlias = Literal["BHLD", "BLHD"]
Window: TypeAlias = tuple[int | None, int | None]


class CrossEntropyOptions(TypedDict, total=False):
    """The options of `cross_entropy` that do not change what it returns."""

    axis: int | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: Reduction
    count: SupportsDLPack | Number | None


class LinearCrossEntropyOptions(TypedDict, total=False):
    """The options of `linear_cross_entropy` that do not change what it returns."""

    class_weight: SupportsDLPack | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: Reduction
    count: SupportsDLPack | Number | None
    chunk: int | None
    preference: str | None


class AttentionKeywords(TypedDict, total=False):
    """The options that `attention` and `attention_backward` share."""

    causal: bool
    window: Window | None
    alignment: Alignment
    scale: float | None
    softcap: float
    bias: Array | None
    mask: SupportsDLPack | None
    segment_ids: tuple[SupportsDLPack, SupportsDLPack] | None
    cu_seqlens: tuple[SupportsDLPack, SupportsDLPack] | None
    sinks: Array | None
    dropout_p: float
    seed: int
    layout: Layout
    preference: str | None


class AttentionWithCacheKeywords(TypedDict, total=False):
    """The options of `attention_with_cache` that do not change what it returns."""

    block_table: SupportsDLPack | None
    window: Window | None
    scale: float | None
    softcap: float
    sinks: SupportsDLPack | None
    layout: Layout
    preference: str | None


class RouterOptions(TypedDict, total=False):
    """The options of `moe_router`."""

    scoring: Scoring
    renormalize: bool
    bias: SupportsDLPack | None
    groups: int
    group_k: int
    scale: float
