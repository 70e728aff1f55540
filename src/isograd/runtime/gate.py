# mypy: ignore-errors
"""A count of the threads that work for a call, which the call closes and waits for in one step.

The count is a word of memory that compiled functions change. Each of them is one call into C: a thread that is inside
is counted, whatever interrupts the caller, and no interrupt ends the wait early.
"""

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from isograd.runtime.numba_compile import c_function

CLOSED = 1 << 40  # added to the count: nobody enters any more

_pause = types.ExternalFunction("usleep", types.int32(types.uint32))
_release_gil = types.ExternalFunction("PyEval_SaveThread", types.voidptr())
_take_gil = types.ExternalFunction("PyEval_RestoreThread", types.void(types.voidptr))


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def _read(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _replace(typingctx: Any, address: Any, old: Any, new: Any) -> Any:
    """Write `new` where `old` stands; whether it stood there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = _word(builder, arguments[0])
        pair = builder.cmpxchg(word, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@c_function(types.int64(types.int64, types.int64))
def _change(address, amount):
    while True:
        old = _read(address)
        if old >= CLOSED and amount > 0:
            return old
        if _replace(address, old, old + amount):
            return old


@c_function(types.void(types.int64))
def _drain(address):
    while True:
        old = _read(address)
        if old >= CLOSED or _replace(address, old, old + CLOSED):
            break
    if _read(address) > CLOSED:
        state = _release_gil()
        while _read(address) > CLOSED:
            _pause(np.uint32(50))
        _take_gil(state)


# change(address, amount) adds 1, -1 or CLOSED to the count and returns what it was; a count that is closed stays as it
# is unless it falls.
change = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(_change)
# drain(address) closes the count and waits until nobody is inside, without the GIL.
drain = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_drain)
