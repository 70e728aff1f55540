"""How kernels and device functions are compiled: options, the cache on disk, and what has to be compiled yet."""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

# What only compiled code calls needs no way in from Python or C, which take a tenth of the time of compiling.
_INTERNAL: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
# Of overloads: always inlined, as device functions are.
INLINED: dict[str, Any] = {"forceinline": True} | _INTERNAL
# Neither fast-math nor an implicit fma: every rounding is the one the contract writes down.
_OPTIONS: dict[str, Any] = {"fastmath": False, "error_model": "numpy", "boundscheck": False, "nogil": True}


@functools.cache
def _source_digest() -> str:
    """Identify the sources that kernels are made of.

    Numba notices a change of the file a function stands in, but not of the files it calls into. With this digest in
    the key a changed device function never meets a stale kernel.
    """
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*package.glob("*/numba_*.py"), *package.glob("numerics/*.py")]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _KernelCache(FunctionCache):
    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _source_digest())


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that kernels call; it is always inlined."""
    return numba.njit(**_OPTIONS, **INLINED)(function)


def subroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that kernels call and that is too large to stand in them several times."""
    return numba.njit(**_OPTIONS, **_INTERNAL)(function)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel and keep the machine code on disk.

    The cache stands beside the source or, where that folder cannot be written, in the user's cache folder
    (`NUMBA_CACHE_DIR` overrides both). Without any writable folder the kernel is compiled in every process.
    """
    dispatcher = numba.njit(no_cfunc_wrapper=True, **_OPTIONS)(function)
    with contextlib.suppress(RuntimeError):  # Numba found no folder to write to
        dispatcher._cache = _KernelCache(function)
    return dispatcher
