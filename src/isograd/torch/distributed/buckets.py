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

    @property
    def total(self) -> Tensor:
        """The sum so far."""
        return self.bucket.total[self.offset : self.offset + self.size]

    def flat(self, gradient: Tensor) -> Tensor:
        """A gradient's elements in the bucket's order, contiguous."""
        if tuple(gradient.stride()) != self.stride:
            ordered = torch.empty_strided(self.shape, self.stride, dtype=gradient.dtype, device=gradient.device)
            gradient = ordered.copy_(gradient)
        return gradient.as_strided((self.size,), (1,))

    def add(self, gradient: Tensor, peaks: Tensor) -> None:
        """Add a unit's gradient."""
        quantum, limit = self.setting
        kernels.accumulate(self.flat(gradient), self.total, peaks, self.index, quantum, limit, not self.seen)
        self.seen = True

    def add_quanta(self, units: Tensor) -> None:
        """Add a unit's gradient that was rounded and reduced."""
        if self.seen:
            self.total.add_(units)
        else:
            self.total.copy_(units)
            self.seen = True


class Bucket:
    """Totals of parameters of one dtype and quantum, which are reduced together."""

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.dtype = tuple(slots), dtype
        size = 0
        for slot in slots:
            slot.bucket, slot.offset = self, size
            size += -(-slot.size // _ALIGNMENT) * _ALIGNMENT
        # What lies between parameters is added up as well: zeros.
        self.total = torch.zeros(size, dtype=torch.int64, device=device)
        self.missing = set(slots)  # whose gradient the last unit has not brought yet
        self.sent = False
        self._work: Any = None

    def send(self, group: Any) -> None:
        """Begin to add over the ranks of a group, where there is one."""
        self.sent = True
        for slot in self.slots:
            if not slot.seen:
                slot.total.zero_()
        if group is not None:
            self._work = dist.all_reduce(self.total, group=group, async_op=True)

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
        flat = torch.empty(self.total.shape, dtype=self.dtype, device=self.total.device)
        kernels.mean(self.total, header, flat, self.slots[0].setting.quantum)
        return [(slot, flat.as_strided(slot.shape, slot.stride, slot.offset)) for slot in self.slots]


def packed(slots: Sequence[Slot], most_bytes: int, device: torch.device) -> list[Bucket]:
    """Buckets of at most so many bytes, or one parameter, in the order in which a backward pass completes them."""
    found: list[Bucket] = []
    waiting: dict[Any, list[Slot]] = {}
    sizes: dict[Any, int] = {}
    for slot in reversed(slots):
        key = slot.parameter.dtype, slot.setting.quantum
        if key in waiting and sizes[key] + 8 * slot.size > most_bytes:
            found.append(Bucket(waiting.pop(key), slot.parameter.dtype, device))
        if key not in waiting:
            waiting[key], sizes[key] = [], 0
        waiting[key].append(slot)
        sizes[key] += 8 * slot.size
    return found + [Bucket(rest, rest[0].parameter.dtype, device) for rest in waiting.values()]
