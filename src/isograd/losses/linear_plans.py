"""Descriptors, plans and the CPU kernel of linear_cross_entropy."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from isograd.errors import InvalidProblemError
from isograd.losses import linear_bounds as bounds
from isograd.losses.cross_entropy_plans import CrossEntropyDescriptor, RowKernels, Scalars, check_targets, scalars
from isograd.losses.cross_entropy_reference import IGNORE_INDEX, STATE
from isograd.losses.linear_reference import logits_of
from isograd.numerics.matmul import matmul
from isograd.plan import (
    DTYPES,
    INDEX_DTYPES,
    Descriptor,
    Kernel,
    KernelSku,
    Operand,
    Plan,
    PrecisionGuarantee,
    checked_dtype,
    checked_shape,
)
from isograd.reduction import api as reduction
from isograd.registry import register_kernel

_CHUNK = 1 << 22  # logits that are held at a time


@dataclass(frozen=True, slots=True)
class _Linear(Descriptor):
    """The fields that both operations share."""

    rows: int
    features: int
    classes: int
    dtype: str
    target_dtype: str = "int64"
    biased: bool = False
    weighted: bool = False
    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk: int = 0

    name: ClassVar[str]

    @property
    def operation(self) -> str:
        """The name in the registry."""
        return self.name

    @property
    def work(self) -> str:
        """The dtype of losses and class weights."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def logits(self) -> CrossEntropyDescriptor:
        """The cross entropy of all logits."""
        options = (self.weighted, self.ignore_index, self.label_smoothing, self.z_loss)
        return CrossEntropyDescriptor((self.rows, self.classes), self.dtype, self.target_dtype, 1, *options)

    def validated(self) -> Self:
        """Return the descriptor with plain numbers, or raise what is wrong with it."""
        name = self.name
        rows, features, classes = checked_shape(
            name, "(rows, features, classes)", (self.rows, self.features, self.classes)
        )  # fmt: skip
        checked_dtype(name, self.dtype)
        checked_dtype(name, self.target_dtype, INDEX_DTYPES, "target_dtype")
        if classes == 0:
            raise InvalidProblemError(f"{name}: weight has no rows; expected one for each class")
        inner = self.logits.validated()
        (chunk,) = checked_shape(name, "chunk", (self.chunk,))
        return dataclasses.replace(
            self,
            rows=rows,
            features=features,
            classes=classes,
            biased=bool(self.biased),
            weighted=inner.weighted,
            ignore_index=inner.ignore_index,
            label_smoothing=inner.label_smoothing,
            z_loss=inner.z_loss,
            chunk=chunk,
        )

    def _inputs(self) -> list[Operand]:
        operands = [
            Operand("hidden", (self.rows, self.features), self.dtype),
            Operand("weight", (self.classes, self.features), self.dtype),
            Operand("targets", (self.rows,), self.target_dtype),
        ]
        if self.biased:
            operands.append(Operand("bias", (self.classes,), self.dtype))
        if self.weighted:
            operands.append(Operand("class_weight", (self.classes,), self.work))
        return operands


@dataclass(frozen=True, slots=True)
class LinearCrossEntropyDescriptor(_Linear):
    """losses from hidden [rows, features], weight [classes, features], targets [rows] and what the flags add.

    biased: a bias [classes]. weighted: class weights [classes] in the work type. ignore_index, label_smoothing, z_loss:
    as in CrossEntropyDescriptor. chunk: rows whose logits are held at a time, 0 leaves it to the kernel.
    """

    name: ClassVar[str] = "linear_cross_entropy"

    def operands(self) -> tuple[Operand, ...]:
        """hidden, weight, targets, (bias), (class_weight) to losses."""
        return (*self._inputs(), Operand("losses", (self.rows,), self.work, True))


@dataclass(frozen=True, slots=True)
class LinearCrossEntropyGradientDescriptor(_Linear):
    """losses and the gradients of hidden, weight and bias; fields as in LinearCrossEntropyDescriptor."""

    name: ClassVar[str] = "linear_cross_entropy_gradient"

    def operands(self) -> tuple[Operand, ...]:
        """Dlosses and the inputs to losses, dhidden, dweight and (dbias)."""
        outputs = [
            Operand("losses", (self.rows,), self.work, True),
            Operand("dhidden", (self.rows, self.features), self.dtype, True),
            Operand("dweight", (self.classes, self.features), self.dtype, True),
        ]
        if self.biased:
            outputs.append(Operand("dbias", (self.classes,), self.dtype, True))
        return (Operand("dlosses", (self.rows,), self.work), *self._inputs(), *outputs)


class LinearCrossEntropyPlan(Plan):
    """Losses: `plan.run(hidden=…, weight=…, targets=…, [bias=…,] [class_weight=…,] losses=…)`."""

    descriptor_type = LinearCrossEntropyDescriptor
    __slots__ = ()


class LinearCrossEntropyGradientPlan(Plan):
    """The same with `dlosses=…` before and `dhidden=…, dweight=…, [dbias=…]` after."""

    descriptor_type = LinearCrossEntropyGradientDescriptor
    __slots__ = ()


def sku(descriptor: _Linear, backend: str, arch: str, product: bounds.Product) -> KernelSku:
    """The identity of a kernel; only with the order-free product does it promise what cross entropy does."""
    exact = product is bounds.order_free
    guarantee = PrecisionGuarantee(
        math_precision=descriptor.work,
        accumulator="exact integers in fixed point" if exact else "matrix products as torch adds them up",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=exact,
        order_invariant=exact,
        bit_stable_across_hardware=exact,
        error_bound=bounds.error_bound(descriptor.operation, product),
    )
    return KernelSku(
        category="losses",
        op=descriptor.operation,
        dtype=descriptor.dtype,
        aux_dtype=descriptor.work,
        layout="strided",
        epilogue="none",
        arch=arch,
        backend=backend,
        precision_guarantee=guarantee,
    )


class ChunkedLinear(Kernel):
    """Order-free products in chunks on the CPU, with the bits of one piece.

    Rows are taken in chunks for the losses and dhidden, which contracts the classes. dweight contracts the rows, so
    the logits of all rows are computed a second time for a chunk of classes after the other.
    """

    name = "chunks"
    backend = "numba"

    def sku(self, descriptor: _Linear) -> KernelSku:
        """The kernel's identity."""
        return sku(descriptor, self.backend, "cpu", bounds.order_free)

    def launch(self, descriptor: _Linear, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace."""
        hidden, weight, bias = arguments["hidden"], arguments["weight"], arguments.get("bias")
        class_weight = arguments.get("class_weight")
        targets = check_targets(descriptor.operation, arguments["targets"], descriptor.classes, descriptor.ignore_index)
        numbers = scalars(descriptor.logits, class_weight)
        losses = np.empty(descriptor.rows, descriptor.work)
        state = np.empty((STATE, descriptor.rows), descriptor.work)
        gradient = "dlosses" in arguments
        dlosses = np.ascontiguousarray(arguments["dlosses"]) if gradient else None
        step = descriptor.chunk or max(_CHUNK // descriptor.classes, 1)
        for start in range(0, descriptor.rows, step):
            part = slice(start, start + step)
            logits = logits_of(hidden[part], weight, bias)
            rows = RowKernels(logits, 1, targets[part], class_weight, numbers, logits)
            some = np.empty((STATE, len(logits)), descriptor.work)
            rows.forward(losses[part], some)
            if dlosses is not None:
                state[:, part] = some
                rows.backward(dlosses[part], some)
                arguments["dhidden"][part] = matmul(logits, weight)
        if dlosses is not None:
            step = descriptor.chunk or max(_CHUNK // max(descriptor.rows, 1), 1)
            self._weight_gradients(arguments, targets, dlosses, state, numbers, step)
        arguments["losses"][...] = losses

    def _weight_gradients(
        self, arguments: Mapping[str, Any], targets: Any, dlosses: Any, state: Any, numbers: Scalars, step: int
    ) -> None:
        hidden, weight, bias = arguments["hidden"], arguments["weight"], arguments.get("bias")
        class_weight = arguments.get("class_weight")
        for start in range(0, len(weight), step):
            part = slice(start, start + step)
            logits = logits_of(hidden, weight[part], None if bias is None else bias[part])
            # -1 stays what it is, the mark of an ignored row; a target of another chunk becomes -2.
            inside = (targets >= start) & (targets < start + logits.shape[1])
            here = np.where(inside, targets - start, np.where(targets < 0, targets, -2))
            some = None if class_weight is None else class_weight[part]
            if logits.size:
                RowKernels(logits, 1, here, some, numbers, logits).backward(dlosses, state)
            arguments["dweight"][part] = matmul(logits.T, hidden)
            if bias is not None:
                arguments["dbias"][part] = reduction.sum(logits, 0)


OPERATIONS = ("linear_cross_entropy", "linear_cross_entropy_gradient")
for _operation in OPERATIONS:
    for _dtype in DTYPES:
        register_kernel(_operation, "cpu", _dtype, ChunkedLinear())
