"""The norm of gradients, and gradients clipped to one, with the same bits for any order, sharding and device.

Rule 19 of `docs/arithmetic.md`: the squares of a tensor are summed exactly, of a DTensor over its shards on all ranks,
the tensors' sums are summed exactly again, and the root is rounded once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isograd.core.checks import real_number
from isograd.errors import DeviceMismatchError, InvalidProblemError, NonFiniteGradientError, UnsupportedError
from isograd.optimizers import norm_reference as ref
from isograd.optimizers.chunks import chunks
from isograd.optimizers.norm_reference import WORDS
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment
from isograd.torch import many_tensors as many
from isograd.torch.tensors import NAMES, work_dtype

_MOST = 1 << 17  # tensors whose sums one word adds up


class _Norm(NamedTuple):
    """The norm, and what gradients are multiplied with."""

    norm: Tensor
    factor: Tensor


class _Part(NamedTuple):
    """Tensors of a device that one launch serves: their dtype, whether they are aligned, and their chunks."""

    dtype: torch.dtype
    aligned: bool
    where: Any


class _Tensors(ABC):
    """The tensors of one device, in an order that all ranks have."""

    keys: Tensor  # of each tensor's largest term
    words: Tensor  # [tensors, WORDS], of each tensor's sum of squares

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.groups: list[tuple[Any, ...]] = []  # the process groups that hold each tensor's shards
        self.back: list[tuple[Tensor, Tensor]] = []

    def add(self, tensor: Tensor, groups: tuple[Any, ...]) -> None:
        """Take a tensor in."""
        (held,), back = many.alike([tensor])
        assert held is not None
        self.tensors.append(held)
        self.groups.append(groups)
        self.back += back

    def prepare(self) -> None:
        """Make the table and the parts."""
        self.table = many.table_of([((tensor,), None) for tensor in self.tensors])
        self.dtypes = list(dict.fromkeys(tensor.dtype for tensor in self.tensors))
        self.parts: list[_Part] = []
        for dtype in self.dtypes:
            table = self.table.copy()
            table[[tensor.dtype is not dtype for tensor in self.tensors], many.COUNT] = 0
            self.parts += self._parts(dtype, table)

    @abstractmethod
    def _parts(self, dtype: torch.dtype, table: many.Integers) -> list[_Part]:
        """The parts of a dtype; other tensors have no elements in the table."""

    @abstractmethod
    def find_keys(self, squared: bool) -> None:
        """The keys of the largest terms of what is here."""

    @abstractmethod
    def find_words(self) -> None:
        """The integer sums of what is here, from everybody's keys."""

    @abstractmethod
    def sums(self, work: torch.dtype) -> Tensor:
        """The sums of squares, as if all tensors had one work type."""

    def results(self, squared: bool, work: torch.dtype) -> Tensor:
        """The sums of squares of the tensors, or their largest magnitudes, each in its work type, in a wider one."""

        def of_type(work: torch.dtype) -> Tensor:
            if squared:
                return self.sums(work)
            return self.keys.view(torch.float64) if work is torch.float64 else self.keys.int().view(torch.float32)

        types = {work_dtype(dtype) for dtype in self.dtypes}
        if len(types) == 1:
            return of_type(types.pop()).to(work)
        wide = many.upload(np.array([t.dtype is torch.float64 for t in self.tensors], np.int64), self.device) != 0
        return torch.where(wide, of_type(torch.float64), of_type(torch.float32).double())

    @abstractmethod
    def finish(self, results: Tensor, squared: bool, max_norm: float) -> Tensor:
        """The norm, and what gradients are multiplied with."""

    @abstractmethod
    def scale(self, factor: Tensor) -> None:
        """Multiply in place."""


class _OnCpu(_Tensors):
    """NumPy and Numba."""

    def _parts(self, dtype: torch.dtype, table: many.Integers) -> list[_Part]:
        from isograd.optimizers import numba_norm

        return [_Part(dtype, True, chunks(many.counts_of(table), numba_norm.LENGTH))]

    def _run(self, kernel: Any, part: _Part, *arguments: Any) -> None:
        from isograd.optimizers import numba_norm

        grain = parallel.grain(len(part.where), numba_norm.LENGTH)
        zero = np.float64(0) if part.dtype is torch.float64 else np.float32(0)
        addresses = self.table.ctypes.data, part.where.ctypes.data
        like = many.KERNEL_TYPES[part.dtype]
        parallel.for_ranges(kernel, len(part.where), grain, like, zero, *addresses, *arguments)

    def find_keys(self, squared: bool) -> None:
        from isograd.optimizers import numba_norm

        keys = np.zeros(len(self.tensors), np.int64)
        for part in self.parts:
            each = np.zeros(len(part.where), np.int64)
            self._run(numba_norm.norm_keys, part, each.ctypes.data, squared)
            np.maximum.at(keys, part.where[:, 0], each)
        self.keys = torch.from_numpy(keys)

    def find_words(self) -> None:
        from isograd.optimizers import numba_norm

        words, keys = np.zeros((len(self.tensors), WORDS), np.int64), self.keys.numpy()
        for part in self.parts:
            each = np.zeros((len(part.where), WORDS), np.int64)
            of_type = keys if part.dtype is torch.float64 else keys.astype(np.int32)
            self._run(numba_norm.norm_words, part, of_type.ctypes.data, each.ctypes.data)
            np.add.at(words, part.where[:, 0], each)
        self.words = torch.from_numpy(words)

    def sums(self, work: torch.dtype) -> Tensor:
        from isograd.optimizers import numba_norm

        out, keys = torch.empty(len(self.tensors), dtype=work), self.keys
        if work is torch.float32:
            keys = keys.int()
        zero, n = many.KERNEL_TYPES[work], len(self.tensors)
        parallel.for_ranges(numba_norm.norm_sums, n, n, zero, keys.data_ptr(), self.words.data_ptr(), out.data_ptr())
        return out

    def finish(self, results: Tensor, squared: bool, max_norm: float) -> Tensor:
        norm = ref.norm_of_sums(results.numpy()) if squared else ref.largest(results.numpy())
        return torch.from_numpy(np.array([norm, ref.clip_factor(norm, max_norm)]))

    def scale(self, factor: Tensor) -> None:
        from isograd.optimizers import numba_norm

        if factor.item() == 1:
            return
        for part in self.parts:
            with np.errstate(all="ignore"):
                value = np.float64(factor.item()) if part.dtype is torch.float64 else np.float32(factor.item())
            self._run(numba_norm.scale_chunks, part, value)


class _OnGpu(_Tensors):
    """Triton; nothing waits."""

    def prepare(self) -> None:
        from isograd.optimizers import triton_norm

        super().prepare()
        self._kernels = triton_norm
        self._table = many.upload(self.table, self.device)

    def _parts(self, dtype: torch.dtype, table: many.Integers) -> list[_Part]:
        return [
            _Part(dtype, aligned, many.places(counts, self._length, self.device))
            for aligned, counts in many.by_alignment(table)
        ]

    @property
    def _length(self) -> int:
        from isograd.optimizers import triton_norm

        return triton_norm.chunk_length(int(many.counts_of(self.table).sum()))

    def find_keys(self, squared: bool) -> None:
        self.keys = torch.zeros(len(self.tensors), dtype=torch.int64, device=self.device)
        for dtype, aligned, where in self.parts:
            self._kernels.launch_keys(self._table, where, self.keys, NAMES[dtype], squared, aligned, self._length)

    def find_words(self) -> None:
        self.words = torch.zeros((len(self.tensors), WORDS), dtype=torch.int64, device=self.device)
        for dtype, aligned, where in self.parts:
            self._kernels.launch_words(self._table, where, self.keys, self.words, NAMES[dtype], aligned, self._length)

    def sums(self, work: torch.dtype) -> Tensor:
        out = torch.empty(len(self.tensors), dtype=work, device=self.device)
        self._kernels.launch_sums(self.keys, self.words, out)
        return out

    def finish(self, results: Tensor, squared: bool, max_norm: float) -> Tensor:
        out = torch.empty(2, dtype=results.dtype, device=self.device)
        with np.errstate(over="ignore"):
            self._kernels.launch_finish(results, out, max_norm, squared)
        return out

    def scale(self, factor: Tensor) -> None:
        factor = factor.to(self.device, non_blocking=True)
        for dtype, aligned, where in self.parts:
            self._kernels.launch_scale(self._table, where, factor, NAMES[dtype], aligned, self._length)


# --- over ranks ------------------------------------------------------------------------------------------------------
def _shard_groups(operation: str, name: str, tensor: Tensor) -> tuple[Any, ...]:
    """The process groups over which a tensor is cut; what is replicated counts once."""
    if not many.is_distributed(tensor):
        return ()
    groups = []
    for axis, placement in enumerate(many.placements(tensor)):
        if placement.is_partial():
            raise UnsupportedError(f"{operation}: {name} is {placement}; accepted: Shard and Replicate")
        if not placement.is_replicate():
            groups.append(tensor.device_mesh.get_group(axis))  # type: ignore[attr-defined]
    return tuple(groups)


def _all_reduce(found: list[_Tensors], attribute: str, maximum: bool) -> None:
    """Replace what this rank has of sharded tensors by the maxima, or the sums, over all ranks."""
    import torch.distributed as dist

    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    for tensors in found:
        mine = getattr(tensors, attribute)
        for groups in dict.fromkeys(tensors.groups):
            which = [i for i, others in enumerate(tensors.groups) if others == groups]
            part = mine if len(which) == len(mine) else mine[which]
            for group in groups:
                dist.all_reduce(part, op, group)
            if part is not mine and groups:
                mine[which] = part


# --- the norm --------------------------------------------------------------------------------------------------------
def _gathered(operation: str, name: str, tensors: list[Tensor]) -> list[_Tensors]:
    found: dict[torch.device, _Tensors] = {}
    for i, tensor in enumerate(tensors):
        given = many.local(operation, f"{name}[{i}]", tensor)
        groups = _shard_groups(operation, f"{name}[{i}]", tensor)
        if given.device not in found:
            found[given.device] = (_OnCpu if given.is_cpu else _OnGpu)(given.device)
        found[given.device].add(given, groups)
    if len(tensors) > _MOST:
        raise UnsupportedError(f"{operation}: {name} has {len(tensors)} tensors; accepted: up to {_MOST}")
    if len({device.type for device in found}) > 1:
        raise DeviceMismatchError(f"{operation}: {name} has tensors on CPUs and on GPUs; expected one kind")
    for of_device in found.values():
        of_device.prepare()
    return list(found.values())


def _norm(found: list[_Tensors], squared: bool, max_norm: float) -> _Norm:
    sharded = any(any(tensors.groups) for tensors in found)
    for tensors in found:
        tensors.find_keys(squared)
    if sharded:
        _all_reduce(found, "keys", True)
    if squared:
        for tensors in found:
            tensors.find_words()
        if sharded:
            _all_reduce(found, "words", False)
    double = any(torch.float64 in tensors.dtypes for tensors in found)
    work, first = torch.float64 if double else torch.float32, found[0]
    parts = [tensors.results(squared, work).to(first.device, non_blocking=True) for tensors in found]
    out = first.finish(torch.cat(parts), squared, max_norm)
    return _Norm(out[0], out[1:])


def _is_squared(operation: str, norm_type: Any) -> bool:
    if norm_type == "inf":
        return False
    kind = real_number(operation, "norm_type", norm_type)
    if kind not in (2.0, math.inf):
        raise UnsupportedError(f"{operation}: norm_type is {norm_type!r}; accepted: 2 and inf")
    return kind == 2.0


def _require_finite(operation: str, norm: Tensor) -> None:
    if not math.isfinite(norm.item()):
        raise NonFiniteGradientError(
            f"{operation}: the total norm is {norm.item()}; with error_if_nonfinite=False gradients are multiplied all "
            "the same"
        )


def _listed(operation: str, name: str, tensors: Any) -> list[Any]:
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, Iterable):
        raise InvalidProblemError(f"{operation}: {name} is {type(tensors).__name__}; expected tensors")
    return list(tensors)


@many.uncompiled
@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of tensors as if they were one vector, as `torch.nn.utils.get_total_norm`, but order-free.

    norm_type: 2, or inf for the largest magnitude. Elements of a tensor may stand in any order and tensors may too; a
    DTensor counts with all of its shards, by two all-reduces of integers, and gives every rank the same norm, a plain
    tensor. The result is float32, or float64 where a tensor is. On a GPU nothing waits unless error_if_nonfinite.
    foreach: taken for compatibility.

    Raises UnsupportedError for other norms, sparse tensors and other dtypes, and NonFiniteGradientError, a
    RuntimeError, where error_if_nonfinite.
    """
    operation = "get_total_norm"
    squared, given = _is_squared(operation, norm_type), _listed(operation, "tensors", tensors)
    if not given:
        return torch.tensor(0.0)
    with default_environment():
        norm = _norm(_gathered(operation, "tensors", given), squared, math.inf).norm
    if error_if_nonfinite:
        _require_finite(operation, norm)
    return norm


@many.uncompiled
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Multiply gradients in place by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_`.

    The norm is that of `get_total_norm`, which is returned; so the gradients have the same bits on any number of ranks.
    Errors as there, before anything is written, and InvalidProblemError for a max_norm below 0.
    """
    operation = "clip_grad_norm_"
    most = real_number(operation, "max_norm", max_norm)
    if not most >= 0:
        raise InvalidProblemError(f"{operation}: max_norm is {max_norm!r}; expected a number of at least 0")
    squared, given = _is_squared(operation, norm_type), _listed(operation, "parameters", parameters)
    gradients = [p.grad for p in given if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    with default_environment():
        found = _gathered(operation, "gradients", gradients)
        norm, factor = _norm(found, squared, most)
        if error_if_nonfinite:
            _require_finite(operation, norm)
        for tensors in found:
            tensors.scale(factor)
            for tensor, copy in tensors.back:
                tensor.copy_(copy)
    torch.autograd.graph.increment_version(gradients)
    return norm
