"""The problems of the router's auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from isograd.core.checks import INDEX_DTYPES, checked_dtype, checked_shape
from isograd.core.descriptor import Descriptor, Operand
from isograd.errors import InvalidProblemError
from isograd.router.descriptors import checked_flag, checked_integer, work_type


def _loss(descriptor: Any) -> tuple[tuple[int, ...], str]:
    """The shape and the dtype of the losses."""
    return (descriptor.shape[:1] if descriptor.batched else ()), work_type(descriptor.dtype)


def _checked_shape(operation: str, argument: str, shape: Any, batched: Any) -> tuple[int, ...]:
    sizes = checked_shape(operation, argument, shape)
    checked_integer(operation, "the last size", sizes[-1], 1)
    if checked_flag(operation, "batched", batched) and len(sizes) == 1:
        raise InvalidProblemError(f"{operation}: {argument} has shape {sizes}; expected one more dimension")
    return sizes


@dataclass(frozen=True, slots=True)
class LoadBalancingLossDescriptor(Descriptor):
    """loss = E Σ_e f_e P_e, in the work type.

    shape: of the probabilities, (..., E). k: entries a token. dtype: of the probabilities. index_dtype: of the experts
    (..., k). batched: whether every place in the first dimension is a problem of its own, with a loss; else the loss is
    a scalar.
    """

    shape: tuple[int, ...]
    k: int
    dtype: str
    index_dtype: str = "int64"
    batched: bool = False

    @property
    def operation(self) -> str:
        """`load_balancing_loss`."""
        return "load_balancing_loss"

    @property
    def experts(self) -> Operand:
        """The chosen experts."""
        return Operand("experts", (*self.shape[:-1], self.k), self.index_dtype)

    def operands(self) -> tuple[Operand, ...]:
        """Probabilities and experts, then the loss."""
        return Operand("probabilities", self.shape, self.dtype), self.experts, Operand("loss", *_loss(self), True)

    def validated(self) -> Self:
        """Return the descriptor with plain ints, or raise what is wrong with it."""
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        shape = _checked_shape(name, "shape", self.shape, self.batched)
        index_dtype = checked_dtype(name, self.index_dtype, INDEX_DTYPES, "index_dtype")
        return type(self)(shape, checked_integer(name, "k", self.k, 1), dtype, index_dtype, self.batched)


@dataclass(frozen=True, slots=True)
class LoadBalancingLossBackwardDescriptor(LoadBalancingLossDescriptor):
    """dprobabilities from the loss's gradient and the experts; fields as in LoadBalancingLossDescriptor."""

    @property
    def operation(self) -> str:
        """`load_balancing_loss_backward`."""
        return "load_balancing_loss_backward"

    def operands(self) -> tuple[Operand, ...]:
        """Dloss and experts, then dprobabilities."""
        return Operand("dloss", *_loss(self)), self.experts, Operand("dprobabilities", self.shape, self.dtype, True)


@dataclass(frozen=True, slots=True)
class RouterZLossDescriptor(Descriptor):
    """loss = the mean over tokens of the squared logsumexp, in the work type.

    shape: of the logits, (..., E). dtype: of the logits. batched: as in LoadBalancingLossDescriptor.
    """

    shape: tuple[int, ...]
    dtype: str
    batched: bool = False

    @property
    def operation(self) -> str:
        """`router_z_loss`."""
        return "router_z_loss"

    def operands(self) -> tuple[Operand, ...]:
        """Logits, then the loss."""
        return Operand("logits", self.shape, self.dtype), Operand("loss", *_loss(self), True)

    def validated(self) -> Self:
        """Return the descriptor with plain ints, or raise what is wrong with it."""
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        return type(self)(_checked_shape(name, "logits", self.shape, self.batched), dtype, self.batched)


@dataclass(frozen=True, slots=True)
class RouterZLossBackwardDescriptor(RouterZLossDescriptor):
    """dlogits from the loss's gradient and the logits; fields as in RouterZLossDescriptor."""

    @property
    def operation(self) -> str:
        """`router_z_loss_backward`."""
        return "router_z_loss_backward"

    def operands(self) -> tuple[Operand, ...]:
        """Dloss and logits, then dlogits, which may be the logits."""
        dlogits = Operand("dlogits", self.shape, self.dtype, True, ("logits",))
        return Operand("dloss", *_loss(self)), Operand("logits", self.shape, self.dtype), dlogits
