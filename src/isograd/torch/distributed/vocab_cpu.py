"""Rows whose classes are spread over ranks, on the CPU: what lies between two collectives.

Tensors of parts are [rows, classes of this rank] with any strides; what has one element or a few a row is contiguous.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isograd.core import arrays
from isograd.losses.cross_entropy_plans import CrossEntropyDescriptor, RowKernels, Scalars
from isograd.losses.cross_entropy_reference import STATE
from isograd.losses.reductions import plain
from isograd.numerics.storage import address, kernel_type
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment
from isograd.torch.distributed.vocab_layout import STATISTICS, WORDS
from isograd.torch.tensors import work_dtype

_LEAST = -(1 << 63)  # below the key of every number


def _place(tensor: Tensor) -> int:
    return address(arrays.numpy_view(tensor))


def _run(function: str, x: Tensor, work: int, *arguments: Any) -> None:
    """Call a kernel for the storage type of x over its rows, which cost so many elements each."""
    with default_environment():  # constants are rounded when a module is loaded
        from isograd.torch.distributed import numba_vocab
    rows, like = x.shape[0], kernel_type(arrays.numpy_view(x).dtype)
    grain = parallel.grain(rows, max(work, 64))
    parallel.for_ranges(getattr(numba_vocab, function), rows, grain, like, *arguments)


def maxima(x: Tensor) -> Tensor:
    """The keys of the maxima of the parts of rows, int64."""
    keys = x.new_full(x.shape[:1], _LEAST, dtype=torch.int64)
    if x.numel():
        _run("maxima", x, x.shape[1], _place(x), _place(keys), x.shape[1], *x.stride())
    return keys


def exponentials(x: Tensor, keys: Tensor, classes: int) -> Tensor:
    """The words of the sums of the parts' exponentials; the last word of a row is 0."""
    words = x.new_zeros((x.shape[0], WORDS), dtype=torch.int64)
    if x.numel():
        places = (_place(x), _place(keys), _place(words))
        _run("exponentials", x, x.shape[1], *places, x.shape[1], *x.stride(), classes)
    return words


def statistics(x: Tensor, keys: Tensor, words: Tensor, classes: int) -> Tensor:
    """What follows from whole rows' maxima and sums, [STATISTICS, rows]."""
    about = x.new_empty((STATISTICS, x.shape[0]), dtype=work_dtype(x.dtype))
    if x.shape[0]:
        _run("statistics", x, 0, _place(keys), _place(words), _place(about), x.shape[0], classes)
    return about


def magnitudes(mode: int, x: Tensor, y: Tensor, about: Tensor) -> Tensor:
    """The keys of the largest magnitudes among the parts' terms, int64; `about` is looked at for logits only."""
    keys = x.new_zeros(x.shape[:1], dtype=torch.int64)
    if x.numel():
        places = (_place(x), _place(y), _place(about), _place(keys))
        _run("magnitudes", x, x.shape[1], *places, mode, *x.shape, *x.stride(), *y.stride())
    return keys


def terms(mode: int, x: Tensor, y: Tensor, about: Tensor, keys: Tensor) -> Tensor:
    """The words of the sums of the parts' terms."""
    words = x.new_zeros((x.shape[0], WORDS), dtype=torch.int64)
    if x.numel():
        places = (_place(x), _place(y), _place(about), _place(keys), _place(words))
        _run("terms", x, x.shape[1], *places, mode, *x.shape, *x.stride(), *y.stride())
    return words


def totals(x: Tensor, keys: Tensor, words: Tensor) -> Tensor:
    """The sums of whole rows in the work type."""
    sums = x.new_empty(x.shape[:1], dtype=work_dtype(x.dtype))
    if x.shape[0]:
        _run("totals", x, 0, _place(keys), _place(words), _place(sums))
    return sums


def losses(
    own: Tensor,
    targets: Tensor,
    about: Tensor,
    everything: Tensor | None,
    whole: CrossEntropyDescriptor,
    values: Scalars,
) -> tuple[Tensor, Tensor]:
    """(losses, states) of rows; own: the logits of their targets. everything: the sums of all log-probabilities."""
    rows = own.shape[0]
    loss, state = about.new_empty(rows), about.new_empty((STATE, rows))
    if rows:
        sums = about if everything is None else everything
        places = [_place(t) for t in (about, own, targets, sums, loss, state)]
        options = (everything is not None, values.keep, values.spread, values.z, values.z_twice)
        _run("losses", own, 0, *places, rows, *options)
    return loss, state


def logit_gradients(
    logits: Tensor, targets: Tensor, dlosses: Any, state: Tensor, whole: CrossEntropyDescriptor, values: Scalars
) -> Tensor:
    """The gradients of a part's logits; targets are those of this part, or the marks of others; contiguous."""
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if logits.numel():
        x, here, kept, out = (arrays.numpy_view(t) for t in (logits, targets, state, dx))
        RowKernels(x, 1, here, None, values, out).backward(np.ascontiguousarray(plain(dlosses)), kept)
    return dx


def outputs(x: Tensor, about: Tensor, logarithm: bool) -> Tensor:
    """The parts' softmax, or its logarithm; contiguous."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        places = (_place(x), _place(about), _place(y))
        _run("outputs", x, x.shape[1], *places, logarithm, *x.shape, *x.stride())
    return y


def gradients(dy: Tensor, y: Tensor, sums: Tensor, logarithm: bool) -> Tensor:
    """The gradients of `outputs`; contiguous."""
    dx = torch.empty_like(y)
    if y.numel():
        places = (_place(dy), _place(y), _place(sums), _place(dx))
        _run("gradients", y, y.shape[1], *places, logarithm, y.shape[1], *dy.stride())
    return dx
