"""Launches of Gluon kernels that read and write whole tiles by TMA, through descriptors of their tensors.

The driver makes the descriptors for every launch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isograd.devices.triton_launcher import Launcher, Specification


class Block(NamedTuple):
    """A tensor that is read or written in tiles."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    tile: tuple[int, ...]

    def described(self, base: Any, dtype: torch.dtype) -> TensorDescriptor:
        """The descriptor of a tensor at `base`."""
        swizzle = min(self.tile[-1] * dtype.itemsize, 128)
        layout = gl.NVMMASharedLayout(swizzle, 8 * dtype.itemsize, len(self.shape))
        return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.tile), layout)


class BlockLauncher(Launcher):
    """A launcher whose first tensors are given to the kernel as descriptors of blocks."""

    __slots__ = ("_blocks",)

    def __init__(self, kernel: Any, specification: Specification, blocks: Sequence[Block]) -> None:
        super().__init__(kernel, specification)
        self._blocks = tuple(blocks)

    def described(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """What the compiler is shown of the tensors."""
        return [*self._descriptors(tensors), *tensors[len(self._blocks) :]]

    def passed(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> list[Any]:
        """What the driver is given of the tensors."""
        return [*self._descriptors(tensors), *addresses[len(self._blocks) :]]

    def _descriptors(self, tensors: Sequence[torch.Tensor]) -> list[TensorDescriptor]:
        return [block.described(t, t.dtype) for block, t in zip(self._blocks, tensors, strict=False)]
