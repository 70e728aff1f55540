"""The norm of gradients, and gradients clipped to one, with the same bits for any order, sharding and device.

Rule 18 of `docs/arithmetic.md`: the squares of a tensor are summed exactly, of a DTensor over its shards on all ranks,
the tensors' sums are summed exactly again, and the root is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isograd import parallel
from isograd.errors import DeviceMismatchError, InvalidProblemError, NonFiniteGradientError, UnsupportedError
from isograd.fenv import default_environment
from isograd.optimizers.norm_reference import WORDS
from isograd.plan import real_number
from isograd.torch import many_tensors as many
from isograd.torch.tensors import NAMES, work_dtype

_MOST = 1 << 17  # tensors whose sums one word adds up


class _Norm(NamedTuple):
    """The norm, and what gradients are multiplied with."""

    norm: Tensor
    factor: Tensor


class _Bundle:
    """Tensors of one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.tensors: list[Tensor] = []
        self.groups: list[tuple[Any, ...]] = []  # the process groups that hold each tensor's shards
        self.back: list[tuple[Tensor, Tensor]] = []
        self.keys = self.words = torch.empty(0)

    def add(self, tensor: Tensor, groups: tuple[Any, ...]) -> None:
        """Take a tensor in."""
        (one,), back = many.alike([tensor])
        self.tensors.append(tensor if one is None else one)
        self.groups.append(groups)
        self.back += back

    def prepare(self) -> None:
        """Write the table."""
        self.table = many.table_of([((tensor,), None) for tensor in self.tensors])
        self.counts = tuple(self.table[:, many.COUNT].tolist())
        if self.device.type == "cpu":
            from isograd.optimizers import numba_norm

            self.length = numba_norm.LENGTH
            self.where: Any = many.chunks(self.counts, self.length)
            return
        with default_environment():
            from isograd.optimizers import triton_norm

        self.length = triton_norm.chunk_length(sum(self.counts))
        self.where = many.places(self.counts, self.length, self.device)
        self.on_device = many.upload(self.table, self.device)
        self.aligned = many.is_aligned(self.table)

    def _on_cpu(self, kernel: Any, *arguments: Any) -> None:
        like = many.KERNEL_TYPES[self.dtype]
        zero = np.float64(0) if self.dtype is torch.float64 else np.float32(0)
        grain = parallel.grain(len(self.where), self.length)
        addresses = self.table.ctypes.data, self.where.ctypes.data
        parallel.for_ranges(kernel, len(self.where), grain, like, zero, *addresses, *arguments)

    def _of_tensors(self, each: Any, add: Any) -> Any:
        """From an array of chunks to one of tensors."""
        found = np.zeros((len(self.tensors), *each.shape[1:]), np.int64)
        add.at(found, self.where[:, 0], each)
        return found

    def find_keys(self, squared: bool) -> None:
        """The keys of the largest terms of what is here."""
        if self.device.type == "cpu":
            from isograd.optimizers import numba_norm

            each = np.zeros(len(self.where), np.int64)
            self._on_cpu(numba_norm.norm_keys, each.ctypes.data, squared)
            self.keys = torch.from_numpy(self._of_tensors(each, np.maximum))
            return
        from isograd.optimizers import triton_norm

        self.keys = torch.zeros(len(self.tensors), dtype=torch.int64, device=self.device)
        if len(self.where):
            triton_norm.launch_keys(
                self.on_device, self.where, self.keys, NAMES[self.dtype], squared, self.aligned, self.length
            )

    def find_words(self) -> None:
        """The integer sums of what is here, from everybody's keys."""
        if self.device.type == "cpu":
            from isograd.optimizers import numba_norm

            each = np.zeros((len(self.where), WORDS), np.int64)
            keys = self.keys.numpy().astype(np.int64 if self.dtype is torch.float64 else np.int32)
            self._on_cpu(numba_norm.norm_words, keys.ctypes.data, each.ctypes.data)
            self.words = torch.from_numpy(self._of_tensors(each, np.add))
            return
        from isograd.optimizers import triton_norm

        self.words = torch.zeros((len(self.tensors), WORDS), dtype=torch.int64, device=self.device)
        if len(self.where):
            triton_norm.launch_words(
                self.on_device, self.where, self.keys, self.words, NAMES[self.dtype], self.aligned, self.length
            )

    def results(self, squared: bool) -> Tensor:
        """The sums of the tensors, or their largest magnitudes, in the work type."""
        work = work_dtype(self.dtype)
        if self.device.type == "cpu":
            from isograd.optimizers import norm_reference as ref

            dtype = np.float64 if work is torch.float64 else np.float32
            keys = self.keys.tolist()
            if squared:
                found = [ref.sum_of_words(*each, dtype) for each in zip(keys, self.words.tolist(), strict=True)]
            else:
                found = [ref.key_value(key, dtype) for key in keys]
            return torch.from_numpy(np.array(found, dtype))
        if not squared:
            return self.keys.view(torch.float64) if work is torch.float64 else self.keys.int().view(torch.float32)
        from isograd.optimizers import triton_norm

        out = torch.empty(len(self.tensors), dtype=work, device=self.device)
        triton_norm.launch_sums(self.keys, self.words, out)
        return out

    def scale(self, factor: Tensor) -> None:
        """Multiply in place."""
        if self.device.type == "cpu":
            from isograd.optimizers import numba_norm

            with default_environment(), np.errstate(all="ignore"):
                wide = np.float64(factor.item())
                value = wide if self.dtype is torch.float64 else np.float32(wide)
            if value == 1:
                return
            self._on_cpu(numba_norm.scale_chunks, value)
        elif len(self.where):
            from isograd.optimizers import triton_norm

            factor = factor.to(self.device, non_blocking=True)
            triton_norm.launch_scale(
                self.on_device, self.where, factor, NAMES[self.dtype], self.aligned, self.length
            )


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


def _sharded(bundles: list[_Bundle]) -> Iterator[tuple[tuple[Any, ...], list[tuple[_Bundle, list[int]]]]]:
    """The tensors that are cut over the same groups, in an order that all ranks have."""
    found: dict[Any, dict[_Bundle, list[int]]] = {}
    for bundle in bundles:
        for i, groups in enumerate(bundle.groups):
            if groups:
                found.setdefault((groups, bundle.device), {}).setdefault(bundle, []).append(i)
    for (groups, _), members in found.items():
        yield groups, list(members.items())


def _all_reduce(bundles: list[_Bundle], attribute: str, maximum: bool) -> None:
    """Replace what this rank has of sharded tensors by the maxima, or the sums, over all ranks."""
    import torch.distributed as dist

    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    for groups, members in _sharded(bundles):
        flat = torch.cat([getattr(bundle, attribute)[which].flatten() for bundle, which in members])
        for group in groups:
            dist.all_reduce(flat, op, group)
        for bundle, which in members:
            mine = getattr(bundle, attribute)
            size = mine[which].numel()
            mine[which] = flat[:size].view(-1, *mine.shape[1:])
            flat = flat[size:]


# --- the norm --------------------------------------------------------------------------------------------------------
def _bundles(operation: str, name: str, tensors: list[Tensor]) -> list[_Bundle]:
    found: dict[Any, _Bundle] = {}
    for i, tensor in enumerate(tensors):
        given = many.local(operation, f"{name}[{i}]", tensor)
        groups = _shard_groups(operation, f"{name}[{i}]", tensor)
        key = given.device, given.dtype
        found.setdefault(key, _Bundle(*key)).add(given, groups)
    if len(tensors) > _MOST:
        raise UnsupportedError(f"{operation}: {name} has {len(tensors)} tensors; accepted: up to {_MOST}")
    if len({device.type for device, _ in found}) > 1:
        raise DeviceMismatchError(f"{operation}: {name} has tensors on CPUs and on GPUs; expected one kind")
    for bundle in found.values():
        bundle.prepare()
    return list(found.values())


def _norm(operation: str, bundles: list[_Bundle], first: Tensor, squared: bool, max_norm: float) -> _Norm:
    sharded = any(any(bundle.groups) for bundle in bundles)
    for bundle in bundles:
        bundle.find_keys(squared)
    if sharded:
        _all_reduce(bundles, "keys", True)
    if squared:
        for bundle in bundles:
            bundle.find_words()
        if sharded:
            _all_reduce(bundles, "words", False)
    work = torch.float64 if any(bundle.dtype is torch.float64 for bundle in bundles) else torch.float32
    device = first.device
    parts = [bundle.results(squared).to(device=device, dtype=work, non_blocking=True) for bundle in bundles]
    of_tensors = torch.cat(parts)
    if device.type == "cpu":
        from isograd.optimizers import norm_reference as ref

        with default_environment():
            values = of_tensors.numpy()
            norm = ref.norm_of_sums(values) if squared else ref.largest(values)
            pair = np.array([norm, ref.clip_factor(norm, max_norm)])
        out = torch.from_numpy(pair)
    else:
        from isograd.optimizers import triton_norm

        out = torch.empty(2, dtype=work, device=device)
        with default_environment(), np.errstate(over="ignore"):
            triton_norm.launch_finish(of_tensors, out, max_norm, squared)
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
    norm = _norm(operation, _bundles(operation, "tensors", given), given[0], squared, math.inf).norm
    if error_if_nonfinite:
        _require_finite(operation, norm)
    return norm


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
    bundles = _bundles(operation, "gradients", gradients)
    norm, factor = _norm(operation, bundles, gradients[0], squared, most)
    if error_if_nonfinite:
        _require_finite(operation, norm)
    for bundle in bundles:
        bundle.scale(factor)
        for tensor, copy in bundle.back:
            tensor.copy_(copy)
    torch.autograd.graph.increment_version([many.local(operation, "gradients", g) for g in gradients])
    return norm
