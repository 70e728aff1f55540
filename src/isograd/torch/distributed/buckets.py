"""Where totals lie: parameters in the order of a backward pass, packed into buckets that are reduced one by one."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isograd.torch.distributed import kernels
from isograd.torch.distributed.settings import Setting

_ALIGNMENT = 16  # elements
# The name until torch 2.12, of which later versions warn.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def in_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, which every backend sends whatever it holds."""
    return tensor.view(-1).view(torch.uint8)


class Slot:
    """A parameter's place in a bucket.

    shape, stride: of its elements in the bucket, in the order in which they lie in memory. index: of its peak.
    """

    __slots__ = ("bucket", "index", "name", "offset", "parameter", "seen", "setting", "shape", "stride")

    def __init__(self, name: str, parameter: torch.nn.Parameter, local: Tensor, setting: Setting, index: int) -> None:
        self.name, self.parameter, self.setting, self.index = name, parameter, setting, index
        self.shape = tuple(local.shape)
        # As autograd lays out a gradient: like the parameter if that has no gaps, else contiguous.
        self.stride = tuple(torch.empty_like(local, device="meta").stride())
        self.offset, self.seen = 0, False
        self.bucket: Bucket

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """Its elements of a tensor as long as the bucket, or of the rows of one."""
        return flat[..., self.offset : self.offset + self.size]

    def flat(self, gradient: Tensor) -> Tensor:
        """A gradient's elements in the bucket's order, contiguous."""
        if tuple(gradient.stride()) != self.stride:
            ordered = torch.empty_strided(self.shape, self.stride, dtype=gradient.dtype, device=gradient.device)
            gradient = ordered.copy_(gradient)
        return gradient.as_strided((self.size,), (1,))

    def add(self, gradient: Tensor, peaks: Tensor) -> None:
        """Add a unit's gradient."""
        if self.bucket.parts is None:
            self.add_parts(self.flat(gradient), peaks)
        else:
            kernels.keep(self.flat(gradient), self.of(self.bucket.own), peaks, self.index)
            self.seen = True

    def add_parts(self, gradients: Tensor, peaks: Tensor) -> None:
        """Add gradients of a unit in the bucket's order: [n], or [ranks, n] with those of several ranks."""
        quantum, limit = self.setting
        kernels.accumulate(gradients, self.of(self.bucket.total), peaks, self.index, quantum, limit, not self.seen)
        self.seen = True


class Bucket:
    """What is sent at once: totals of parameters of one dtype and quantum, or their gradients in the only unit.

    total: int64 sums, which are added over the ranks; or parts: a row of gradients for each rank, where rows take no
    more memory than totals.
    """

    def __init__(self, slots: Sequence[Slot], group: Any, single: bool) -> None:
        self.slots, self.dtype = tuple(slots), slots[0].parameter.dtype
        self._group, device = group, slots[0].parameter.device
        size = 0
        for slot in slots:
            slot.bucket, slot.offset = self, size
            size += -(-slot.size // _ALIGNMENT) * _ALIGNMENT
        # What lies between parameters is sent as well: zeros.
        self.parts: Tensor | None = None
        ranks = dist.get_world_size(group) if single else 0
        if 0 < ranks * self.dtype.itemsize <= torch.int64.itemsize:
            self.parts = torch.zeros((ranks, size), dtype=self.dtype, device=device)
            self.own = self.parts[dist.get_rank(group)]
        else:
            self.total = torch.zeros(size, dtype=torch.int64, device=device)
        self.missing = set(slots)  # whose gradient the last unit has not brought yet
        self.sent = False
        self._work: Any = None

    def send(self) -> None:
        """Begin to send to the ranks of the group, where there is one."""
        self.sent = True
        for slot in self.slots:
            if not slot.seen:
                slot.of(self.total if self.parts is None else self.own).zero_()
        if self.parts is not None:
            self._work = gather(in_bytes(self.parts), in_bytes(self.own), group=self._group, async_op=True)
        elif self._group is not None:
            self._work = dist.all_reduce(self.total, group=self._group, async_op=True)

    def wait(self) -> None:
        """Let the current stream, or on the CPU the caller, wait for the sums."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def clear(self) -> None:
        """Begin the next step."""
        self.wait()
        self.missing, self.sent = set(self.slots), False
        for slot in self.slots:
            slot.seen = False

    def gradients(self, header: Tensor) -> list[tuple[Slot, Tensor]]:
        """The mean of every parameter; all of a bucket share memory."""
        quantum, limit = self.slots[0].setting
        if self.parts is not None:
            flat = torch.empty_like(self.own)
            kernels.mean_of_parts(self.parts, header, flat, quantum, limit)
        else:
            flat = torch.empty(self.total.shape, dtype=self.dtype, device=self.total.device)
            kernels.mean(self.total, header, flat, quantum)
        return [(slot, flat.as_strided(slot.shape, slot.stride, slot.offset)) for slot in self.slots]


def packed(slots: Sequence[Slot], most_bytes: int, group: Any, single: bool) -> list[Bucket]:
    """Buckets of at most so many bytes, or one parameter, in the order in which a backward pass completes them.

    single: whether every rank of the group has one unit in a step.
    """
    found: list[Bucket] = []
    waiting: dict[Any, list[Slot]] = {}
    sizes: dict[Any, int] = {}
    for slot in reversed(slots):
        key = slot.parameter.dtype, slot.setting
        if key in waiting and sizes[key] + 8 * slot.size > most_bytes:
            found.append(Bucket(waiting.pop(key), group, single))
        if key not in waiting:
            waiting[key], sizes[key] = [], 0
        waiting[key].append(slot)
        sizes[key] += 8 * slot.size
    return found + [Bucket(rest, group, single) for rest in waiting.values()]
