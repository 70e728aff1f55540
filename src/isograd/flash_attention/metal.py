"""The attention family on Apple GPUs: causal or full, grouped heads, head dimensions up to 256."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from isograd.core import arrays
from isograd.core.descriptor import Kernel, KernelSku
from isograd.core.registry import register_kernel
from isograd.devices import metal
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.plans import OPERATIONS, family_guarantee, family_sku

_ROWS, _PIECE = 16, 64  # rows that a threadgroup owns, columns that it stages at a time
THREADS = 256  # of a group
_MATRICES = ("q", "k", "v", "o", "do", "dq", "dk", "dv")


def unserved(descriptor: Any) -> str | None:
    """Say which option the kernels do not have."""
    if descriptor.operation == "attention_delta":
        return None
    options, d = descriptor.options, descriptor
    served = AttentionOptions(
        causal=options.causal, alignment=options.alignment, scale=options.scale, seed=options.seed
    )
    if options != served or d.bias_shape or d.mask_shape or d.segments or d.sequences is not None or d.sinks_dtype:
        return "it serves full and causal attention without a window, softcap, bias, mask, segments, sinks or dropout"
    return None


def pieces(descriptor: Any) -> int:
    """Pieces of 64 columns of the wider of the two head dimensions, as many as a kernel was made for."""
    needed: int = -(-max(descriptor.head_dim, descriptor.v_dim) // _PIECE)
    return 4 if needed == 3 else needed


def groups_of(descriptor: Any, keys: bool) -> int:
    """Threadgroups of a launch that owns queries, or keys."""
    d = descriptor
    heads, length = (d.kv_heads, d.k_length) if keys else (d.heads, d.q_length)
    tiles: int = d.batch * heads * -(-length // _ROWS)
    return min(tiles, metal.MOST_GROUPS)


def problem_layout(descriptor: Any, strides: Mapping[str, tuple[int, ...]]) -> list[int]:
    """What kernels are told about a problem; arrays without strides here are not there."""
    d = descriptor
    scale = int(np.float32(d.options.scale).view(np.int32))
    layout = [d.batch, d.heads, d.kv_heads, d.q_length, d.k_length, d.head_dim, d.v_dim, int(d.options.causal)]
    layout += [d.options.offset(d.q_length, d.k_length), scale, int("dlse" in strides)]
    for name in _MATRICES:
        layout += strides.get(name, (0,) * 4)
    for name in ("lse", "dlse"):
        layout += strides.get(name, (0,) * 3)
    return layout


def delta_layout(batch: int, heads: int, length: int, columns: int, *strides: tuple[int, ...]) -> list[int]:
    """What the kernel of the row sums is told; strides of o, do and delta."""
    return [batch, heads, length, columns, *[step for steps in strides for step in steps]]


class AttentionInMetal(Kernel):
    """What the family's kernels in Metal have in common, whoever launches them."""

    family = "flash_attention"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        promised = metal.guarantee(family_guarantee(descriptor, narrowed=False), integers=False)
        return replace(family_sku(descriptor, self.backend, "apple"), precision_guarantee=promised)

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine, or which option the kernels do not have."""
        return unserved(descriptor) or super().reject(descriptor)


class MetalAttention(AttentionInMetal, metal.MetalKernel):
    """The family in Metal; scratch memory for the row sums comes from torch's allocator."""

    def launches(self, descriptor: Any, arguments: Mapping[str, Any]) -> Iterator[metal.Launch]:
        """The row sums, then dK and dV, then dQ; one launch for the others."""
        if descriptor.operation == "attention_delta":
            return self._delta(descriptor.dtype, **arguments)
        if descriptor.operation == "attention":
            return self._forward(descriptor, **arguments)
        return self._backward(descriptor, arguments)

    def _delta(self, dtype: str, o: Any, do: Any, delta: Any) -> Iterator[metal.Launch]:
        rows = arrays.size_of(tuple(delta.shape))
        if rows:
            layout = delta_layout(*o.shape, o.stride(), do.stride(), delta.stride())
            groups = min(rows, metal.MOST_GROUPS)
            yield metal.Launch(
                f"attention_delta_{dtype}", (o, do, delta, layout), groups, metal.threads_for(o.shape[3])
            )

    def _forward(self, d: Any, q: Any, k: Any, v: Any, o: Any, lse: Any) -> Iterator[metal.Launch]:
        groups = groups_of(d, keys=False)
        if groups == 0:
            return
        if d.k_length == 0:
            o.zero_()
            lse.fill_(float("-inf"))
            return
        given = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
        layout = problem_layout(d, {name: tuple(array.stride()) for name, array in given.items()})
        yield metal.Launch(f"attention_forward_{d.dtype}_{pieces(d)}", (q, k, v, o, lse, layout), groups, THREADS)

    def _backward(self, d: Any, a: Mapping[str, Any]) -> Iterator[metal.Launch]:
        if 0 in (d.batch * d.heads, d.q_length, d.k_length):
            for name in ("dq", "dk", "dv"):
                a[name].zero_()
            return
        delta = a["lse"].new_empty(d.lse_shape)
        yield from self._delta(d.dtype, a["o"], a["do"], delta)
        layout = problem_layout(d, {name: tuple(array.stride()) for name, array in a.items()})
        inputs = (a["do"], a["q"], a["k"], a["v"], a["lse"], delta, a.get("dlse", a["lse"]))
        suffix = f"{d.dtype}_{pieces(d)}"
        groups, buffers = groups_of(d, keys=True), (*inputs, a["dk"], a["dv"], layout)
        yield metal.Launch(f"attention_key_gradient_{suffix}", buffers, groups, THREADS)
        groups = groups_of(d, keys=False)
        yield metal.Launch(f"attention_query_gradient_{suffix}", (*inputs, a["dq"], layout), groups, THREADS)


for _operation in OPERATIONS:
    for _dtype in metal.DTYPES:
        register_kernel(_operation, "mps", _dtype, MetalAttention())
