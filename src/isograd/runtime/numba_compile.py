# mypy: ignore-errors
"""How kernels and device functions are compiled: options, the cache on disk, and what has to be compiled yet."""

import contextlib
import fcntl
import functools
import hashlib
import os
import pickle
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from itertools import compress
from operator import call
from pathlib import Path
from typing import Any, BinaryIO

import llvmlite.binding
import llvmlite.ir
import numba
from llvmlite.binding import Linkage, ffi
from llvmlite.ir.values import FunctionAttributes
from numba import _dynfunc
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.typed_passes import NativeLowering

from isograd.runtime import compilation, stacks


# --- lowering --------------------------------------------------------------------------------------------------------
class _Attributes(FunctionAttributes):
    """Attributes of functions for which LLVM uses the widest vectors: on many processors it would take half of them."""

    _known = FunctionAttributes._known | {'"prefer-vector-width"="512"'}

    def __init__(self, given: FunctionAttributes) -> None:
        super().__init__(given | self._known.difference(FunctionAttributes._known))
        self.alignstack, self.personality = given.alignstack, given.personality


class _Lower(Lower):
    """Lowering for the widest vectors, under which an array whose address is taken (`.ctypes`) lives on.

    Numba frees an array after its last use, and knows nothing of pointers into it. Here it lives until its function
    returns, or its variable gets another value.
    """

    def pre_lower(self) -> None:
        super().pre_lower()
        self.function.attributes = _Attributes(self.function.attributes)
        expressions = [e for block in self.blocks.values() for e in block.find_exprs("getattr")]
        self._held = {e.value.name for e in expressions if e.attr == "ctypes"}
        self._singly_assigned_vars -= self._held  # each has a slot in memory, where the next value replaces the last

    def delvar(self, name: str) -> None:
        if name not in self._held:
            super().delvar(name)

    def post_lower(self) -> None:
        for block in self.function.blocks:
            if isinstance(block.terminator, llvmlite.ir.Ret):
                self.builder.position_before(block.terminator)
                for name in sorted(self._held):
                    super().delvar(name)
        super().post_lower()


class _Lowering(NativeLowering):
    lowering_class = _Lower


# --- functions that only kernels call --------------------------------------------------------------------------------
class _LinkedLibrary(JITCodeLibrary):
    """Optimized code that is linked into kernels: machine code is made of the whole kernel, not of its parts."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(_Lowering):
    """Lowering to a linked library, with an entry point that stands for the function and is never called."""

    _name = "isograd_linked_lowering"

    def run_pass(self, state: Any) -> bool:
        state.flags.no_compile = True
        state.library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        super().run_pass(state)
        lowered = state.cr
        name, module = lowered.fndesc.qualname, lowered.fndesc.lookup_module()
        entry = _dynfunc.make_function(module, name, name, 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(entry, lowered.fndesc, [state.library])
        state.reload_init.extend(state.library._reload_init)
        state.cr = lowered._replace(cfunc=entry)
        return True


def _compiler(lowering: Any) -> Any:
    """Numba's passes, the lowering replaced."""

    class Compiler(CompilerBase):
        def define_pipelines(self) -> list[Any]:
            manager = DefaultPassBuilder.define_nopython_pipeline(self.state, lowering._name)
            manager.passes = [(lowering if step is NativeLowering else step, why) for step, why in manager.passes]
            manager._finalized = False
            manager.finalize()
            return [manager]

    return Compiler


# --- kernels ---------------------------------------------------------------------------------------------------------
class _KernelLibrary(JITCodeLibrary):
    """The machine code of a kernel, whose functions nobody else calls.

    Numba tells functions of one name and one signature apart by a number that it counts up in a process. In files that
    several processes wrote, two that differ may have the same name, and where both kernels are loaded the functions of
    the first would serve the second.
    """

    def _finalize_final_module(self) -> None:
        for function in self._final_module.functions:
            if function.linkage in (Linkage.linkonce_odr, Linkage.weak_odr):
                function.linkage = Linkage.internal
        super()._finalize_final_module()


@register_pass(mutates_CFG=True, analysis_only=False)
class _KernelLowering(_Lowering):
    """Lowering to a library of a kernel."""

    _name = "isograd_kernel_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _KernelLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        done: bool = super().run_pass(state)
        return done


_KERNEL_COMPILER = _compiler(_KernelLowering)


# --- options ---------------------------------------------------------------------------------------------------------
# What only compiled code calls needs no way in from Python or C, and no machine code of its own: together a third of
# the time of compiling.
_INTERNAL: dict[str, Any] = {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _compiler(_LinkedLowering),
}
# Of overloads: always inlined, as device functions are.
INLINED: dict[str, Any] = {"forceinline": True} | _INTERNAL
# Neither fast-math nor an implicit fma: every rounding is the one the contract writes down.
_OPTIONS: dict[str, Any] = {"fastmath": False, "error_model": "numpy", "boundscheck": False, "nogil": True}


_DOT = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @dot(<16 x i8> %a, <16 x i8> %b) {
  %x = sext <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %p = mul <16 x i32> %x, %y
  %s = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %p)
  ret i32 %s
}
"""


@functools.cache
def has_dotprod(triple: str, name: str, features: str) -> bool:
    """Whether LLVM's code for a processor has Arm's dot products.

    On Linux LLVM does not list them among the features of the host: they follow from its name.
    """
    binding = llvmlite.binding
    if not triple.startswith(("aarch64", "arm64")):
        return False
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=name, features=features, opt=2)
    return "sdot" in machine.emit_assembly(binding.parse_assembly(f'target triple = "{triple}"\n{_DOT}'))


def processor_features() -> set[str]:
    """What the processor that Numba compiles for can do, as its settings, the host and LLVM tell."""
    config = numba.config
    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    dotprod = {"dotprod"} if has_dotprod(triple, name, features) else set()
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return dotprod | {f[1:] for f in (config.CPU_FEATURES or "").split(",") if f.startswith("+")}
    try:
        host = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:  # LLVM cannot tell on every system
        return dotprod
    return dotprod | {
        name for name, there in host.items() if there and (config.ENABLE_AVX or not name.startswith("avx"))
    }


# --- the cache on disk -----------------------------------------------------------------------------------------------
@functools.cache
def _source_digest() -> str:
    """Identify the sources that kernels are made of.

    Numba notices a change of the file a function stands in, but not of the files it calls into. With this digest in
    the key a changed device function never meets a stale kernel.
    """
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted([*package.glob("**/numba*.py"), *package.glob("numerics/*.py")]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


_warned = False


def _warn(problem: str, folder: str) -> None:
    """Warn, once in a process, that the cache does not serve; kernels are compiled instead."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"isograd's kernel cache in {folder}: {problem}; compiling instead. Results are not concerned",
            RuntimeWarning,
            stacklevel=2,
        )


_DIGEST = hashlib.sha256().digest_size
_PATIENCE = 120.0  # seconds that another process may take to compile a kernel before it is compiled here as well


class _KernelCache(FunctionCache):
    """One file for each signature and processor: a checksum, the digest of what was compiled, and the machine code.

    Numba's own cache unpickles whatever its files hold, and two processes that save at once may leave an index that
    leads to the code of another signature. Here nothing is unpickled before its checksum was found right. Processes
    that need a kernel at the same time, the ranks of a job say, wait for the first one, which compiles it for all.
    """

    _turn: BinaryIO | None = None

    def _entry(self, sig: Any, codegen: Any) -> tuple[str, bytes]:
        """The path of a signature's file, and the digest of what its code is made from."""
        signature, processor, _ = key = self._index_key(sig, codegen)
        name = hashlib.sha256(repr((signature, processor)).encode()).hexdigest()[:16]
        made_from = (
            key,
            self._impl.locator.get_source_stamp(),
            _source_digest(),
            numba.__version__,
            llvmlite.__version__,
        )
        path = os.path.join(self._cache_path, f"{self._impl.filename_base}.{name}.nbc")
        return path, hashlib.sha256(repr(made_from).encode()).digest()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        entry = self._entry(sig, target_context.codegen())
        found = self._load(*entry)
        if found is None:
            compilation.begin("CPU", self._cache_path)
            self._take_turn(entry[0])
            found = self._load(*entry)
            if found is None:
                return None
            self._end_turn()
            compilation.end("CPU", self._cache_path)
        return self._impl.rebuild(target_context, found)

    def _take_turn(self, path: str) -> None:
        """Wait while another process compiles the same. Where files cannot be locked nobody waits."""
        self._end_turn()
        try:
            self._impl.locator.ensure_cache_path()
            self._turn = open(f"{path}.lock", "ab")  # noqa: SIM115  # closed when the kernel is compiled
            last = time.monotonic() + _PATIENCE
            while True:
                try:
                    fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > last:
                        return
                    time.sleep(0.02)
        except OSError:
            return

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            with contextlib.suppress(OSError):
                os.unlink(turn.name)
            turn.close()

    def _load(self, path: str, made_from: bytes) -> Any:
        try:
            content = Path(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(f"{os.path.basename(path)} cannot be read ({error.strerror})", self._cache_path)
            return None
        if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
            _warn(f"{os.path.basename(path)} is damaged", self._cache_path)
            return None
        if content[_DIGEST : 2 * _DIGEST] != made_from:
            return None
        return pickle.loads(content[2 * _DIGEST :])

    def save_overload(self, sig: Any, data: Any) -> None:
        compilation.end("CPU", self._cache_path)
        try:
            self._save(sig, data)
        finally:
            self._end_turn()

    def _save(self, sig: Any, data: Any) -> None:
        if not self._impl.check_cachable(data):
            return
        path, made_from = self._entry(sig, data.codegen)
        body = made_from + dumps(self._impl.reduce(data))
        # Under a name of its own first: readers and other writers see a whole file or none.
        unfinished = f"{path}.{uuid.uuid4().hex[:16]}.tmp"
        try:
            self._impl.locator.ensure_cache_path()
            Path(unfinished).write_bytes(hashlib.sha256(body).digest() + body)
            os.replace(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            _warn(f"{os.path.basename(path)} cannot be written ({error.strerror})", self._cache_path)


class _NoCache(numba.core.caching.NullCache):
    """What stands for the cache where no folder can be written."""

    def load_overload(self, sig: Any, target_context: Any) -> None:
        compilation.begin("CPU", None)

    def save_overload(self, sig: Any, cres: Any) -> None:
        compilation.end("CPU", None)


def _cache_for(function: Callable[..., Any]) -> Any:
    try:
        return _KernelCache(function)
    except RuntimeError:  # Numba found no folder to write to
        return _NoCache()


# --- compiling -------------------------------------------------------------------------------------------------------
def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that kernels call; it is always inlined."""
    return numba.njit(**_OPTIONS, **INLINED)(function)


def subroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that kernels call and that is too large to stand in them several times."""
    return numba.njit(**_OPTIONS, **_INTERNAL)(function)


def owns_compiler() -> bool:
    """Whether this thread is compiling, so that another one could not: in a signal handler, say."""
    owned: bool = global_compiler_lock.is_locked()
    return owned


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel and keep the machine code on disk.

    The cache stands beside the source or, where that folder cannot be written, in the user's cache folder
    (`NUMBA_CACHE_DIR` overrides both). Without any writable folder the kernel is compiled in every process.
    """
    dispatcher = numba.njit(no_cfunc_wrapper=True, pipeline_class=_KERNEL_COMPILER, **_OPTIONS)(function)
    dispatcher._cache = _cache_for(function)
    compile_for = dispatcher._compile_for_args

    def compile_elsewhere(*arguments: Any) -> Any:
        # Numba and llvmlite take their locks in Python code, where an interrupt leaves them locked, and compile deep
        # in the stack. No interrupt reaches another thread than the main one.
        here = stacks.roomy() and threading.current_thread() is not threading.main_thread()
        if here or owns_compiler():
            return compile_for(*arguments)
        folder = dispatcher._cache.cache_path
        return stacks.call(compile_for, *arguments, meanwhile=lambda: compilation.tell("CPU", folder))

    dispatcher._compile_for_args = compile_elsewhere  # what the dispatcher calls for a signature that it lacks
    return dispatcher


def c_function(signature: Any) -> Callable[[Callable[..., Any]], int]:
    """Compile a C function at once, keep it on disk as kernels are, and return its address."""

    def compile_now(function: Callable[..., Any]) -> int:
        made = CFunc(function, sigutils.normalize_signature(signature), {}, dict(_OPTIONS), _KERNEL_COMPILER)
        made._cache = _cache_for(function)
        made.compile()
        address: int = made.address
        _made.append(made)  # the memory that the address leads to
        return address

    return compile_now


_made: list[CFunc] = []

# --- forks -----------------------------------------------------------------------------------------------------------
# A child has only the thread that forked: a lock that another one held would stay locked, and what it was changing
# half changed. So a fork waits until nobody compiles.
_locks = global_compiler_lock, ffi.lib._lock
_held: list[Any] = []


def _hold() -> None:
    for owner in _locks:
        _held.extend(compress((owner,), map(call, (owner._lock.acquire,))))  # taken and noted in one call into C


def _release() -> None:
    list(map(call, [*[owner._lock.release for owner in _held], _held.clear]))


def _release_in_child() -> None:
    for owner in _locks:
        if owner not in _held:  # the wait was interrupted
            owner._lock = threading.RLock()
    _release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release_in_child)
    # An interrupt that came during the fork is raised as the first of the functions behind it begins.
    os.register_at_fork(after_in_parent=_release, after_in_child=_release)
