"""The two kernels of linear_cross_entropy on the CPU.

`blas` takes NumPy's matrix products, as fast as the library behind them. A chunk of rows after the other, and in it a
block of classes after the other:

    logits = hidden @ weight^T + bias, cross entropy in place of them,
    dhidden += dlogits @ weight, dweight += dlogits^T @ hidden

all of it in the work type: 16-bit operands are widened a block at a time, results rounded once. How a BLAS adds up is
its own affair, and so are the bits.

`order_free` takes the products of rule 10, whose bits nothing changes, at about the same cost in 16 bits and some
twenty times that in float32 and float64.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from isograd.core.checks import DTYPES
from isograd.core.descriptor import Kernel, KernelSku
from isograd.core.registry import register_kernel
from isograd.losses import linear_bounds as bounds
from isograd.losses.cross_entropy_plans import RowKernels, Scalars, check_targets, scalars
from isograd.losses.cross_entropy_reference import STATE
from isograd.losses.linear_plans import OPERATIONS, LinearDescriptor, sku
from isograd.losses.linear_reference import logits_of
from isograd.numerics import reference as ref
from isograd.numerics.matmul import matmul
from isograd.reduction import api as reduction
from isograd.runtime.fenv import default_environment

_LOGITS = 1 << 24  # that are held at a time
_LEAST = 64  # rows that keep a matrix product busy
_BLOCK = 1 << 12  # classes whose weights are widened, and whose gradients are added up, at a time
_ORDER_FREE_LOGITS = 1 << 22  # they take six times as much besides


# --- products by NumPy -----------------------------------------------------------------------------------------------
def chunk_rows(descriptor: LinearDescriptor) -> int:
    """Rows whose logits are held at a time."""
    return descriptor.chunk or max(_LOGITS // descriptor.classes, _LEAST)


def _blocks(classes: int) -> Iterator[slice]:
    for start in range(0, classes, _BLOCK):
        yield slice(start, start + _BLOCK)


class _Sum:
    """A sum of products in the work type on its way to an output; the parts are rows of the output."""

    def __init__(self, out: Any, work: str) -> None:
        self._out = out
        # In C order, whatever the output's: a BLAS may add up a transposed product in another order.
        self._sum = out if out.dtype == work and out.flags.c_contiguous else np.empty(out.shape, work)

    def add(self, part: slice, a: Any, b: Any, first: bool) -> None:
        """Add a product."""
        if first:
            np.matmul(a, b, out=self._sum[part])
        else:
            self._sum[part] += np.matmul(a, b)

    def finish(self, part: slice) -> None:
        """Round a part that is complete; no NaN keeps the bits that a BLAS gave it."""
        values = self._sum[part]
        if self._sum is not self._out:
            self._out[part] = ref.narrow(values, self._out.dtype)
        elif np.isnan(np.sum(values)):
            values[np.isnan(values)] = np.nan


class BlasLinear(Kernel):
    """Products by NumPy's BLAS, added up in the work type; the same bits again on the same machine."""

    name = "blas"
    backend = "numpy"

    def sku(self, descriptor: LinearDescriptor) -> KernelSku:
        """The kernel's identity."""
        return sku(descriptor, self.backend, "cpu", bounds.widened)

    def launch(self, descriptor: LinearDescriptor, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the BLAS's and the library's threads; needs no workspace."""
        targets = check_targets(descriptor.operation, arguments["targets"], descriptor.classes, descriptor.ignore_index)
        with default_environment(), np.errstate(all="ignore"):
            _compute(descriptor, arguments, targets)


def _compute(descriptor: LinearDescriptor, arguments: Mapping[str, Any], targets: Any) -> None:
    weight, bias, work = arguments["weight"], arguments.get("bias"), descriptor.work
    class_weight, rows, classes = arguments.get("class_weight"), descriptor.rows, descriptor.classes
    numbers = scalars(descriptor.logits, class_weight)
    gradient = "dlosses" in arguments
    step = min(chunk_rows(descriptor), max(rows, 1))
    logits_of_all = np.empty((step, classes), work)
    losses = np.empty(rows, work)
    if gradient:
        dlosses = np.ascontiguousarray(arguments["dlosses"])
        dhidden, dweight = _Sum(arguments["dhidden"], work), _Sum(arguments["dweight"], work)
        dbias = np.zeros(classes, work)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        hidden = np.ascontiguousarray(arguments["hidden"][part], work)
        logits = logits_of_all[: len(hidden)]
        for block in _blocks(classes):
            np.matmul(hidden, np.ascontiguousarray(weight[block], work).T, out=logits[:, block])
            if bias is not None:
                logits[:, block] += bias[block].astype(work, copy=False)
        kernels = RowKernels(logits, 1, targets[part], class_weight, numbers, logits)
        if not gradient:
            kernels.forward(losses[part], np.empty((STATE, len(hidden)), work))
            continue
        kernels.forward(losses[part], None, dlosses[part])
        for block in _blocks(classes):
            dhidden.add(part, logits[:, block], np.ascontiguousarray(weight[block], work), block.start == 0)
            dweight.add(block, logits[:, block].T, hidden, start == 0)
            if bias is not None:
                dbias[block] += reduction.sum(logits[:, block], 0)
        dhidden.finish(part)
    arguments["losses"][...] = losses
    if gradient:
        if not rows:
            arguments["dweight"][...] = 0
        for block in _blocks(classes if rows else 0):
            dweight.finish(block)
        if bias is not None:
            arguments["dbias"][...] = ref.narrow(dbias, arguments["dbias"].dtype)


# --- order-free products ---------------------------------------------------------------------------------------------
class OrderFreeLinear(Kernel):
    """Order-free products in chunks, with the bits of one piece.

    Rows are taken in chunks for the losses and dhidden, which contracts the classes. dweight contracts the rows, so
    the logits of all rows are computed a second time for a chunk of classes after the other.
    """

    name = "order_free"
    backend = "numba"

    def sku(self, descriptor: LinearDescriptor) -> KernelSku:
        """The kernel's identity."""
        return sku(descriptor, self.backend, "cpu", bounds.order_free)

    def launch(self, descriptor: LinearDescriptor, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace."""
        hidden, weight, bias = arguments["hidden"], arguments["weight"], arguments.get("bias")
        class_weight = arguments.get("class_weight")
        targets = check_targets(descriptor.operation, arguments["targets"], descriptor.classes, descriptor.ignore_index)
        numbers = scalars(descriptor.logits, class_weight)
        losses = np.empty(descriptor.rows, descriptor.work)
        state = np.empty((STATE, descriptor.rows), descriptor.work)
        gradient = "dlosses" in arguments
        dlosses = np.ascontiguousarray(arguments["dlosses"]) if gradient else None
        step = descriptor.chunk or max(_ORDER_FREE_LOGITS // descriptor.classes, 1)
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
            step = descriptor.chunk or max(_ORDER_FREE_LOGITS // max(descriptor.rows, 1), 1)
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


for _operation in OPERATIONS:
    for _dtype in DTYPES:
        # The first one is what a plan takes unless it is asked for the other.
        register_kernel(_operation, "cpu", _dtype, BlasLinear())
        register_kernel(_operation, "cpu", _dtype, OrderFreeLinear())
