"""linear_cross_entropy on a GPU: products by torch, or in no order; cross entropy in place of logits; a part is held.

The first pass takes chunks of rows, whose logits of all classes give the losses and dhidden; the second takes slabs of
classes, whose gradients of all rows' logits give dweight. So no product is added to another, and each is rounded once.
Between the passes dweight, which is not written before the second, keeps gradients: those of the first slabs, as many
as have room there beside a chunk. The other slabs' logits are computed a second time.

Order-free products are those of `isograd.products`. hidden is cut into integers along either axis, and the weight too
for gradients, once for all chunks; that takes as much memory as they do, each time.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from isograd.core import faults
from isograd.losses.cross_entropy_plans import CrossEntropyGradientDescriptor
from isograd.losses.cross_entropy_reference import STATE
from isograd.losses.linear_plans import ONE_PIECE, LinearCrossEntropyGradientDescriptor, LinearDescriptor
from isograd.losses.triton_cross_entropy_launch import (
    cross_entropy,
    cross_entropy_backward_in_part,
    report_targets,
)
from isograd.products import cuda as int16
from isograd.reduction import cuda as reduction

_ROWS = 256  # that keep a product busy which has as many columns as there are classes
_TILES = 1 << 22  # elements of dhidden, of 128 by 256 each, that keep all processors of a large GPU busy
_ALIGNED = 8  # classes: products are slower where a row does not start at 16 bytes


class Pieces(NamedTuple):
    """Rows of a chunk and classes of a slab; what is left over makes a smaller one."""

    rows: int
    classes: int


def pieces(descriptor: LinearDescriptor) -> Pieces:
    """What is held at a time.

    A slab has as many classes as there are features, and so takes as much memory as hidden. If that is all classes,
    everything is one piece. Else a chunk has the rows that keep the product for dhidden busy, as far as they fit
    dweight. Without gradients, where it cannot lie there, it takes what a slab would.
    """
    rows, features, classes = descriptor.rows, descriptor.features, descriptor.classes
    if descriptor.chunk:
        chunk = descriptor.chunk
        slabs = max(-(-rows // chunk), 1)
    else:
        slabs = -(-classes // max(features, ONE_PIECE // max(rows, 1)))
        if slabs == 1:
            chunk = rows
        elif isinstance(descriptor, LinearCrossEntropyGradientDescriptor):
            chunk = max(min(_TILES // max(features, 1) // 128 * 128, features), _ROWS)
        else:
            chunk = max(rows // slabs // 128 * 128, _ROWS)
    return Pieces(max(min(chunk, rows), 1), min(-(-classes // (slabs * _ALIGNED)) * _ALIGNED, classes))


def linear_cross_entropy(descriptor: LinearDescriptor, arguments: Mapping[str, Any], order_free: bool = False) -> None:
    """Either operation on the plan's arguments, on the current stream of their device."""
    with torch.no_grad(), torch.autocast(arguments["hidden"].device.type, enabled=False):
        products = OrderFreeProducts if order_free else LibraryProducts
        _Problem(descriptor, arguments, products(arguments)).compute()
    faults.after_launch(arguments["hidden"].device)


class LibraryProducts:
    """The products and the sum of a call's arguments as torch computes them.

    hidden and the weight are copied where they are not contiguous: other strides are another product to the library,
    with other bits.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._hidden, self._weight = arguments["hidden"].contiguous(), arguments["weight"].contiguous()
        self._bias = arguments.get("bias")

    def logits(self, rows: slice, classes: slice, out: torch.Tensor) -> None:
        """Those of some rows and classes, with their bias."""
        torch.mm(self._hidden[rows], self._weight[classes].t(), out=out)
        if self._bias is not None:
            out += self._bias[classes]

    def dhidden(self, dlogits: torch.Tensor, out: torch.Tensor) -> None:
        """The gradient of some rows from that of their logits."""
        torch.mm(dlogits, self._weight, out=out)

    def rows_done(self) -> None:
        """No chunk of rows comes again."""

    def dweight(self, dlogits: torch.Tensor, out: torch.Tensor) -> None:
        """The gradient of some classes' weight."""
        torch.mm(dlogits.t(), self._hidden, out=out)

    def dbias(self, dlogits: torch.Tensor, out: torch.Tensor) -> None:
        """The gradient of some classes' bias."""
        out.copy_(dlogits.sum(0, dtype=torch.float64 if out.dtype == torch.float64 else torch.float32))


class OrderFreeProducts:
    """The same in no order (rules 4 and 10), from integers that are kept."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._hidden, self._weight, self._bias = arguments["hidden"], arguments["weight"], arguments.get("bias")
        self._rows = int16.rows_of(self._hidden)
        self._classes = int16.columns_of(self._weight.t())
        self._features = int16.columns_of(self._weight) if "dhidden" in arguments else None

    def logits(self, rows: slice, classes: slice, out: torch.Tensor) -> None:
        """Those of some rows and classes, with their bias."""
        int16.multiply(int16.some_rows(self._rows, rows), int16.some_columns(self._classes, classes), out)
        if self._bias is not None:
            int16.add_to_rows(out, self._bias[classes], out)

    def dhidden(self, dlogits: torch.Tensor, out: torch.Tensor) -> None:
        """The gradient of some rows from that of their logits."""
        self._multiply(dlogits, self._features, out)

    def rows_done(self) -> None:
        """No chunk of rows comes again."""
        self._features = None  # before memory is taken for the next
        self._features = int16.columns_of(self._hidden)

    def dweight(self, dlogits: torch.Tensor, out: torch.Tensor) -> None:
        """The gradient of some classes' weight."""
        self._multiply(dlogits.t(), self._features, out)

    def dbias(self, dlogits: torch.Tensor, out: torch.Tensor) -> None:
        """The gradient of some classes' bias."""
        out.copy_(reduction.sum(dlogits, 0))

    @staticmethod
    def _multiply(a: torch.Tensor, b: int16.Operand | None, out: torch.Tensor) -> None:
        assert b is not None
        c = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        int16.multiply(int16.rows_of(a), b, c)
        if c is not out:
            out.copy_(c)


class _Problem:
    """A call: the plan's arguments, and what is held."""

    def __init__(
        self, descriptor: LinearDescriptor, arguments: Mapping[str, Any], products: LibraryProducts | OrderFreeProducts
    ) -> None:
        self._descriptor, self._arguments, self._products = descriptor, arguments, products
        self._whole = descriptor.logits.validated()
        self._hidden, self._targets = arguments["hidden"], arguments["targets"]
        self._size = pieces(descriptor)
        self._gradient = "dlosses" in arguments
        self._state = self._hidden.new_empty((STATE, descriptor.rows), dtype=arguments["losses"].dtype)
        self._logits, self._kept = self._reserved()

    def _reserved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(the logits of a chunk, room for gradients between the passes); both lie in dweight if they can."""
        chunk, features, classes = self._size.rows, self._descriptor.features, self._descriptor.classes
        nothing = self._hidden.new_empty(0)
        if self._gradient and self._size.classes < classes and self._arguments["dweight"].is_contiguous():
            kept = self._arguments["dweight"].view(-1)
            if chunk <= features:
                first = (features - chunk) * classes
                return kept[first:].view(chunk, classes), kept[:first]
            nothing = kept
        return self._hidden.new_empty((chunk, classes)), nothing

    def compute(self) -> None:
        """Both passes."""
        descriptor, chunk = self._descriptor, self._size.rows
        if descriptor.rows:
            # Under the operation's own name and with the row's place among all, before a chunk does.
            report_targets(descriptor.operation, self._targets, descriptor.classes, descriptor.ignore_index)
        for start in range(0, descriptor.rows, chunk):
            self._rows(slice(start, min(start + chunk, descriptor.rows)))
        if self._gradient:
            self._products.rows_done()
            for part, dlogits in self._slabs():
                self._products.dweight(dlogits, self._arguments["dweight"][part])
                if descriptor.biased:
                    self._products.dbias(dlogits, self._arguments["dbias"][part])

    def _rows(self, part: slice) -> None:
        """Losses, states and dhidden of a chunk of rows."""
        arguments, logits = self._arguments, self._logits[: part.stop - part.start]
        self._products.logits(part, slice(0, self._whole.classes), logits)
        given = {"logits": logits, "targets": self._targets[part], "losses": arguments["losses"][part]}
        given["state"] = self._state[:, part]
        if "class_weight" in arguments:
            given["weight"] = arguments["class_weight"]
        chunk = dataclasses.replace(self._whole, shape=tuple(logits.shape))
        if not self._gradient:
            cross_entropy(chunk, given)
            return
        fields = [getattr(chunk, field.name) for field in dataclasses.fields(chunk)]
        given |= {"dlosses": arguments["dlosses"][part], "dlogits": logits}
        cross_entropy(CrossEntropyGradientDescriptor(*fields), given)
        self._products.dhidden(logits, arguments["dhidden"][part])
        for slab in self._slab_parts():
            if (kept := self._kept_gradients(slab)) is not None:
                kept[part] = logits[:, slab]

    def _slab_parts(self) -> list[slice]:
        width, classes = self._size.classes, self._descriptor.classes
        return [slice(start, min(start + width, classes)) for start in range(0, classes, width)]

    def _kept_gradients(self, slab: slice) -> torch.Tensor | None:
        """Where the gradients of a slab's logits are kept between the passes."""
        rows = self._descriptor.rows
        if slab.stop * rows > self._kept.numel():
            return None
        return self._kept[slab.start * rows : slab.stop * rows].view(rows, slab.stop - slab.start)

    def _slabs(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """The gradients of the logits, slab by slab; dweight of a slab may be written before the next is asked for."""
        rows, features = self._descriptor.rows, self._descriptor.features
        slabs = self._slab_parts()
        if self._size.rows >= rows:  # the one chunk still holds them all
            yield slabs[0], self._logits[:rows]
            return
        place = self._hidden.new_empty(rows * self._size.classes)
        # In the order in which dweight takes the place of gradients that have been used, never of those to come.
        for slab in slabs if rows >= features else reversed(slabs):
            dlogits = place[: rows * (slab.stop - slab.start)].view(rows, slab.stop - slab.start)
            kept = self._kept_gradients(slab)
            if kept is None:
                self._gradients_again(slab, dlogits)
            elif slab.start * rows < slab.stop * features and slab.start * features < slab.stop * rows:
                dlogits.copy_(kept)  # where the slab's own dweight goes
            else:
                dlogits = kept
            yield slab, dlogits

    def _gradients_again(self, slab: slice, out: torch.Tensor) -> None:
        arguments = self._arguments
        self._products.logits(slice(None), slab, out)
        given = {"logits": out, "targets": self._targets, "state": self._state, "dlogits": out}
        given["dlosses"] = arguments["dlosses"]
        if "class_weight" in arguments:
            given["weight"] = arguments["class_weight"][slab]
        cross_entropy_backward_in_part(self._whole, slab.start, given)
