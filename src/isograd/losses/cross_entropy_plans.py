"""Descriptors, plans and CPU kernels of cross entropy."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from isograd.core.checks import DTYPES, INDEX_DTYPES, checked_axis, checked_dtype, checked_shape, integer, real_number
from isograd.core.descriptor import Descriptor, Kernel, KernelSku, Operand, PrecisionGuarantee
from isograd.core.plan import Plan
from isograd.core.registry import register_kernel
from isograd.errors import IndexOutOfRangeError, InvalidProblemError
from isograd.losses import cross_entropy_bounds as bounds
from isograd.losses.cross_entropy_reference import IGNORE_INDEX, STATE, constants
from isograd.numerics.reference import order_free_sum, work_dtype
from isograd.numerics.storage import address, kernel_type
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment


@dataclass(frozen=True, slots=True)
class _CrossEntropy(Descriptor):
    """The fields that the three operations share."""

    shape: tuple[int, ...]
    dtype: str
    target_dtype: str = "int64"
    axis: int = 1
    weighted: bool = False
    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    name: ClassVar[str]

    @property
    def operation(self) -> str:
        """The name in the registry."""
        return self.name

    @property
    def classes(self) -> int:
        """The size of the class axis."""
        return self.shape[self.axis]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of losses and of index targets: the logits' without the class axis."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    @property
    def rows(self) -> int:
        """How many losses there are."""
        return math.prod(self.row_shape)

    @property
    def work(self) -> str:
        """The dtype of losses, weights and states."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def by_index(self) -> bool:
        """Whether targets are class indices and not probabilities."""
        return self.target_dtype in INDEX_DTYPES

    def validated(self) -> Self:
        """Return the descriptor with plain numbers and a non-negative axis, or raise what is wrong with it."""
        name = self.name
        dtype = checked_dtype(name, self.dtype)
        shape = checked_shape(name, "logits", self.shape)
        axis = checked_axis(name, self.axis, shape)
        if shape[axis] == 0:
            raise InvalidProblemError(f"{name}: logits have shape {shape} and no class along axis {axis}")
        target_dtype = checked_dtype(name, self.target_dtype, (*INDEX_DTYPES, dtype), "target_dtype")
        ignored = integer(name, "ignore_index", self.ignore_index)
        smoothing = real_number(name, "label_smoothing", self.label_smoothing)
        if not 0.0 <= smoothing <= 1.0:
            raise InvalidProblemError(f"{name}: label_smoothing is {smoothing}; accepted: 0 to 1")
        z_loss = real_number(name, "z_loss", self.z_loss)
        if not 0.0 <= z_loss < math.inf:
            raise InvalidProblemError(f"{name}: z_loss is {z_loss}; accepted: finite numbers from 0 on")
        weighted = bool(self.weighted)
        return type(self)(shape, dtype, target_dtype, axis, weighted, ignored, smoothing, z_loss)

    def _inputs(self) -> list[Operand]:
        target_shape = self.row_shape if self.by_index else self.shape
        operands = [
            Operand("logits", self.shape, self.dtype),
            Operand("targets", target_shape, self.target_dtype),
        ]
        if self.weighted:
            operands.append(Operand("weight", (self.classes,), self.work))
        return operands


@dataclass(frozen=True, slots=True)
class CrossEntropyDescriptor(_CrossEntropy):
    """losses and the state of every row from logits, targets and, if `weighted`, a weight for every class.

    shape: of the logits, rank 1 to 8. dtype: theirs. axis: of the classes. target_dtype: "int32", "int64" or "uint32"
    for indices (of the logits' shape without the class axis), or dtype for probabilities (of the logits' shape).
    ignore_index: rows with this target have loss 0. label_smoothing: 0 to 1. z_loss: the factor of the square of
    logsumexp. losses and weight are float32, for float64 logits float64; the state holds four such numbers a row.
    """

    name: ClassVar[str] = "cross_entropy"

    def operands(self) -> tuple[Operand, ...]:
        """logits, targets, (weight) to losses, state."""
        outputs = (
            Operand("losses", self.row_shape, self.work, True),
            Operand("state", (STATE, *self.row_shape), self.work, True),
        )
        return (*self._inputs(), *outputs)


@dataclass(frozen=True, slots=True)
class CrossEntropyBackwardDescriptor(_CrossEntropy):
    """dlogits from the gradient of every loss and the state; fields as in CrossEntropyDescriptor."""

    name: ClassVar[str] = "cross_entropy_backward"

    def operands(self) -> tuple[Operand, ...]:
        """dlosses, logits, targets, (weight), state to dlogits, which may be the logits."""
        inputs = [Operand("dlosses", self.row_shape, self.work), *self._inputs()]
        inputs.append(Operand("state", (STATE, *self.row_shape), self.work))
        return (*inputs, Operand("dlogits", self.shape, self.dtype, True, ("logits",)))


@dataclass(frozen=True, slots=True)
class CrossEntropyGradientDescriptor(_CrossEntropy):
    """losses and dlogits at once; fields as in CrossEntropyDescriptor."""

    name: ClassVar[str] = "cross_entropy_gradient"

    def operands(self) -> tuple[Operand, ...]:
        """dlosses, logits, targets, (weight) to losses and dlogits, which may be the logits."""
        outputs = (
            Operand("losses", self.row_shape, self.work, True),
            Operand("dlogits", self.shape, self.dtype, True, ("logits",)),
        )
        return (Operand("dlosses", self.row_shape, self.work), *self._inputs(), *outputs)


class CrossEntropyPlan(Plan):
    """Losses: `plan.run(logits=…, targets=…, [weight=…,] losses=…, state=…)`."""

    descriptor_type = CrossEntropyDescriptor
    __slots__ = ()


class CrossEntropyBackwardPlan(Plan):
    """The gradient: `plan.run(dlosses=…, logits=…, targets=…, [weight=…,] state=…, dlogits=…)`."""

    descriptor_type = CrossEntropyBackwardDescriptor
    __slots__ = ()


class CrossEntropyGradientPlan(Plan):
    """Both in one pass: `plan.run(dlosses=…, logits=…, targets=…, [weight=…,] losses=…, dlogits=…)`."""

    descriptor_type = CrossEntropyGradientDescriptor
    __slots__ = ()


def sku(descriptor: _CrossEntropy, backend: str, arch: str) -> KernelSku:
    """The identity of a kernel, and what every one promises: the bits of the reference."""
    guarantee = PrecisionGuarantee(
        math_precision=descriptor.work,
        accumulator="exact integers in fixed point",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=True,
        bit_stable_across_hardware=True,
        error_bound=bounds.error_bound(descriptor.operation),
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


class Scalars(NamedTuple):
    """The numbers that kernels take, in the work type: `constants`, and Σ_j q_j = total_keep · own + total_spread."""

    keep: Any
    spread: Any
    z: Any
    z_twice: Any
    total_keep: Any
    total_spread: Any


def scalars(descriptor: _CrossEntropy, weight: Any) -> Scalars:
    """The numbers of a problem; `weight` is a NumPy array or None."""
    of = work_dtype(descriptor.dtype if descriptor.dtype != "bfloat16" else "float32")
    with default_environment(), np.errstate(all="ignore"):
        fixed = constants(of, descriptor.classes, descriptor.label_smoothing, descriptor.z_loss)
        if weight is None or not fixed.spread:
            return Scalars(*fixed, of(1), of(0))
        return Scalars(*fixed, fixed.keep, fixed.spread * order_free_sum(weight[None])[0])


def check_targets(name: str, targets: Any, classes: int, ignore_index: int) -> Any:
    """Targets as int64 in C order, -1 where they are ignored; IndexOutOfRangeError for one that is no class."""
    wide = targets.astype(np.int64, "C").reshape(-1)  # a copy, which no other thread changes after the check
    if wide.size == 0 or (wide.min() >= 0 and wide.max() < classes and not 0 <= ignore_index < classes):
        return wide
    ignored = wide == ignore_index
    wrong = ~ignored & ((wide < 0) | (wide >= classes))
    if wrong.any():
        first = int(np.argmax(wrong))
        where = tuple(int(i) for i in np.unravel_index(first, targets.shape))
        raise IndexOutOfRangeError(
            f"{name}: targets{list(where)} is {wide[first]}; accepted: 0 to {classes - 1}, or {ignore_index} to ignore "
            "the row"
        )
    wide[ignored] = -1
    return wide


@functools.lru_cache(maxsize=64)
def _ones(classes: int, work: str) -> Any:
    return np.ones(classes, work)


@functools.lru_cache(maxsize=4096)
def walk(
    shape: tuple[int, ...], axis: int, strides: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], bool]:
    """(shape, strides of every operand, whether to copy tiles) of the rows in C order; neighbours are merged.

    Tiles are copied where the classes are not contiguous in an operand but the rows of the last dimension are in all.
    """
    rest = [d for d in range(len(shape)) if d != axis and shape[d] != 1]
    merged: list[tuple[int, tuple[int, ...]]] = []
    for d in rest:
        size, step = shape[d], tuple(s[d] for s in strides)
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], step, strict=True)):
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    merged = merged or [(1, (0,) * len(strides))]
    steps = tuple(tuple(step[i] for _, step in merged) for i in range(len(strides)))
    scattered = shape[axis] > 1 and any(s[axis] != 1 for s in strides)
    return tuple(size for size, _ in merged), steps, scattered and merged[-1][0] > 1 and set(merged[-1][1]) == {1}


_PACKED = 1 << 15  # elements of the rows that are copied together where classes are not contiguous
_ROW_COST = 64  # what a row takes besides its classes, in elements


class RowKernels:
    """Runs the compiled kernels over rows of logits; all arrays are NumPy's.

    `targets` are int64 from `check_targets`, or probabilities. Losses, states and gradients of losses are contiguous.
    """

    def __init__(self, logits: Any, axis: int, targets: Any, weight: Any, numbers: Scalars, dlogits: Any = None):
        with default_environment():  # constants are rounded when a module is loaded
            from isograd.losses import numba_cross_entropy, numba_cross_entropy_lanes
            from isograd.numerics.numba_memory import LANES
        by_index = targets.dtype == np.int64
        hard = by_index and not numbers.spread
        mode = numba_cross_entropy.HARD if hard else numba_cross_entropy.SMOOTH
        mode = mode if by_index else numba_cross_entropy.PROBABILITIES
        classes = logits.shape[axis]
        weight = _ones(classes, type(numbers.z).__name__) if weight is None else np.ascontiguousarray(weight)
        self._kept = (logits, targets, dlogits, weight)
        full = [logits] if by_index else [logits, targets]
        full = full if dlogits is None else [*full, dlogits]
        strides = tuple([tuple([s // a.itemsize for s in a.strides]) for a in full])
        shape, steps, scattered = walk(logits.shape, axis, strides)
        rows = math.prod(shape)
        # What is absent takes the place of the logits, and is not looked at.
        y, dx = (0 if by_index else 1), (0 if dlogits is None else len(full) - 1)
        self._dx = address(full[dx])
        like = kernel_type(logits.dtype)
        if scattered and hard:
            self._kernels: Any = numba_cross_entropy_lanes
            tile, outer = LANES, shape[:-1] or (1,)
            outer_steps = [np.array(steps[i][:-1] or (0,), np.int64) for i in (0, dx)]
            self._head: tuple[Any, ...] = (like, address(logits), address(targets), address(weight))
            ends: tuple[int, ...] = (strides[0][axis], strides[dx][axis])
            self._walk: tuple[Any, ...] = (
                np.array(outer, np.int64), *outer_steps, rows, shape[-1], classes, *ends
            )  # fmt: skip
            self._forward: tuple[Any, ...] = (numbers.z, numbers.z_twice)
            self._backward: tuple[Any, ...] = ()
        else:
            self._kernels = numba_cross_entropy
            tile = max(min(_PACKED // classes, LANES), 16) if scattered else 0
            self._head = (like, address(logits), address(targets), address(targets), address(weight))
            outer_steps = [np.array(steps[i], np.int64) for i in (0, y, dx)]
            ends = (strides[0][axis], strides[y][axis], strides[dx][axis])
            self._walk = (np.array(shape, np.int64), *outer_steps, rows, classes, *ends, tile, mode)
            self._forward, self._backward = tuple(numbers), (numbers.keep, numbers.spread)
        self._units = rows // shape[-1] * -(-shape[-1] // tile) if tile else rows
        self._work = (classes + _ROW_COST) * (min(tile, shape[-1]) if tile else 1)

    def forward(self, losses: Any, state: Any = None, dlosses: Any = None) -> None:
        """Losses with the state or, given the gradients of the losses, with dlogits."""
        fused = dlosses is not None
        addresses = (address(dlosses if fused else losses), address(losses), address(losses if fused else state))
        self._run(self._kernels.forward, *self._head, *addresses, self._dx, *self._walk, fused, *self._forward)

    def backward(self, dlosses: Any, state: Any) -> None:
        """Dlogits from the gradients of the losses and the state."""
        addresses = (address(dlosses), address(state), self._dx)
        self._run(self._kernels.backward, *self._head, *addresses, *self._walk, *self._backward)

    def _run(self, function: Any, *arguments: Any) -> None:
        parallel.for_ranges(function, self._units, parallel.grain(self._units, self._work), *arguments)


class NumbaCrossEntropy(Kernel):
    """Cross entropy on the CPU, compiled by Numba."""

    name = "numba"
    backend = "numba"

    def sku(self, descriptor: _CrossEntropy) -> KernelSku:
        """The kernel's identity."""
        return sku(descriptor, self.backend, "cpu")

    def launch(self, descriptor: _CrossEntropy, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace."""
        targets, weight = arguments["targets"], arguments.get("weight")
        if descriptor.by_index:
            targets = check_targets(descriptor.operation, targets, descriptor.classes, descriptor.ignore_index)
        if descriptor.rows == 0:
            return
        dlogits = arguments.get("dlogits")
        rows = RowKernels(arguments["logits"], descriptor.axis, targets, weight, scalars(descriptor, weight), dlogits)
        written = {name: np.empty(a.shape, a.dtype) for name, a in arguments.items() if name in ("losses", "state")}
        dlosses = arguments.get("dlosses")
        dlosses = None if dlosses is None else np.ascontiguousarray(dlosses)
        if descriptor.operation == "cross_entropy_backward":
            rows.backward(dlosses, np.ascontiguousarray(arguments["state"]))
            return
        rows.forward(written["losses"], written.get("state"), dlosses)
        for name, array in written.items():
            arguments[name][...] = array


OPERATIONS = ("cross_entropy", "cross_entropy_backward", "cross_entropy_gradient")
for _operation in OPERATIONS:
    for _dtype in DTYPES:
        register_kernel(_operation, "cpu", _dtype, NumbaCrossEntropy())
