"""The Hopper kernels' Python run on NumPy, one thread for each group of warps, to check their arithmetic and protocol.

Asynchronous work is done as late as it may be: products when they are waited for, stores and reductions likewise, and
loads at some later time by a thread of their own. A buffer that is written too early, a barrier in the wrong phase or a
wait that is missing then shows as a wrong result, an error or a deadlock.
"""

import queue
import random
import sys
import threading
import time
import types
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton

from isograd.flash_attention import gluon_steps
from isograd.numerics.reference import narrow

BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))
_PATIENCE = 20.0  # seconds until a wait counts as a deadlock
_here = threading.local()


class Tensor(np.ndarray):
    """An array with a tensor's methods."""

    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, order: Any) -> "Tensor":
        return self.transpose(order)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


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
            if not self.changed.wait_for(lambda: self.phase != phase, _PATIENCE):
                raise TimeoutError("deadlock")


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
    raise NotImplementedError(text)


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
            elif kind == "bar.sync" and not Barrier.changed.wait_for(lambda: state[1] != generation, _PATIENCE):
                raise TimeoutError("deadlock")


class Launch:
    """A launch of some programs, which run at the same time, with a thread that brings what they load."""

    def __init__(self, programs: int, seed: int) -> None:
        self.programs, self.random = programs, random.Random(seed)
        self.loads: queue.Queue[Any] = queue.Queue()
        self.errors: list[BaseException] = []

    def bring(self) -> None:
        """Serve loads, in an order of chance."""
        try:
            self._serve()
        except BaseException as error:
            self.errors.append(error)

    def _serve(self) -> None:
        waiting: list[Any] = []
        while True:
            try:
                while True:
                    item = self.loads.get(timeout=0.0005 if waiting else None)
                    if item is None:
                        return
                    waiting.append(item)
                    if self.random.random() < 0.5:
                        break
            except queue.Empty:
                pass
            if waiting:
                descriptor, coordinates, barrier, memory = waiting.pop(self.random.randrange(len(waiting)))
                ours, theirs = descriptor.parts(coordinates, memory.shape)
                memory.array[...] = 0
                memory.array[theirs] = ours
                barrier.change(0, -memory.array.nbytes)

    def thread(self, program: Program, function: Any, arguments: Any) -> threading.Thread:
        """A thread of a program."""

        def body() -> None:
            _here.program, _here.products, _here.stores = program, [], []
            try:
                function(*arguments)
                assert not _here.stores
            except BaseException as error:
                self.errors.append(error)

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
    wide = [np.asarray(x).astype(np.float64) for x in (a, b, c)]
    with np.errstate(all="ignore"):
        return _tensor((wide[0] * wide[1] + wide[2]).astype(np.float32))


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
    offsets, inside = np.broadcast_arrays(np.asarray(pointer.offset), np.asarray(mask))
    assert np.all((offsets[inside] >= 0) & (offsets[inside] < pointer.array.size))
    result = np.full(offsets.shape, other, pointer.array.dtype)
    result[inside] = pointer.array[offsets[inside]]
    return _Index(result) if result.ndim == 0 and result.dtype.kind == "i" else _tensor(result)


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    offsets, inside, values = np.broadcast_arrays(np.asarray(pointer.offset), np.asarray(mask), np.asarray(value))
    assert np.all((offsets[inside] >= 0) & (offsets[inside] < pointer.array.size))
    pointer.array[offsets[inside]] = values[inside]


def _allocate(dtype: Any, shape: Any, layout: Any) -> Any:
    if layout == "mbarrier":
        return Barriers(Barrier() for _ in range(shape[0])) if len(shape) == 2 else Barrier()
    garbage = np.full(shape, 0x7F, np.uint8 if dtype.itemsize == 1 else f"u{dtype.itemsize}")
    return Memory(garbage.view(dtype).reshape(shape))


def _assembly(text: str, constraints: str, values: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    if text.startswith("bar."):
        return _here.program.named_barrier(text)
    return _arithmetic(text, values)


def _specialize(partitions: Any, warps: Any, registers: Any) -> None:
    program = _here.program
    threads = [program.launch.thread(program, function, arguments) for function, arguments in partitions]
    for thread in threads:
        thread.join()


def _where(condition: Any, a: Any, b: Any) -> Any:
    dtypes = [x.dtype for x in (a, b) if hasattr(x, "dtype")] or [np.dtype(np.int32)]
    return _tensor(np.where(condition, a, b).astype(np.result_type(*dtypes)))


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
    int8=np.dtype(np.int8),
    int16=np.dtype(np.int16),
    int32=np.dtype(np.int32),
    int64=np.dtype(np.int64),
    program_id=lambda axis: _Index(_here.program.index),
    num_programs=lambda axis: _here.program.launch.programs,
    static_range=range,
    cdiv=lambda a, b: -(-a // b),
    minimum=_number(np.minimum, min),
    maximum=_number(np.maximum, max),
    where=_where,
    zeros=lambda shape, dtype, layout=None: _tensor(np.zeros(shape, dtype)),
    full=lambda shape, value, dtype, layout=None: _tensor(np.full(shape, value, dtype)),
    zeros_like=lambda x: _tensor(np.zeros_like(x)),
    arange=lambda begin, end, layout: _tensor(np.arange(begin, end, dtype=np.int32)),
    abs=_number(np.abs, abs),
    exp2=_number(np.exp2, None),
    log2=_number(np.log2, None),
    fma=_fma,
    max=lambda x, axis: _tensor(np.max(np.asarray(x), axis)),
    sum=lambda x, axis: _tensor(np.sum(np.asarray(x), axis, dtype=np.float32)),
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
    """A number that the kernels widen."""

    def to(self, dtype: Any) -> int:
        return int(self)


def _kept(operation: str) -> Any:
    def method(self: int, other: Any) -> Any:
        result = getattr(int(self), operation)(other) if isinstance(other, int) else NotImplemented
        return _Index(result) if isinstance(result, int) else result

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod"):
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


# What kernels call of `triton_ops`.
_ops = types.SimpleNamespace(
    pow2_32=lambda k: _tensor(((np.asarray(k, np.int32) + 127) << 23).view(np.float32)),
    narrow=lambda x, dtype, native: _tensor(narrow(np.asarray(x), dtype)),
)


def _rebuilt(module: Any, names: dict[str, Any]) -> types.SimpleNamespace:
    """The functions of a module of kernels as plain functions over other globals."""
    space = {**vars(module), **names}
    space |= {name: value.value for name, value in space.items() if isinstance(value, triton.language.constexpr)}
    for name, value in list(space.items()):
        function = getattr(value, "fn", None)
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            space[name] = types.FunctionType(
                function.__code__, space, name, function.__defaults__, function.__closure__
            )
    return types.SimpleNamespace(**space)


def emulated(module: Any) -> types.SimpleNamespace:
    """The functions of a module of Hopper kernels, to be run by `Launch`."""
    shared = _rebuilt(gluon_steps, {"gl": gl})
    shared.load, shared.store, shared.add = _bring, _later(_put), _later(_accumulate)
    names = {
        "gl": gl,
        "mbarrier": mbarrier,
        "tma": types.SimpleNamespace(store_wait=_store_wait),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": _product,
        "warpgroup_mma_wait": _product_wait,
        "steps": shared,
        "load": _bring,
        "ops": _ops,
    }
    return _rebuilt(module, names)


def array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """All that lies behind a tensor's base."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return array(tensor.as_strided((extent,), (1,)))


def call(launcher: Any, *tensors: torch.Tensor, seed: int = 0) -> None:
    """What a launcher does, in place of its `__call__`."""
    tail, programs = launcher._specification[:2]
    kernels = vars(emulated(sys.modules[launcher._kernel.fn.__module__]))
    blocks = len(launcher._blocks)
    described = [Described(_memory(t), b) for t, b in zip(tensors[:blocks], launcher._blocks, strict=True)]
    # a tensor that stands for one that is not there may have any strides
    pointers = [Pointer(array(t)) if t.is_contiguous() else None for t in tensors[blocks:]]
    numbers = [_Index(x) if isinstance(x, int) else np.float32(x) if isinstance(x, float) else x for x in tail]
    Launch(programs, seed).run(kernels[launcher._kernel.__name__], [*described, *pointers, *numbers])
