# mypy: ignore-errors
"""What the Hopper kernels of attention share: TMA under one name in every Triton, and operands in 16 bits."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

LOG2E = math.log2(math.e)


@_core.builtin
def _add_before_39(tensor_desc, coord, src, _semantic=None):
    kind = _core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# The names since Triton 3.9, or what there was before.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
add = getattr(tma, "async_atomic_add", None) or _add_before_39


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """Neighbours in a row rounded to 16 bits, two in an int32: so they stay in one register across iterations."""
    first, second = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    kind: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    asm: gl.constexpr = f"cvt.rn.{kind}.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """The numbers of `packed` in a layout which gives every thread those that it has."""
    first = pairs.to(gl.int16).to(dtype, bitcast=True)
    second = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    x = gl.join(first, second).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(x, layout, assert_trivial=True)
