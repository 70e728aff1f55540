"""The problems of the router family: one frozen description each, and the plans that serve them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from isograd.core.checks import (
    INDEX_DTYPES,
    MOST_ELEMENTS,
    checked_axis,
    checked_dtype,
    checked_shape,
    integer,
    real_number,
)
from isograd.core.descriptor import Descriptor, Operand
from isograd.errors import InvalidProblemError

SCORINGS = ("softmax", "sigmoid")


def work_type(dtype: str) -> str:
    """The name of the type that a storage type is computed in."""
    return "float64" if dtype == "float64" else "float32"


def checked_integer(operation: str, argument: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer from `least` to `most` or to what an array holds; InvalidProblemError says what is wrong with it."""
    number = integer(operation, argument, value)
    if not least <= number <= (MOST_ELEMENTS if most is None else most):
        accepted = f"{least} to {most}" if most is not None else f"at least {least}, up to 2^56"
        raise InvalidProblemError(f"{operation}: {argument} is {number}; accepted: {accepted}")
    return number


_LARGEST = {"float32": (2 - 2.0**-24) * 2.0**127, "float64": math.inf}  # what rounds to infinity, from there on


def _checked_scale(operation: str, scale: Any, dtype: str = "float64") -> float:
    work = work_type(dtype)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) < _LARGEST[work]:
        kind = "finite number" if work == "float64" else "number that is finite in float32"
        raise InvalidProblemError(f"{operation}: scale is {scale!r}; expected a {kind}")
    return real_number(operation, "scale", scale) + 0.0  # one zero: kept plans of both are equal


def checked_options(operation: str, scoring: Any, renormalize: Any, scale: Any) -> None:
    """Raise for options of the router that are of a wrong type, before they become the key of a cache."""
    checked_scoring(operation, scoring)
    checked_flag(operation, "renormalize", renormalize)
    _checked_scale(operation, scale)


def checked_flag(operation: str, argument: str, value: Any) -> bool:
    """True or False; InvalidProblemError for anything else."""
    if not isinstance(value, bool):
        raise InvalidProblemError(f"{operation}: {argument} is {value!r}; expected True or False")
    return value


# --- top_k and renormalize -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TopKDescriptor(Descriptor):
    """values, indices = the k first elements of x along an axis in descending order.

    shape: of x, rank 1 to 8. k: 1 to the size of the axis. dtype: "float16", "bfloat16", "float32" or "float64". The
    results have k for the size of the axis; indices are int64.
    """

    shape: tuple[int, ...]
    k: int
    dtype: str
    axis: int = -1

    @property
    def operation(self) -> str:
        """`top_k`."""
        return "top_k"

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the values and of the indices."""
        return (*self.shape[: self.axis], self.k, *self.shape[self.axis + 1 :])

    def operands(self) -> tuple[Operand, ...]:
        """X, then values and indices."""
        return (
            Operand("x", self.shape, self.dtype),
            Operand("values", self.result_shape, self.dtype, True),
            Operand("indices", self.result_shape, "int64", True),
        )

    def validated(self) -> Self:
        """Return the descriptor with plain ints and a non-negative axis, or raise what is wrong with it."""
        dtype = checked_dtype(self.operation, self.dtype)
        shape = checked_shape(self.operation, "shape", self.shape)
        axis = checked_axis(self.operation, self.axis, shape)
        return type(self)(shape, checked_integer(self.operation, "k", self.k, 1, shape[axis]), dtype, axis)


@dataclass(frozen=True, slots=True)
class RenormalizeDescriptor(Descriptor):
    """t = w divided by its order-free sum along an axis; fields as in TopKDescriptor."""

    shape: tuple[int, ...]
    dtype: str
    axis: int = -1

    @property
    def operation(self) -> str:
        """`renormalize`."""
        return "renormalize"

    def operands(self) -> tuple[Operand, ...]:
        """W and t, which may be w."""
        return Operand("w", self.shape, self.dtype), Operand("t", self.shape, self.dtype, True, ("w",))

    def validated(self) -> Self:
        """Return the descriptor with plain ints and a non-negative axis, or raise what is wrong with it."""
        dtype = checked_dtype(self.operation, self.dtype)
        shape = checked_shape(self.operation, "shape", self.shape)
        return type(self)(shape, dtype, checked_axis(self.operation, self.axis, shape))


@dataclass(frozen=True, slots=True)
class RenormalizeBackwardDescriptor(RenormalizeDescriptor):
    """dw from dt and w; fields as in RenormalizeDescriptor."""

    @property
    def operation(self) -> str:
        """`renormalize_backward`."""
        return "renormalize_backward"

    def operands(self) -> tuple[Operand, ...]:
        """Dt and w, then dw, which may be either."""
        inputs = (Operand("dt", self.shape, self.dtype), Operand("w", self.shape, self.dtype))
        return (*inputs, Operand("dw", self.shape, self.dtype, True, ("dt", "w")))


# --- the router ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class MoeRouterDescriptor(Descriptor):
    """weights, experts = the k chosen experts of every token and their weights.

    shape: of the logits, (..., E). k: experts a token, at most those of group_k groups. dtype: of the logits. scoring:
    "softmax" or "sigmoid". renormalize: whether the weights are divided by their sum. bias: whether there is one, [E]
    in the work type. groups: a divisor of E. group_k: groups that a token may choose from. scale: a finite factor of
    the weights. bias_rows: whether every token has a bias of its own, (..., E). Weights are in the work type, experts
    int64.
    """

    shape: tuple[int, ...]
    k: int
    dtype: str
    scoring: str = "softmax"
    renormalize: bool = False
    bias: bool = False
    groups: int = 1
    group_k: int = 1
    scale: float = 1.0
    bias_rows: bool = False

    @property
    def operation(self) -> str:
        """`moe_router`."""
        return "moe_router"

    def operands(self) -> tuple[Operand, ...]:
        """Logits and the bias if there is one, then weights and experts."""
        work, chosen = work_type(self.dtype), (*self.shape[:-1], self.k)
        bias = (Operand("bias", self.shape if self.bias_rows else self.shape[-1:], work),) if self.bias else ()
        outputs = Operand("weights", chosen, work, True), Operand("experts", chosen, "int64", True)
        return (Operand("logits", self.shape, self.dtype), *bias, *outputs)

    def validated(self) -> Self:
        """Return the descriptor with plain numbers, or raise what is wrong with it."""
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        shape = checked_shape(name, "logits", self.shape)
        groups = checked_integer(name, "groups", self.groups, 1)
        if shape[-1] % groups:
            raise InvalidProblemError(f"{name}: groups is {groups}; expected a divisor of {shape[-1]} experts")
        group_k = checked_integer(name, "group_k", self.group_k, 1, groups)
        return replace(
            self,
            shape=shape,
            k=checked_integer(name, "k", self.k, 1, shape[-1] // groups * group_k),
            dtype=dtype,
            scoring=checked_scoring(name, self.scoring),
            renormalize=checked_flag(name, "renormalize", self.renormalize),
            bias=checked_flag(name, "bias", self.bias),
            groups=groups,
            group_k=group_k,
            scale=_checked_scale(name, self.scale, dtype),
            bias_rows=checked_flag(name, "bias_rows", self.bias_rows),
        )


def checked_scoring(operation: str, scoring: Any) -> str:
    """The name of a scoring; InvalidProblemError for any other."""
    if not isinstance(scoring, str) or scoring not in SCORINGS:
        raise InvalidProblemError(f"{operation}: scoring is {scoring!r}; accepted: {', '.join(SCORINGS)}")
    return scoring


@dataclass(frozen=True, slots=True)
class MoeRouterBackwardDescriptor(Descriptor):
    """dlogits from dweights, logits and the chosen experts; fields as in MoeRouterDescriptor.

    index_dtype: of the experts, "int32", "int64" or "uint32".
    """

    shape: tuple[int, ...]
    k: int
    dtype: str
    scoring: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    index_dtype: str = "int64"

    @property
    def operation(self) -> str:
        """`moe_router_backward`."""
        return "moe_router_backward"

    def operands(self) -> tuple[Operand, ...]:
        """Dweights, logits and experts, then dlogits, which may be the logits."""
        chosen = (*self.shape[:-1], self.k)
        return (
            Operand("dweights", chosen, work_type(self.dtype)),
            Operand("logits", self.shape, self.dtype),
            Operand("experts", chosen, self.index_dtype),
            Operand("dlogits", self.shape, self.dtype, True, ("logits",)),
        )

    def validated(self) -> Self:
        """Return the descriptor with plain numbers, or raise what is wrong with it."""
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        shape = checked_shape(name, "logits", self.shape)
        return replace(
            self,
            shape=shape,
            k=checked_integer(name, "k", self.k, 1, shape[-1]),
            dtype=dtype,
            scoring=checked_scoring(name, self.scoring),
            renormalize=checked_flag(name, "renormalize", self.renormalize),
            scale=_checked_scale(name, self.scale, dtype),
            index_dtype=checked_dtype(name, self.index_dtype, INDEX_DTYPES, "index_dtype"),
        )


# --- permutation to contiguous experts -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ExpertCountsDescriptor(Descriptor):
    """counts = how many entries every expert has, int64.

    shape: of experts, any. num_experts: E. dtype: of experts, "int32", "int64" or "uint32".
    """

    shape: tuple[int, ...]
    num_experts: int
    dtype: str = "int64"

    @property
    def operation(self) -> str:
        """`expert_counts`."""
        return "expert_counts"

    def operands(self) -> tuple[Operand, ...]:
        """Experts, then counts."""
        counts = Operand("counts", (self.num_experts,), "int64", True)
        return Operand("experts", self.shape, self.dtype), counts

    def validated(self) -> Self:
        """Return the descriptor with plain ints, or raise what is wrong with it."""
        dtype = checked_dtype(self.operation, self.dtype, INDEX_DTYPES)
        shape = checked_shape(self.operation, "experts", self.shape)
        return type(self)(shape, checked_integer(self.operation, "num_experts", self.num_experts, 1), dtype)


@dataclass(frozen=True, slots=True)
class ExpertPermutationDescriptor(ExpertCountsDescriptor):
    """order, offsets = the entries sorted by expert, and where those of each expert begin; both int64.

    Fields as in ExpertCountsDescriptor. order has as many elements as experts; offsets has E + 1.
    """

    @property
    def operation(self) -> str:
        """`expert_permutation`."""
        return "expert_permutation"

    def operands(self) -> tuple[Operand, ...]:
        """Experts, then order and offsets."""
        order = Operand("order", (math.prod(self.shape),), "int64", True)
        offsets = Operand("offsets", (self.num_experts + 1,), "int64", True)
        return Operand("experts", self.shape, self.dtype), order, offsets


@dataclass(frozen=True, slots=True)
class MoePermuteDescriptor(Descriptor):
    """y = the rows of the tokens in the order of the experts.

    tokens: T. k: entries a token. width: D. dtype: of x [T, D] and y [T k, D]. The order [T k] is int64.
    """

    tokens: int
    k: int
    width: int
    dtype: str

    @property
    def operation(self) -> str:
        """`moe_permute`."""
        return "moe_permute"

    @property
    def token_rows(self) -> tuple[int, int]:
        """The shape of an array with a row a token."""
        return self.tokens, self.width

    @property
    def entry_rows(self) -> tuple[int, int]:
        """The shape of an array with a row an entry."""
        return self.tokens * self.k, self.width

    @property
    def order(self) -> Operand:
        """The permutation."""
        return Operand("order", (self.tokens * self.k,), "int64")

    @property
    def weights(self) -> Operand:
        """The weights of the entries."""
        return Operand("weights", (self.tokens, self.k), work_type(self.dtype))

    def operands(self) -> tuple[Operand, ...]:
        """X and order, then y."""
        y = Operand("y", self.entry_rows, self.dtype, True)
        return Operand("x", self.token_rows, self.dtype), self.order, y

    def validated(self) -> Self:
        """Return the descriptor with plain ints, or raise what is wrong with it."""
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        tokens = checked_integer(name, "tokens", self.tokens, 0)
        k = checked_integer(name, "k", self.k, 1)
        width = checked_integer(name, "width", self.width, 0)
        checked_shape(name, "an array of tokens * k rows", (tokens * k, width))
        return type(self)(tokens, k, width, dtype)


@dataclass(frozen=True, slots=True)
class MoePermuteBackwardDescriptor(MoePermuteDescriptor):
    """dx from dy and order; fields as in MoePermuteDescriptor."""

    @property
    def operation(self) -> str:
        """`moe_permute_backward`."""
        return "moe_permute_backward"

    def operands(self) -> tuple[Operand, ...]:
        """Dy and order, then dx."""
        dx = Operand("dx", self.token_rows, self.dtype, True)
        return Operand("dy", self.entry_rows, self.dtype), self.order, dx


@dataclass(frozen=True, slots=True)
class MoeCombineDescriptor(MoePermuteDescriptor):
    """y = the weighted sums of the experts' rows; fields as in MoePermuteDescriptor, weights [T, k] (work type)."""

    @property
    def operation(self) -> str:
        """`moe_combine`."""
        return "moe_combine"

    def operands(self) -> tuple[Operand, ...]:
        """expert_out, weights and order, then y."""
        y = Operand("y", self.token_rows, self.dtype, True)
        return Operand("expert_out", self.entry_rows, self.dtype), self.weights, self.order, y


@dataclass(frozen=True, slots=True)
class MoeCombineBackwardDescriptor(MoePermuteDescriptor):
    """d_expert_out and dweights from dy, expert_out, weights and order; fields as in MoeCombineDescriptor."""

    @property
    def operation(self) -> str:
        """`moe_combine_backward`."""
        return "moe_combine_backward"

    def operands(self) -> tuple[Operand, ...]:
        """Dy, expert_out, weights and order, then d_expert_out, which may be expert_out, and dweights."""
        d_expert_out = Operand("d_expert_out", self.entry_rows, self.dtype, True, ("expert_out",))
        dweights = Operand("dweights", (self.tokens, self.k), work_type(self.dtype), True)
        inputs = Operand("dy", self.token_rows, self.dtype), Operand("expert_out", self.entry_rows, self.dtype)
        return (*inputs, self.weights, self.order, d_expert_out, dweights)
