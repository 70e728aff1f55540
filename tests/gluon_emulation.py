"""The Hopper kernels' Python run on NumPy, one thread for each group of warps, to check their arithmetic and protocol.

Asynchronous work is done as late as it may be: products when they are waited for, stores and reductions likewise, and
loads at some later time by a thread of their own, until when garbage is in their place. A buffer that is written too
early, a barrier in the wrong phase or a wait that is missing then shows as a wrong result, an error or a deadlock.
"""

import importlib.util
import inspect
import queue
import random
import re
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch
import triton

from isograd.numerics import reference as ref

BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))
_PATIENCE = 600.0  # seconds until a wait ends that should have ended
_here = threading.local()


class Tensor(np.ndarray):
    """An array with a tensor's methods, whose dtype numbers that go with it take; `x += y` makes a new one."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **rest: Any) -> Any:
        found = getattr(ufunc, method)(*(_plain(x) for x in inputs), **rest)
        if out is None or isinstance(out[0], Tensor):
            return _tensor(found)
        out[0][...] = found
        return out[0]

    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, order: Any) -> "Tensor":
        return self.transpose(order)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=types.SimpleNamespace(parent=None))


def _plain(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.view(np.ndarray)
    return int(x) if isinstance(x, _Index) else x


def _tensor(values: Any) -> Any:
    return np.asarray(values).view(Tensor)


class Pointer:
    """Elements of a flat array."""

    def __init__(self, array: np.ndarray, offset: Any = 0) -> None:
        assert array.flags.c_contiguous
        self.array, self.offset = array.reshape(-1), offset
        self.dtype = types.SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.array, self.offset + offset)

    def __getitem__(self, key: Any) -> "Pointer":
        return Pointer(self.array, self.offset[key])


class Described:
    """A tensor descriptor: memory from its base on, and what lies beyond its ends reads as 0 and is not written."""

    layout = None

    def __init__(self, memory: np.ndarray, block: Any) -> None:
        self.memory, self.dtype, self.block = memory, memory.dtype, block
        self.block_type = types.SimpleNamespace(shape=list(block.tile))

    def parts(self, coordinates: Any, shape: Any) -> tuple[Any, Any]:
        """A view of the memory, and the slices of a block at coordinates, where both are; addresses have 64 bits."""
        coordinates = [int(i) for i in coordinates]
        assert all(0 <= i < 1 << 31 for i in coordinates)
        inside = [max(min(n - i, m), 0) for i, n, m in zip(coordinates, self.block.shape, shape, strict=True)]
        theirs = tuple(slice(0, m) for m in inside)
        if 0 in inside:
            return np.zeros(inside, self.dtype), theirs
        size = self.memory.itemsize
        first = sum(i * s for i, s in zip(coordinates, self.block.strides, strict=True)) * size % (1 << 64) // size
        last = first + sum((m - 1) * s for m, s in zip(inside, self.block.strides, strict=True))
        assert 0 <= first <= last < self.memory.size
        strides = [s * size for s in self.block.strides]
        return np.lib.stride_tricks.as_strided(self.memory[first:], inside, strides), theirs


class Memory:
    """Shared memory, or a view of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def index(self, i: int) -> "Memory":
        assert 0 <= i < len(self.array), i
        return Memory(self.array[i])

    def reshape(self, shape: Any) -> "Memory":
        view = self.array.reshape(shape)
        assert np.shares_memory(view, self.array)
        return Memory(view)

    def permute(self, order: Any) -> "Memory":
        return Memory(self.array.transpose(order))

    def slice(self, start: int, length: int, dim: int = 0) -> "Memory":
        assert 0 <= start <= start + length <= self.array.shape[dim]
        return Memory(np.moveaxis(np.moveaxis(self.array, dim, 0)[start : start + length], 0, dim))

    def load(self, layout: Any) -> Tensor:
        return _tensor(self.array.copy())

    def store(self, value: Any) -> None:
        assert value.dtype == self.array.dtype or value.dtype.kind == self.array.dtype.kind == "i"
        self.array[...] = np.asarray(value).reshape(self.array.shape)


class Barrier:
    """An mbarrier; a phase ends when all have arrived and all bytes have."""

    changed = threading.Condition()

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def change(self, arrivals: int, count: int) -> None:
        """Some arrive, and more bytes are expected, or fewer."""
        with self.changed:
            self.missing -= arrivals
            self.bytes += count
            assert self.missing >= 0
            if self.missing == 0 and self.bytes == 0:
                self.phase ^= 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            _until(lambda: self.phase != phase)


def _until(condition: Any) -> None:
    """Wait for a change of barriers, unless none will come."""
    launch = _here.program.launch
    launch.waiting.append(condition)
    launch.look_for_deadlock()
    if not Barrier.changed.wait_for(lambda: condition() or launch.errors, _PATIENCE):
        raise TimeoutError("a wait without an end")
    launch.waiting.remove(condition)
    if not condition():
        raise RuntimeError("another thread has failed")


class Barriers(list[Barrier]):
    """An array of them."""

    def index(self, i: int) -> Barrier:  # type: ignore[override]
        assert 0 <= i < len(self), i
        return self[i]


class Product:
    """A product that was started; its result is there once it was waited for."""

    def __init__(self, a: Any, b: Memory, acc: Any) -> None:
        self.a, self.b, self.acc, self.value = a, b, acc, None

    def compute(self) -> None:
        a = self.a.array if isinstance(self.a, Memory) else self.a
        # not by BLAS, whose own threads would be in the way of these
        work, result = (np.float64, np.int32) if self.b.dtype == np.int8 else (np.float32, np.float32)
        value = np.einsum("ik,kj->ij", np.asarray(a).astype(work), self.b.array.astype(work)).astype(result)
        if self.acc is not None:
            value = value + np.asarray(self.acc.value if isinstance(self.acc, Product) else self.acc)
        self.value = _tensor(value)


def _arithmetic(text: str, values: list[Any]) -> Any:
    """What an instruction of the kernels does."""
    if text.startswith("mov.u32 $0, 1"):
        return 1
    if text.startswith("cvt.rn."):
        dtype = BFLOAT16 if "bf16x2" in text else FLOAT16
        low, high = (np.asarray(v).astype(dtype).view(np.uint16).astype(np.uint32) for v in values)
        return _tensor((high << 16 | low).view(np.int32))
    if text.startswith("rcp.approx.ftz.f32"):
        return _tensor(1 / np.asarray(values[0]))
    if text.startswith("cvt.rni.s32.f32"):
        x = np.nan_to_num(np.rint(np.asarray(values[0]).astype(np.float64)), nan=0.0)
        return _tensor(np.clip(x, -(2**31), 2**31 - 1).astype(np.int32))
    if "prmt.b32" in text:
        return _byte_permutations(text, values)
    raise NotImplementedError(text)


def _byte_permutations(text: str, values: list[Any]) -> Any:
    """Some `prmt` and `xor` with two results."""
    registers = {f"${n}": np.asarray(x).view(np.uint32) for n, x in enumerate(values, 2)}

    def operand(name: str) -> Any:
        return np.uint32(int(name, 16)) if name.startswith("0x") else registers[name]

    for line in (x.strip() for x in text.replace("{", "").replace("}", "").split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, target, *others = re.split(r",?\s+", line)
        a, b, *rest = (operand(x) for x in others)
        if name == "xor.b32":
            registers[target] = a ^ b
            continue
        assert name == "prmt.b32"
        sources = [x >> np.uint32(8 * i) & np.uint32(255) for x in (a, b) for i in range(4)]
        found = np.zeros_like(a)
        for i in range(4):
            which = int(rest[0]) >> 4 * i & 15
            assert which < 8
            found |= sources[which] << np.uint32(8 * i)
        registers[target] = found
    return tuple(_tensor(registers[name].view(np.int32)) for name in ("$0", "$1"))


class Program:
    """One program: its shared memory, and the named barriers of the processor."""

    def __init__(self, launch: "Launch", index: int) -> None:
        self.launch, self.index = launch, index
        self.named: dict[int, list[int]] = {}

    def named_barrier(self, text: str) -> None:
        """`bar.sync` and `bar.arrive` of two groups of warps."""
        kind, number = text.split(",")[0].split()
        with Barrier.changed:
            state = self.named.setdefault(int(number), [0, 0])
            generation = state[1]
            state[0] += 1
            if state[0] == 2:
                state[:] = [0, generation + 1]
                Barrier.changed.notify_all()
            elif kind == "bar.sync":
                _until(lambda: state[1] != generation)


class Launch:
    """A launch of some programs, which run at the same time, with a thread that brings what they load."""

    def __init__(self, programs: int, seed: int) -> None:
        self.programs, self.random = programs, random.Random(seed)
        self.loads: queue.Queue[Any] = queue.Queue()
        self.errors: list[BaseException] = []
        # Threads of programs that are at work or wait, what they wait for, and loads on their way.
        self.running, self.waiting, self.coming = 0, [], 0

    def change(self, running: int = 0, coming: int = 0) -> None:
        with Barrier.changed:
            self.running += running
            self.coming += coming
            self.look_for_deadlock()

    def look_for_deadlock(self) -> None:
        """Every thread may wait for what nothing will bring about."""
        if self.coming == 0 and not self.errors and self.stuck():
            self.failed(TimeoutError("deadlock"))

    def stuck(self) -> bool:
        """Whether every thread waits, and has to."""
        return self.running == len(self.waiting) > 0 and not any(condition() for condition in self.waiting)

    def failed(self, error: BaseException) -> None:
        with Barrier.changed:
            self.errors.append(error)
            Barrier.changed.notify_all()

    def bring(self) -> None:
        """Serve loads in an order of chance, half of them no sooner than all threads wait."""
        try:
            self._serve()
        except BaseException as error:
            self.failed(error)

    def _serve(self) -> None:
        waiting: list[Any] = []
        while True:
            try:
                while True:
                    item = self.loads.get(timeout=0.0005 if waiting else None)
                    if item is None:
                        return
                    waiting.append((*item, self.random.random() < 0.5))
                    if self.random.random() < 0.5:
                        break
            except queue.Empty:
                pass
            with Barrier.changed:
                stuck = self.stuck()
            ready = [n for n, (*_, late) in enumerate(waiting) if stuck or not late]
            if ready:
                descriptor, coordinates, barrier, memory, _ = waiting.pop(self.random.choice(ready))
                ours, theirs = descriptor.parts(coordinates, memory.shape)
                memory.array[...] = 0
                memory.array[theirs] = ours
                barrier.change(0, -memory.array.nbytes)
                self.change(coming=-1)

    def thread(self, program: Program, function: Any, arguments: Any) -> threading.Thread:
        """A thread of a program."""

        def body() -> None:
            _here.program, _here.products, _here.stores = program, [], []
            try:
                with np.errstate(all="ignore"):
                    function(*arguments)
                assert not _here.stores
            except BaseException as error:
                self.failed(error)
            self.change(running=-1)

        self.change(running=1)
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    def run(self, kernel: Any, arguments: Any) -> None:
        """Run a kernel's programs; raises what went wrong in any thread."""
        server = threading.Thread(target=self.bring, daemon=True)
        server.start()
        threads = [self.thread(Program(self, i), kernel, arguments) for i in range(self.programs)]
        for thread in threads:
            thread.join()
        self.loads.put(None)
        server.join()
        if self.errors:
            raise self.errors[0]


def _jitter() -> None:
    if random.random() < 0.02:
        time.sleep(0.0005)


# --- what kernels call -----------------------------------------------------------------------------------------------
def _number(function: Any, whole: Any) -> Any:
    def either(*values: Any) -> Any:
        if all(isinstance(v, (int, bool)) for v in values):
            return _Index(whole(*values))
        with np.errstate(all="ignore"):
            return _tensor(function(*values))

    return either


def _fma(a: Any, b: Any, c: Any) -> Any:
    return _tensor(ref.fma(*(np.asarray(x, np.float32) for x in (a, b, c))))


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    offsets, inside = np.broadcast_arrays(np.asarray(pointer.offset), np.asarray(mask, bool))
    assert np.all((offsets[inside] >= 0) & (offsets[inside] < pointer.array.size))
    result = np.full(offsets.shape, other, pointer.array.dtype)
    result[inside] = pointer.array[offsets[inside]]
    return _Index(result) if result.ndim == 0 and result.dtype.kind == "i" else _tensor(result)


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    offsets, inside, values = (np.asarray(pointer.offset), np.asarray(mask, bool), np.asarray(value))
    offsets, inside, values = np.broadcast_arrays(offsets, inside, values)
    assert np.all((offsets[inside] >= 0) & (offsets[inside] < pointer.array.size))
    pointer.array[offsets[inside]] = values[inside]


def _allocate(dtype: Any, shape: Any, layout: Any) -> Any:
    if layout == "mbarrier":
        return Barriers(Barrier() for _ in range(shape[0])) if len(shape) == 2 else Barrier()
    memory = np.empty(shape, dtype)
    _fill_with_garbage(memory)
    return Memory(memory)


def _fill_with_garbage(array: np.ndarray) -> None:
    """What is a large number or no number in every dtype."""
    array.view(np.uint8 if array.itemsize == 1 else f"u{array.itemsize}")[...] = int.from_bytes(
        b"\x7f" * array.itemsize
    )


def _assembly(text: str, constraints: str, values: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    if text.startswith("bar."):
        return _here.program.named_barrier(text)
    return _arithmetic(text, values)


def _specialize(partitions: Any, warps: Any, registers: Any) -> None:
    program = _here.program
    threads = [program.launch.thread(program, function, arguments) for function, arguments in partitions]
    program.launch.change(running=-1)
    for thread in threads:
        thread.join()
    program.launch.change(running=1)


def _where(condition: Any, a: Any, b: Any) -> Any:
    if all(isinstance(x, (int, bool, np.bool_)) for x in (condition, a, b)):
        return _Index(a if condition else b)
    dtypes = [x.dtype for x in (a, b) if hasattr(x, "dtype")] or [np.dtype(np.int32)]
    return _tensor(np.where(_plain(condition), _plain(a), _plain(b)).astype(np.result_type(*dtypes)))


def _sum(x: Any, axis: int) -> Any:
    return _tensor(np.sum(np.asarray(x), axis, dtype=x.dtype if x.dtype == np.int32 else np.float32))


def _layout(*arguments: Any) -> Any:
    return types.SimpleNamespace(parent=None)


def _split(x: Any) -> Any:
    return _tensor(x[..., 0]), _tensor(x[..., 1])


def _dot_layout(index: int, parent: Any, width: int) -> Any:
    return types.SimpleNamespace(parent=parent)


gl = types.SimpleNamespace(
    constexpr=None,
    bfloat16=BFLOAT16,
    float16=FLOAT16,
    float32=FLOAT32,
    float64=np.dtype(np.float64),
    int8=np.dtype(np.int8),
    int16=np.dtype(np.int16),
    int32=np.dtype(np.int32),
    int64=np.dtype(np.int64),
    program_id=lambda axis: _Index(_here.program.index),
    num_programs=lambda axis: _here.program.launch.programs,
    static_range=range,
    cdiv=lambda a, b: -(-a // b),
    minimum=_number(np.fmin, min),
    maximum=_number(np.fmax, max),
    where=_where,
    zeros=lambda shape, dtype, layout=None: _tensor(np.zeros(shape, dtype)),
    full=lambda shape, value, dtype, layout=None: _tensor(np.full(shape, value, dtype)),
    zeros_like=lambda x: _tensor(np.zeros_like(x)),
    arange=lambda begin, end, layout=None: _tensor(np.arange(begin, end, dtype=np.int32)),
    abs=_number(np.abs, abs),
    exp2=_number(np.exp2, None),
    log2=_number(np.log2, None),
    floor=_number(np.floor, None),
    math=types.SimpleNamespace(div_rn=_number(np.divide, None)),
    fma=_fma,
    max=lambda x, axis: _tensor(np.fmax.reduce(np.asarray(x), axis)),
    sum=_sum,
    split=_split,
    join=lambda a, b: _tensor(np.stack([a, b], -1)),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    load=_load,
    store=_store,
    allocate_shared_memory=_allocate,
    inline_asm_elementwise=_assembly,
    warp_specialize=_specialize,
    BlockedLayout=_layout,
    SliceLayout=_layout,
    NVMMADistributedLayout=_layout,
    NVMMASharedLayout=_layout,
    SwizzledSharedLayout=_layout,
    DotOperandLayout=_dot_layout,
)


class _Index(int):
    """A number that the kernels widen; it has no dtype of its own, as Python's have none."""

    def to(self, dtype: Any) -> "_Index":
        assert -(1 << 8 * dtype.itemsize - 1) <= self < 1 << 8 * dtype.itemsize - 1
        return self


def _kept(operation: str) -> Any:
    def method(self: int, other: Any) -> Any:
        result = getattr(int(self), operation)(other) if isinstance(other, int) else NotImplemented
        return _Index(result) if isinstance(result, int) else result

    return method


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "lt", "le", "gt", "ge"
):  # fmt: skip
    setattr(_Index, f"__{_name}__", _kept(f"__{_name}__"))


mbarrier = types.SimpleNamespace(
    MBarrierLayout=lambda: "mbarrier",
    init=lambda b, count: b.init(count),
    expect=lambda b, n: b.change(1, n),
    arrive=lambda b, pred=True: b.change(1, 0) if pred else None,
)


def _wait(barrier: Barrier, phase: int, pred: bool = True) -> None:
    _jitter()
    if pred:
        barrier.wait(phase)


mbarrier.wait = _wait


def _bring(descriptor: Described, coordinates: Any, barrier: Barrier, memory: Memory) -> None:
    _fill_with_garbage(memory.array)  # from now on nobody may read there
    _here.program.launch.change(coming=1)
    _here.program.launch.loads.put((descriptor, list(coordinates), barrier, memory))


def _later(write: Any) -> Any:
    def start(descriptor: Described, coordinates: Any, memory: Memory) -> None:
        ours, theirs = descriptor.parts(list(coordinates), memory.shape)
        _here.stores.append(lambda: write(ours, memory.array[theirs]))

    return start


def _put(array: np.ndarray, values: np.ndarray) -> None:
    array[...] = values


def _accumulate(array: np.ndarray, values: np.ndarray) -> None:
    with Barrier.changed:
        array += values


def _store_wait(pendings: int) -> None:
    assert pendings == 0
    for write in _here.stores:
        write()
    _here.stores.clear()


def _product(a: Any, b: Memory, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    product = Product(a, b, acc if use_acc else None)
    _here.products.append(product)
    return product


def _product_wait(outstanding: int, deps: Any) -> Any:
    while len(_here.products) > outstanding:
        _here.products.pop(0).compute()
    found = []
    for x in deps:
        if isinstance(x, Product):
            assert outstanding or x.value is not None, "a product that was not waited for"
            x = x if x.value is None else x.value
        found.append(x)
    return found[0] if len(found) == 1 else tuple(found)


# What stands for the names of Triton, and for some functions of modules, wherever kernels call them.
_NAMES: dict[str, Any] = {
    "gl": gl,
    "tl": gl,
    "mbarrier": mbarrier,
    "tma": types.SimpleNamespace(store_wait=_store_wait),
    "fence_async_shared": lambda: None,
    "warpgroup_mma": _product,
    "warpgroup_mma_wait": _product_wait,
}
_FUNCTIONS: dict[str, dict[str, Any]] = {
    "isograd.flash_attention.gluon_steps": {"load": _bring, "store": _later(_put), "add": _later(_accumulate)},
    "isograd.products.gluon_gemm": {"load": _bring},
    "isograd.numerics.triton_ops": {"narrow": lambda x, dtype, native: _tensor(ref.narrow(np.asarray(x), dtype))},
}


def _rebuilt(module: Any, known: dict[str, Any]) -> types.SimpleNamespace:
    """The functions of a module of kernels, and of those that it calls, as plain functions over `_NAMES`."""
    name_of = module.__name__
    if name_of in known:
        return types.SimpleNamespace(**known[name_of])
    space = known[name_of] = dict(vars(module))
    for name, value in vars(module).items():
        function = getattr(value, "fn", None)
        if name in _NAMES:
            space[name] = _NAMES[name]
        elif isinstance(value, triton.language.constexpr):
            space[name] = value.value
        elif isinstance(value, types.ModuleType) and value.__name__.startswith("isograd."):
            space[name] = _rebuilt(sys.modules[value.__name__], known)
        elif isinstance(function, types.FunctionType):
            home = sys.modules[function.__module__]
            if home is not module:
                space[name] = getattr(_rebuilt(home, known), function.__name__)
                continue
            space[name] = types.FunctionType(
                function.__code__, space, name, function.__defaults__, function.__closure__
            )
    space |= _FUNCTIONS.get(name_of, {})
    return types.SimpleNamespace(**space)


def emulated(module: Any) -> types.SimpleNamespace:
    """The functions of a module of Hopper kernels, to be run by `Launch`."""
    return _rebuilt(module, {})


@contextmanager
def planted(module: Any, line: str, place: int, text: str) -> Iterator[None]:
    """Emulate a module with a fault: one of the places of a line, counted from 0, has another text."""
    parts = inspect.getsource(module).split(line)
    assert len(parts) > place + 1, line
    source = line.join(parts[: place + 1]) + text + line.join(parts[place + 1 :])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(module.__file__).name)
        file.write_text(source)
        found = importlib.util.spec_from_file_location(module.__name__, file)
        assert found is not None
        assert found.loader is not None
        changed = importlib.util.module_from_spec(found)
        found.loader.exec_module(changed)
        with mock.patch.dict(sys.modules, {module.__name__: changed}):
            yield


def array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """All that lies behind a tensor's base."""
    if not tensor.numel():
        return array(tensor.reshape(-1))
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return array(tensor.as_strided((extent,), (1,)))


def call(launcher: Any, *tensors: torch.Tensor, seed: int = 0) -> None:
    """What a launcher does, in place of its `__call__`."""
    tail, programs = launcher._specification[:2]
    kernels = vars(emulated(sys.modules[launcher._kernel.fn.__module__]))
    blocks = len(launcher._blocks)
    described = [Described(_memory(t), b) for t, b in zip(tensors[:blocks], launcher._blocks, strict=True)]
    pointers = [Pointer(_memory(t)) for t in tensors[blocks:]]
    numbers = [_Index(x) if isinstance(x, int) else np.float32(x) if isinstance(x, float) else x for x in tail]
    Launch(programs, seed).run(kernels[launcher._kernel.__name__], [*described, *pointers, *numbers])
