"""The floating-point environment of a call.

Flush-to-zero and the rounding mode live in a register that a thread inherits from whoever started it;
`torch.set_flush_denormal(True)` sets it for good. Every entry point saves the register, installs IEEE 754's default
(round to nearest, subnormals kept, nothing trapped), and restores it.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from isograd.numerics.numba_compile import kernel

_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
# x86: MXCSR with every exception masked. 64-bit Arm: FPCR all zero.
_DEFAULT = 0x1F80 if _X86 else 0


@intrinsic
def _read_control(typingctx: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not _X86:
            read = builder.module.declare_intrinsic("llvm.aarch64.get.fpcr", (), ir.FunctionType(ir.IntType(64), ()))
            return builder.call(read, ())
        word = builder.alloca(ir.IntType(32))
        pointer = builder.bitcast(word, ir.IntType(8).as_pointer())
        store = ir.FunctionType(ir.VoidType(), (ir.IntType(8).as_pointer(),))
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse.stmxcsr", (), store), (pointer,))
        return builder.zext(builder.load(word), ir.IntType(64))

    return types.int64(), generate


@intrinsic
def _write_control(typingctx: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not _X86:
            kind = ir.FunctionType(ir.VoidType(), (ir.IntType(64),))
            builder.call(builder.module.declare_intrinsic("llvm.aarch64.set.fpcr", (), kind), arguments)
            return context.get_dummy_value()
        word = builder.alloca(ir.IntType(32))
        builder.store(builder.trunc(arguments[0], ir.IntType(32)), word)
        pointer = builder.bitcast(word, ir.IntType(8).as_pointer())
        load = ir.FunctionType(ir.VoidType(), (ir.IntType(8).as_pointer(),))
        builder.call(builder.module.declare_intrinsic("llvm.x86.sse.ldmxcsr", (), load), (pointer,))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@kernel
def enter() -> Any:
    """Install the default environment and return the one that was in force."""
    previous = _read_control()
    _write_control(_DEFAULT)
    return previous


@kernel
def leave(previous: Any) -> None:
    """Restore an environment that `enter` returned."""
    _write_control(previous)


@contextmanager
def default_environment() -> Iterator[None]:
    """Run a block under IEEE 754's default floating-point environment."""
    previous = enter()
    try:
        yield
    finally:
        leave(previous)
