# mypy: ignore-errors
"""The floating-point environment of a call.

Flush-to-zero and the rounding mode live in a register that a thread inherits from whoever started it;
`torch.set_flush_denormal(True)` sets it for good. Every entry point saves the register, installs IEEE 754's default
(round to nearest, subnormals kept, nothing trapped), and restores it.
"""

import ctypes
import platform
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from isograd.runtime.numba_compile import c_function

_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
# x86: MXCSR with every exception masked. 64-bit Arm: FPCR all zero.
DEFAULT = 0x1F80 if _X86 else 0
# The bits of a mode that say how to compute; MXCSR's lowest six note what has happened.
SETTINGS = ~0x3F if _X86 else ~0


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


@c_function(types.int64())
def _current():
    return _read_control()


@c_function(types.int64())
def _enter():
    previous = _read_control()
    _write_control(DEFAULT)
    return previous


@c_function(types.void(types.int64))
def _leave(mode):
    _write_control(mode)


# Each is one call into C, which no interrupt divides.
_control = ctypes.c_int64
# The environment that is in force.
current = ctypes.PYFUNCTYPE(_control)(_current)
# Install the default environment; returns the one that was in force.
enter = ctypes.PYFUNCTYPE(_control)(_enter)
# Restore an environment.
leave = ctypes.PYFUNCTYPE(None, _control)(_leave)
# The same as the end of a `with` block, which is handed three arguments; a C function leaves them alone.
_exit = ctypes.PYFUNCTYPE(None, _control, *[ctypes.py_object] * 3)(_leave)


class _DefaultEnvironment:
    """Entering and leaving are calls into C.

    A method in Python may be interrupted before its first line has run, and the environment would stay.
    """

    __slots__ = ("_leave",)

    def __init__(self) -> None:
        self._leave = partial(_exit, current())

    __enter__ = staticmethod(enter)
    __exit__ = property(attrgetter("_leave"))


_IN_FORCE = nullcontext()


def default_environment() -> Any:
    """A block under IEEE 754's default floating-point environment, which costs nothing where it is in force already."""
    return _IN_FORCE if current() & SETTINGS == DEFAULT else _DefaultEnvironment()
