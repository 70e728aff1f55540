"""As `vocab_cpu.py` in Triton, on the current stream of the tensors' device and without waiting."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from isograd.devices.triton_launcher import Launcher, Specification, kept, power_of_two
from isograd.losses.cross_entropy_plans import CrossEntropyDescriptor, Scalars
from isograd.losses.cross_entropy_reference import STATE
from isograd.losses.triton_cross_entropy_launch import cross_entropy_backward_in_part, numbers
from isograd.numerics.constants import SHORT_ROW
from isograd.torch.distributed import triton_vocab
from isograd.torch.distributed.vocab_layout import STATISTICS, WORDS
from isograd.torch.tensors import work_dtype

_LEAST = -(1 << 63)  # below the key of every number
_BLOCK, _GROUP = 2048, 8  # elements of a tile, and of a thread
_ROWS = 128  # rows of a program that computes what follows from sums


@kept
def _walk(
    kernel: str, shape: tuple[int, int], strides: tuple[int, ...], flags: tuple[Any, ...], dtype: Any
) -> Launcher:
    """A kernel that walks through the classes of rows."""
    count, n = shape
    block = min(max(power_of_two(n), 32 * _GROUP), _BLOCK)
    per_program = _BLOCK // block
    tile = (per_program, block, _GROUP, min(16 // dtype.itemsize, _GROUP))
    tail = (count, n, *strides, *flags, *tile)
    specification = Specification(tail, -(-count // per_program), 8, free=("count", "n"))
    return Launcher(getattr(triton_vocab, kernel), specification)


@kept
def _follow(kernel: str, count: int, flags: tuple[Any, ...], dtype: Any) -> Launcher:
    """A kernel that computes what follows from the sums of rows."""
    specification = Specification((count, *flags, _ROWS), -(-count // _ROWS), 4, free=("count",))
    return Launcher(getattr(triton_vocab, kernel), specification)


def _shape(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.shape[1]


def _is_long(dtype: torch.dtype, classes: int) -> bool:
    return dtype.itemsize == 2 and classes > SHORT_ROW


def maxima(x: Tensor) -> Tensor:
    """The keys of the maxima of the parts of rows, int64."""
    keys = x.new_full(x.shape[:1], _LEAST, dtype=torch.int64)
    if x.numel():
        _walk("maxima", _shape(x), x.stride(), (), x.dtype)(x, keys)
    return keys


def exponentials(x: Tensor, keys: Tensor, classes: int) -> Tensor:
    """The words of the sums of the parts' exponentials; the last word of a row is 0."""
    words = x.new_zeros((x.shape[0], WORDS), dtype=torch.int64)
    if x.numel():
        flags = (_is_long(x.dtype, classes),)
        _walk("exponentials", _shape(x), x.stride(), flags, x.dtype)(x, keys, words)
    return words


def statistics(x: Tensor, keys: Tensor, words: Tensor, classes: int) -> Tensor:
    """What follows from whole rows' maxima and sums, [STATISTICS, rows]."""
    about = x.new_empty((STATISTICS, x.shape[0]), dtype=work_dtype(x.dtype))
    if x.shape[0]:
        flags = (x.dtype.itemsize == 2, _is_long(x.dtype, classes))
        _follow("statistics", x.shape[0], flags, x.dtype)(keys, words, about)
    return about


def magnitudes(mode: int, x: Tensor, y: Tensor, about: Tensor) -> Tensor:
    """The keys of the largest magnitudes among the parts' terms, int64; `about` is looked at for logits only."""
    keys = x.new_zeros(x.shape[:1], dtype=torch.int64)
    if x.numel():
        strides = (*x.stride(), *y.stride())
        _walk("magnitudes", _shape(x), strides, (mode,), (x.dtype))(x, y, about, keys)
    return keys


def terms(mode: int, x: Tensor, y: Tensor, about: Tensor, keys: Tensor) -> Tensor:
    """The words of the sums of the parts' terms."""
    words = x.new_zeros((x.shape[0], WORDS), dtype=torch.int64)
    if x.numel():
        strides = (*x.stride(), *y.stride())
        _walk("terms", _shape(x), strides, (mode,), x.dtype)(x, y, about, keys, words)
    return words


def totals(x: Tensor, keys: Tensor, words: Tensor) -> Tensor:
    """The sums of whole rows in the work type."""
    found = x.new_empty(x.shape[:1], dtype=work_dtype(x.dtype))
    if x.shape[0]:
        _follow("totals", x.shape[0], (), x.dtype)(keys, words, found)
    return found


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
        flags = (everything is not None, bool(values.z))
        given = (about, own, targets, sums, numbers(whole, None, own.device), loss, state)
        _follow("losses", rows, flags, own.dtype)(*given)
    return loss, state


def logit_gradients(
    logits: Tensor, targets: Tensor, dlosses: Tensor, state: Tensor, whole: CrossEntropyDescriptor, values: Scalars
) -> Tensor:
    """The gradients of a part's logits; targets are those of this part, or the marks of others; contiguous."""
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if logits.numel():
        # -1 marks an ignored row, and -2 is no class of this part.
        marked = dataclasses.replace(whole, ignore_index=-1)
        given = {"logits": logits, "targets": targets, "dlosses": dlosses, "state": state, "dlogits": dx}
        cross_entropy_backward_in_part(marked, 0, given)
    return dx


def outputs(x: Tensor, about: Tensor, logarithm: bool) -> Tensor:
    """The parts' softmax, or its logarithm; contiguous."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        _walk("outputs", _shape(x), x.stride(), (logarithm,), x.dtype)(x, about, y)
    return y


def gradients(dy: Tensor, y: Tensor, sums: Tensor, logarithm: bool) -> Tensor:
    """The gradients of `outputs`; contiguous."""
    dx = torch.empty_like(y)
    if y.numel():
        _walk("gradients", _shape(y), dy.stride(), (logarithm,), y.dtype)(dy, y, sums, dx)
    return dx
