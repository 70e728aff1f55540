"""Descriptors and plans of linear_cross_entropy; `linear_cpu.py` has the kernels of the CPU."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from isograd.core.checks import INDEX_DTYPES, checked_dtype, checked_shape
from isograd.core.descriptor import Descriptor, KernelSku, Operand, PrecisionGuarantee
from isograd.core.faults import named
from isograd.core.plan import Plan
from isograd.errors import InvalidProblemError
from isograd.losses import linear_bounds as bounds
from isograd.losses.cross_entropy_plans import CrossEntropyDescriptor
from isograd.losses.cross_entropy_reference import IGNORE_INDEX

ONE_PIECE = 1 << 22  # logits of which every kernel holds as many at once where it is not told how many rows


@dataclass(frozen=True, slots=True)
class LinearDescriptor(Descriptor):
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
        with named(name):
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
class LinearCrossEntropyDescriptor(LinearDescriptor):
    """losses from hidden [rows, features], weight [classes, features], targets [rows] and what the flags add.

    biased: a bias [classes]. weighted: class weights [classes] in the work type. ignore_index, label_smoothing, z_loss:
    as in CrossEntropyDescriptor. chunk: rows whose logits are held at a time, 0 leaves it to the kernel.
    """

    name: ClassVar[str] = "linear_cross_entropy"

    def operands(self) -> tuple[Operand, ...]:
        """hidden, weight, targets, (bias), (class_weight) to losses."""
        return (*self._inputs(), Operand("losses", (self.rows,), self.work, True))


@dataclass(frozen=True, slots=True)
class LinearCrossEntropyGradientDescriptor(LinearDescriptor):
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


def sku(descriptor: LinearDescriptor, backend: str, arch: str, product: bounds.Product) -> KernelSku:
    """The identity of a kernel; only with the order-free product does it promise what cross entropy does.

    Without, bits depend on the chunk, the batch, and on what library and hardware add up the products.
    """
    exact = product is bounds.order_free
    guarantee = PrecisionGuarantee(
        math_precision=descriptor.work,
        accumulator="exact integers in fixed point" if exact else "matrix products of a library, in its order",
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


OPERATIONS = ("linear_cross_entropy", "linear_cross_entropy_gradient")
