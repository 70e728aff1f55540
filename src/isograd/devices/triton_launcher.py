"""How the families' Triton kernels are launched, and how the problems they see are described.

A kernel is fixed by a specification: its arguments after the tensors, its number of programs and its options. A family
keeps a `Launcher` for every kernel of a problem, under a key of everything that enters the specification (`kept` does
so); then a launch costs a dictionary look-up and the driver's call. Tensors on the CPU go to Triton's interpreter.
"""

import contextvars
import functools
import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton

from isograd.runtime import compilation, launches
from isograd.runtime.blocks import BlockEnd

kept = functools.lru_cache(maxsize=4096)


class Specification(NamedTuple):
    """What follows the tensors in a kernel's signature, how many programs run, and options of the compiler.

    free: arguments that vary with the number of rows or tokens and say nothing about how memory is read; nothing is
    compiled anew for their values. ctas: blocks of a cluster, which a program is. stays: programs take one piece of
    work after another; no more run than the device holds at a time.
    """

    tail: tuple[Any, ...]
    programs: int
    warps: int = 4
    stages: int | None = None
    registers: int | None = None
    free: tuple[str, ...] = ()
    ctas: int = 1
    stays: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options; no fma is formed that no kernel writes."""
        options: dict[str, Any] = {"num_warps": self.warps, "enable_fp_fusion": False}
        if self.stages is not None:
            options["num_stages"] = self.stages
        if self.registers is not None:
            options["maxnreg"] = self.registers
        if self.ctas > 1:
            options["num_ctas"] = self.ctas
        return options


@functools.cache
def unspecialized(kernel: Any, free: tuple[str, ...]) -> Any:
    """The kernel that is not compiled anew for values of these arguments, not even for 1 and multiples of 16."""
    if not free or not isinstance(kernel, triton.JITFunction):  # Triton's interpreter has its own
        return kernel
    return type(kernel)(kernel.fn, do_not_specialize=[*(kernel.do_not_specialize or ()), *free])


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for the tensor descriptors that the programs of a launch make, on the current device and stream."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _with_scratch(run: Callable[..., None]) -> Callable[..., None]:
    """The launch of a kernel that makes tensor descriptors; the allocator is set for this call only."""

    def launch_with_scratch(*arguments: Any) -> None:
        context = contextvars.copy_context()
        context.run(triton.set_allocator, _scratch)
        context.run(run, *arguments)

    return launch_with_scratch


class compilation_told:  # noqa: N801 - a block
    """Say what is compiled in the block, and not what Triton finds on disk; a listener of the user's hears it too."""

    __slots__ = ("_before", "_began")

    def __init__(self) -> None:
        self._before, self._began = triton.knobs.compilation.listener, time.monotonic()

    def __enter__(self) -> None:
        triton.knobs.compilation.listener = self._listen

    def _listen(self, *, cache_hit: bool, **details: Any) -> None:
        if not cache_hit:
            compilation.add(time.monotonic() - self._began, "GPU", triton.knobs.cache.dir)
        if self._before is not None:
            self._before(cache_hit=cache_hit, **details)

    def _restore(self, *error: object) -> None:
        triton.knobs.compilation.listener = self._before

    __exit__ = BlockEnd(_restore)


def submit(
    prepared: Callable[..., None], index: int, tensors: Sequence[torch.Tensor], arguments: Sequence[Any]
) -> None:
    """Launch on the current stream of a device, which need not be the current one; without waiting."""
    watcher = launches.watcher()
    if watcher is not None:
        watcher.launched(prepared, tensors, arguments)
    if index == torch._C._cuda_getDevice():
        prepared(torch._C._cuda_getCurrentRawStream(index), *arguments)
    else:
        with torch.cuda.device(index):
            prepared(torch._C._cuda_getCurrentRawStream(index), *arguments)


def _resident(compiled: Any, specification: Specification) -> int:
    """Programs, of a kernel in which they stay, that the current device holds at a time."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    registers = specification.registers or compiled.n_regs
    available = properties.shared_memory_per_multiprocessor
    # What the exchanges take at most (`rows/gluon_exchange.py`), and what every block needs besides.
    boxes = 32 * specification.ctas * specification.warps + 2048
    blocks = min(65536 // (registers * 32 * specification.warps), available // (compiled.metadata.shared + boxes))
    blocks = max(blocks, 1)
    if specification.ctas == 1:
        return int(properties.multi_processor_count * blocks)
    # The driver knows how many clusters fit its groups of processors. It counts shared memory alone, so it is asked
    # with as much of that as leaves room for `blocks` blocks.
    shared = max(compiled.metadata.shared, available // blocks - boxes)
    utils = triton.runtime.driver.active.utils
    return int(utils.cuOccupancyMaxActiveClusters(compiled.function, shared, specification.ctas))


class Launcher:
    """A kernel for one problem: call it with tensors of one device, whose current stream it uses.

    The device need not be the current one. The tensors' dtypes are part of the problem, their alignment is not. A
    kernel may take numbers that vary by call between the tensors and the tail: int32, and named in its
    `do_not_specialize`.
    """

    __slots__ = ("_kernel", "_prepared", "_specification")

    def __init__(self, kernel: Any, specification: Specification) -> None:
        self._kernel = unspecialized(kernel, specification.free)
        self._specification = specification
        self._prepared: dict[int, Callable[..., None]] = {}

    def described(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """What the compiler is shown of the tensors."""
        return tensors

    def passed(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> Sequence[Any]:
        """What the driver is given of the tensors."""
        return addresses

    def __call__(self, *tensors: torch.Tensor, numbers: tuple[int, ...] = ()) -> None:
        """Launch, without waiting."""
        index = tensors[0].get_device()
        if index < 0:
            tail, programs = self._specification[:2]
            self._kernel[(programs,)](*self.described(tensors), *numbers, *tail, **self._specification.options)
            return
        addresses = [t.data_ptr() for t in tensors]
        place = index
        for address in addresses:
            place = place << 4 | address & 15
        prepared = self._prepared.get(place)
        if prepared is None:
            prepared = self._prepared[place] = self._prepare(tensors, numbers)
        submit(prepared, index, tensors, (*self.passed(tensors, addresses), *numbers))

    def _prepare(self, tensors: Sequence[torch.Tensor], numbers: tuple[int, ...]) -> Callable[..., None]:
        """Compile and load; what comes back takes the stream, what is passed of the tensors, and the numbers."""
        tail, programs = self._specification[:2]
        with torch.cuda.device(tensors[0].device):
            options = self._specification.options
            shown = self.described(tensors)
            with compilation_told():
                compiled = self._kernel.warmup(*shown, *numbers, *tail, grid=(programs,), **options)
            run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
            if self._specification.stays:
                programs = min(programs, _resident(compiled, self._specification))
            if getattr(compiled.metadata, "global_scratch_size", 0):
                run = _with_scratch(run)

        def launch_prepared(stream: int, *passed: Any) -> None:
            run(programs, 1, 1, stream, function, metadata, None, None, None, *passed, *tail)

        return launch_prepared


@kept
def _launcher(kernel: Any, specify: Callable[..., Specification], key: tuple[Hashable, ...], dtypes: Any) -> Launcher:
    return Launcher(kernel, specify(*key))


def launch(
    kernel: Any,
    tensors: Sequence[torch.Tensor],
    specify: Callable[..., Specification],
    *key: Hashable,
    numbers: tuple[int, ...] = (),
) -> None:
    """Run a kernel over tensors of one device, on its current stream, by a launcher kept for `key` and their dtypes.

    `specify(*key)` makes the specification; nothing else may enter it. `numbers` vary by call, as for `Launcher`.
    """
    _launcher(kernel, specify, key, tuple([t.dtype for t in tensors]))(*tensors, numbers=numbers)


@functools.cache
def _capability(index: int) -> int:
    if index < 0 or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def architecture(tensor: torch.Tensor) -> int:
    """The compute capability times ten of a tensor's device, 0 where it is not NVIDIA's."""
    return _capability(tensor.get_device())


@functools.cache
def _processors(index: int) -> int:
    return 2 if index < 0 else int(torch.cuda.get_device_properties(index).multi_processor_count)


def processors(tensor: torch.Tensor) -> int:
    """Multiprocessors of a tensor's device."""
    return _processors(tensor.get_device())


# --- problems --------------------------------------------------------------------------------------------------------
class Rows(NamedTuple):
    """Rows along one axis of several tensors: an inner axis and any number of outer axes count the rows.

    Strides in elements, one for every tensor.
    """

    inner: int
    axis_strides: tuple[int, ...]
    inner_strides: tuple[int, ...]
    outer_shape: tuple[int, ...]
    outer_strides: tuple[tuple[int, ...], ...]

    @property
    def outer(self) -> int:
        """Combinations of outer indices."""
        return math.prod(self.outer_shape)

    @property
    def strides(self) -> tuple[Any, ...]:
        """The strides as kernels take them: (axis, inner) of every tensor, the outer shape, the outer strides."""
        pairs = [v for pair in zip(self.axis_strides, self.inner_strides, strict=True) for v in pair]
        return (*pairs, self.outer_shape, *self.outer_strides)


def merged(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Axes of more than one element, the widest strides first, merged as far as every tensor's strides allow."""
    order = sorted((i for i in range(len(shape)) if shape[i] != 1), key=lambda i: -abs(strides[-1][i]))
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    for i in order:
        step = tuple(s[i] for s in strides)
        if steps and all(a == b * shape[i] for a, b in zip(steps[-1], step, strict=True)):
            sizes[-1], steps[-1] = sizes[-1] * shape[i], step
        else:
            sizes.append(shape[i])
            steps.append(step)
    return sizes, steps


def rows(shape: Sequence[int], strides: Sequence[Sequence[int]], axis: int) -> Rows:
    """The rows along an axis of tensors that agree in every other axis; the last tensor is the one that is written."""
    others = [i for i in range(len(shape)) if i != axis]
    sizes, steps = merged([shape[i] for i in others], [[s[i] for i in others] for s in strides])
    if not sizes:  # one row, with the strides that more would have
        sizes, steps = [1], [tuple(s[others[-1]] if others else 0 for s in strides)]
    outer = tuple(tuple(step[t] for step in steps[:-1]) for t in range(len(strides)))
    return Rows(sizes[-1], tuple(s[axis] for s in strides), steps[-1], tuple(sizes[:-1]), outer)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a C-contiguous array: an element's offset is its flat position."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
