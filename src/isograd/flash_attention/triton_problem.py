"""Attention as the launchers of its GPU kernels see it: the problem, its operands' strides, its optional inputs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from isograd.devices.triton_launcher import architecture
from isograd.flash_attention import triton_masks as masks
from isograd.flash_attention import triton_tiles as tiles
from isograd.flash_attention.descriptors import AttentionDescriptor, AttentionWithCacheDescriptor
from isograd.flash_attention.options import AttentionOptions

Strides = tuple[int, ...]
Arguments = Mapping[str, torch.Tensor]
PAD = int(masks.PAD.value)
_LOG2E = math.log2(math.e)
_SHARED_CACHE = 16 << 20  # bytes of keys and values that programs which run together should share in the L2 cache


class Problem(NamedTuple):
    """What fixes the kernels but for strides."""

    batch: int
    heads: int
    groups: int
    lq: int
    lk: int
    head_dim: int
    v_dim: int
    dtype: torch.dtype
    options: AttentionOptions
    sequences: int | None
    bias: bool
    mask: bool
    segments: bool
    sinks: bool
    architecture: int
    cached: bool = False
    page_size: int = 0  # of a cache of pages, and their number for each sequence
    pages: int = 0

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Head dimensions, and elements of the rows of tiles."""
        return self.head_dim, self.v_dim, tiles.width(self.head_dim), tiles.width(self.v_dim)

    @property
    def sides(self) -> tuple[bool, bool, bool]:
        """Whether the diagonal is aligned to the lower right, and whether the left and the right are bounded."""
        left, right = self.options.reach()
        return self.options.alignment == "lower_right", left is not None, right is not None

    @property
    def direct(self) -> bool:
        """Whether a score is a positive multiple of q·k."""
        return not self.bias and not self.options.softcap and (self.options.scale or 0) > 0

    @property
    def numbers(self) -> tuple[int, int, float, float, int, float]:
        """Left and right end of the window; two factors of the scores; threshold and factor of the dropout."""
        o, scale = self.options, self.options.scale or 0.0
        most = self.lq + self.lk  # wider windows see no more
        left, right = (0 if side is None else min(side, most) for side in o.reach())
        factors = (2 * _LOG2E * scale / o.softcap, o.softcap * _LOG2E) if o.softcap else (scale * _LOG2E, 0.0)
        return -left, right, *factors, o.dropout_threshold, float(o.dropout_factor)

    @property
    def scale(self) -> float:
        """The factor of dq and dk."""
        return float(self.options.scale or 0.0)

    @property
    def exact(self) -> bool:
        """Whether the backward pass takes lse in two parts: its rounding would be the largest error of P."""
        return self.dtype == torch.float32

    @property
    def precision(self) -> str:
        """How matrix products of float32 are computed."""
        return "ieee" if self.dtype != torch.float32 or self.architecture < 80 else "bf16x6"

    def programs_of(self, length: int, block: int) -> int:
        """Tiles of `block` rows that cover the rows of one head, in every sequence."""
        if self.sequences is None:
            return -(-length // block)
        return length // block + self.sequences + 1

    @property
    def pitch(self) -> int:
        """Rows of a head in scratch memory: every sequence starts at a multiple of PAD."""
        return self.programs_of(self.lq, PAD) * PAD

    def together(self, length: int, heads: int) -> int:
        """Heads that run at the same time."""
        size = max(length, 1) * (self.head_dim + self.v_dim) * self.dtype.itemsize
        return max(min(_SHARED_CACHE // size, self.batch * heads), 1)


def problem_of(d: AttentionDescriptor, q: torch.Tensor) -> Problem:
    """What a descriptor says, on the device of q."""
    return Problem(
        d.batch,
        d.heads,
        d.groups,
        d.q_length,
        d.k_length,
        d.head_dim,
        d.v_dim,
        q.dtype,
        replace(d.options, seed=0),
        d.sequences,
        d.bias_shape is not None,
        d.mask_shape is not None,
        d.segments,
        d.sinks_dtype is not None,
        architecture(q),
        *((True, d.page_size or 0, d.table_shape[1]) if isinstance(d, AttentionWithCacheDescriptor) else ()),
    )


# --- operands --------------------------------------------------------------------------------------------------------
def row_strides(t: torch.Tensor) -> Strides:
    """Strides of batch, head and row; that of an axis of one element is not used, and so a harmless one."""
    return tuple([t.shape[-1] if t.shape[i] == 1 else t.stride(i) for i in range(3)])


def _addressable(t: torch.Tensor) -> bool:
    """Whether tensor descriptors can address the rows: everything a multiple of 16 bytes, and rows apart."""
    strides, each = row_strides(t), 16 // t.element_size()
    return t.data_ptr() % 16 == 0 and strides[2] > 0 and not any(stride % each for stride in strides)


def readable(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where descriptors cannot address its rows."""
    return t if _addressable(t) else t.clone(memory_format=torch.contiguous_format)


class Outputs:
    """Outputs as kernels can write them; `done` copies those that needed scratch."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        result = self._arguments[name]
        if not _addressable(result):
            scratch = torch.empty(result.shape, dtype=result.dtype, device=result.device)
            self._copies.append((result, scratch))
            return scratch
        return result

    def done(self) -> None:
        """Copy what was written elsewhere."""
        for result, scratch in self._copies:
            result.copy_(scratch)


class Extras(NamedTuple):
    """The optional inputs; where there is none, some tensor that is not read."""

    bias: torch.Tensor
    mask: torch.Tensor
    q_segments: torch.Tensor
    k_segments: torch.Tensor
    q_starts: torch.Tensor
    k_starts: torch.Tensor
    bias_strides: Strides
    mask_strides: Strides


def broadcast_strides(t: torch.Tensor | None) -> Strides:
    """Four strides, 0 along axes of one element."""
    return (0, 0, 0, 0) if t is None else tuple([0 if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)])


def extras(a: Arguments) -> Extras:
    """The optional inputs among the arguments."""

    def given(name: str) -> torch.Tensor:
        return a[name].contiguous() if name in a else a["q"]

    bias, mask = a.get("bias"), a.get("mask")
    return Extras(
        a["q"] if bias is None else bias,
        a["q"] if mask is None else mask.view(torch.uint8),
        given("q_segment_ids"),
        given("k_segment_ids"),
        given("cu_seqlens_q"),
        given("cu_seqlens_k"),
        broadcast_strides(bias),
        broadcast_strides(mask),
    )


def pages_or_readable(p: Problem, t: torch.Tensor) -> torch.Tensor:
    """Keys or values as the forward pass reads them: those in pages without a descriptor."""
    return t if p.page_size else readable(t)


def seed_words(options: AttentionOptions) -> tuple[int, int]:
    """The two words of the seed as signed integers."""
    low, high = options.seed & 0xFFFFFFFF, options.seed >> 32
    return low - ((low & 1 << 31) << 1), high - ((high & 1 << 31) << 1)
