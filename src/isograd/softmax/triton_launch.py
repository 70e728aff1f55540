# mypy: ignore-errors
"""How the Triton softmax kernels are configured and launched.

`configuration` is the written rule that picks a variant from shape, dtype and architecture; nothing is timed at run
time, and no choice changes a bit. A launch that was seen before costs a dictionary look-up and the driver's call.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from isograd.numerics.constants import SHORT_ROW
from isograd.triton_launcher import compilation_told, submit, unspecialized

FORWARD = ("softmax", "log_softmax")
Kernels = Mapping[tuple[str, str], Any]  # (direction, variant)
_INT32_ROW = 1 << 17  # terms of binary32 whose integers fit an int64


class Configuration(NamedTuple):
    """What a launch is made of, apart from the problem itself."""

    variant: str  # "tile", "loop", "cluster", "staged", "piped" or "strip"
    block: int  # columns a tile
    rows: int  # rows a program
    warps: int
    group: int  # columns a thread, at most 256
    vector: int  # columns of one access
    ctas: int = 1  # blocks of a cluster that share a row
    native: bool = False
    registers: int = 0  # a thread may use; 0 leaves it to the compiler


class Problem(NamedTuple):
    """Rows of n elements along an inner axis and up to six outer axes; strides per tensor in elements."""

    n: int
    inner: int
    axis_strides: tuple[int, ...]
    inner_strides: tuple[int, ...]
    outer_shape: tuple[int, ...]
    outer_strides: tuple[tuple[int, ...], ...]

    @property
    def contiguous(self) -> bool:
        """Whether neighbours on the reduced axis are neighbours in memory."""
        return self.n == 1 or all(s == 1 for s in self.axis_strides) or 1 not in self.inner_strides


def describe(shape: Sequence[int], strides: Sequence[Sequence[int]], axis: int) -> Problem:
    """Merge the axes that are not reduced as far as the strides of every tensor allow."""
    order = sorted((i for i in range(len(shape)) if i != axis and shape[i] > 1), key=lambda i: -abs(strides[-1][i]))
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    for i in order:
        step = tuple(s[i] for s in strides)
        if steps and all(a == b * shape[i] for a, b in zip(steps[-1], step, strict=True)):
            sizes[-1], steps[-1] = sizes[-1] * shape[i], step
        else:
            sizes.append(shape[i])
            steps.append(step)
    if not sizes:  # one row, with the strides that more would have
        before = axis - 1 if axis else len(shape) - 1
        sizes, steps = [1], [tuple(s[before] if len(shape) > 1 else 0 for s in strides)]
    outer = tuple(tuple(step[t] for step in steps[:-1]) for t in range(len(strides)))
    return Problem(shape[axis], sizes[-1], tuple(s[axis] for s in strides), steps[-1], tuple(sizes[:-1]), outer)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def configuration(
    n: int, itemsize: int, op: str, arch: int, contiguous: bool = True, inner: int = 1 << 30, aligned: bool = True
) -> Configuration:
    """The variant for rows of n elements.

    `arch` is the compute capability times ten, 0 where it is not NVIDIA's; `aligned` says what `_aligned` does.
    """
    if not contiguous:
        return _strided_configuration(n, itemsize, op, inner, arch, aligned)
    if 90 <= arch < 110 and aligned and itemsize < 8 and n <= _longest(itemsize, op):
        block = _power_of_two(n)
        if op in FORWARD and block * itemsize >= 16384 and (itemsize == 4 or block > 8192):
            return _forward_configuration(block, itemsize, op)
        if op not in FORWARD and block >= 4096:
            return _backward_configuration(block, itemsize, op)
    return _tile_configuration(n, itemsize, op, arch)


def _longest(itemsize: int, op: str) -> int:
    """Longest row whose integers fit an int64."""
    return SHORT_ROW if itemsize == 2 and op in FORWARD else _INT32_ROW


def _tile_configuration(n: int, itemsize: int, op: str, arch: int) -> Configuration:
    """Whole rows in the registers of a block; long rows in passes."""
    native = arch >= 90
    vector = max(16 // itemsize, 1)
    block = _power_of_two(n)
    if block * itemsize > 65536:
        return Configuration("loop", 16384 // itemsize, 1, 8, 64 // itemsize, vector, native=native)
    # Two warps a block, 64 bytes of a row a thread; the arithmetic of 16-bit rows is cheaper with 128 bytes.
    more = itemsize == 2 and op in FORWARD and (op == "log_softmax" or n > 1024)
    group = min((128 if more else 64) // itemsize, block)
    threads = block // group
    rows = max(64 // threads, 64 // block, 1)
    warps = min(max(rows * threads // 32, 1), 32)
    if threads > 1024:
        group = block // 1024
    return Configuration("tile", block, rows, warps, group, min(vector, group), native=native)


def clustered(
    variant: str, block: int, itemsize: int, bytes_per_thread: int, warps: int, registers: int
) -> Configuration:
    """As many blocks of `warps` warps as hold the row; blocks grow where a cluster of 8 does not."""
    group = bytes_per_thread // itemsize
    threads = block // group
    warps = min(max(warps, threads // (32 * 8)), max(threads // 32, 1))
    ctas = max(threads // (32 * warps), 1)
    return Configuration(variant, warps * 32 * group, 1, warps, group, 16 // itemsize, ctas, True, registers)


def _forward_configuration(block: int, itemsize: int, op: str) -> Configuration:
    """Much arithmetic: the next row arrives meanwhile, in as few blocks as hold the row."""
    size = block * itemsize
    if size <= 16384:
        if op == "softmax":
            return clustered("cluster", block, itemsize, 64, 8, 64)
        return clustered("cluster", block, itemsize, 128, 4, 128)
    if itemsize == 2 and block == 16384:
        return clustered("staged", block, itemsize, 64, 16, 64)
    if op == "softmax" and (itemsize == 2 or block == 65536) and 65536 <= size <= 262144:
        return clustered("piped", block, itemsize, 128, 16 if size <= 131072 else 8, 128)
    one = size <= 65536 and not (op == "log_softmax" and itemsize == 4 and block == 16384)
    return clustered("staged", block, itemsize, 128, 16 if one else 8 if size <= 65536 else 4, 128)


def _backward_configuration(block: int, itemsize: int, op: str) -> Configuration:
    """Little arithmetic: many small clusters that come and go, as far as registers allow.

    The exponential of log_softmax makes it as much as forward: there the next row arrives meanwhile.
    """
    if itemsize == 2:
        if op == "log_softmax_backward" and block >= 16384:
            return clustered("staged", block, itemsize, 128, 8 if block <= 32768 else 16, 128)
        if block <= 65536 and (op == "softmax_backward" or block <= 4096):
            return clustered("cluster", block, itemsize, 64, 8 if block in (8192, 16384) else 4, 80)
        return clustered("cluster", block, itemsize, 128, 4, 128)
    if op == "log_softmax_backward":
        if block >= 65536:
            return clustered("staged", block, itemsize, 128, 16, 128)
        return clustered("cluster", block, itemsize, 128, 16 if block == 16384 else 4, 128)
    return clustered("cluster", block, itemsize, 128, 8 if block <= 16384 else 16, 128)


class _Strip(NamedTuple):
    lanes: int  # threads of a warp that hold neighbouring rows; the others hold other columns of these
    warps: int
    ctas: int
    registers: int = 0


# The fastest on an H200 for [2^15 / n, n, 4096], by item size, operation and columns (a power of two).
_STRIPS: dict[tuple[int, str], dict[int, _Strip]] = {
    (4, "forward"): {
        256: _Strip(16, 4, 1),
        512: _Strip(16, 8, 1),
        1024: _Strip(16, 8, 2),
        2048: _Strip(16, 8, 4),
        4096: _Strip(16, 8, 8, 128),
    },
    (4, "softmax_backward"): {
        256: _Strip(32, 8, 1),
        512: _Strip(16, 8, 1),
        1024: _Strip(32, 4, 4),
        2048: _Strip(32, 8, 8, 128),
        4096: _Strip(16, 4, 8),
    },
    (4, "log_softmax_backward"): {
        256: _Strip(32, 8, 1),
        512: _Strip(32, 4, 4),
        1024: _Strip(32, 8, 4),
        2048: _Strip(32, 8, 8, 128),
        4096: _Strip(16, 4, 8),
    },
    (2, "forward"): {
        256: _Strip(16, 4, 1),
        512: _Strip(16, 4, 1),
        1024: _Strip(16, 4, 2),
        2048: _Strip(32, 4, 8),
        4096: _Strip(16, 8, 8, 128),
    },
    (2, "softmax_backward"): {
        256: _Strip(16, 4, 1),
        512: _Strip(16, 8, 1),
        1024: _Strip(16, 4, 4),
        2048: _Strip(16, 8, 4, 128),
        4096: _Strip(16, 16, 4, 128),
    },
    (2, "log_softmax_backward"): {
        256: _Strip(16, 4, 1),
        512: _Strip(16, 8, 2),
        1024: _Strip(16, 16, 2),
        2048: _Strip(16, 8, 4, 128),
        4096: _Strip(16, 8, 8, 128),
    },
}


def _strided_configuration(n: int, itemsize: int, op: str, inner: int, arch: int, aligned: bool) -> Configuration:
    """Rows whose neighbours in memory belong to other rows: a program takes a strip of neighbouring rows."""
    native = arch >= 90
    block = _power_of_two(n)
    if 90 <= arch < 110 and aligned and itemsize < 8 and n <= 4096:
        # Up to 128 columns take strips of 128 bytes and four warps; of 16-bit words a thread has two rows.
        of = "forward" if op in FORWARD else op
        strip = _STRIPS[itemsize, of].get(block) or _Strip(32, 4, 1)
        vector, threads = 4 // itemsize, 32 * strip.warps * strip.ctas
        group = max(block * strip.lanes // threads, 1)
        shape = (block, strip.lanes * vector, strip.warps, group, vector)
        return Configuration("strip", *shape, strip.ctas, True, strip.registers)
    rows = min(128 // itemsize, _power_of_two(inner))
    limit = 16384 * 2 // itemsize
    if rows * block > limit:
        rows = min(32 // itemsize, rows)
    variant = "tile"
    if rows * block > limit:
        variant, block = "loop", max(limit // 4 // rows, 1)
    warps = max(min(rows * block * itemsize // 2048, 16), 1)
    # Threads left over from the strip's width take neighbouring columns, and every thread some of each distance.
    across = max(32 * warps * min(16 // itemsize, rows) // rows, 1)
    group = min(max(block // across, 1), 256)
    return Configuration(variant, block, rows, warps, group, 1, native=native)


def _alignment(problem: Problem, pointers: Sequence[int], itemsize: int) -> int:
    """Elements, at most 16 bytes' worth, to which every row and every pointer is aligned."""
    steps = problem.inner_strides if problem.contiguous else problem.axis_strides
    length = problem.n if problem.contiguous else problem.inner
    common = math.gcd(16 // itemsize, length, *steps, *(s for t in problem.outer_strides for s in t))
    return math.gcd(common * itemsize, 16, *pointers) // itemsize or 1


def _aligned(problem: Problem, vec: int, itemsize: int) -> bool:
    """Whether the kernels for long rows and for strips apply: unit strides, and rows that start where they need."""
    if problem.contiguous:
        return vec * itemsize == 16 and not problem.outer_shape and all(s == 1 for s in problem.axis_strides)
    return vec * itemsize >= 4 and all(s == 1 for s in problem.inner_strides)


def _arch(device: torch.device) -> int:
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def arguments(problem: Problem, config: Configuration, kind: int, itemsize: int, vec: int) -> tuple[Any, ...]:
    """What follows the pointers in the signature of a kernel."""
    if config.variant in ("cluster", "staged"):
        from isograd.softmax import gluon_kernels

        masked = config.block * config.ctas != problem.n
        fixed = (kind, config.block, config.ctas, config.group, config.vector, masked)
        layouts = [gluon_kernels.layout_of(config)]
        if config.variant == "staged":
            layouts.append(gluon_kernels.shared_layout_of(config))
        return (problem.inner, problem.n, *problem.inner_strides, *fixed, *layouts)
    if config.variant == "piped":
        from isograd.softmax import gluon_pipes

        masked = config.block * config.ctas != problem.n
        fixed = (kind, config.block, config.ctas, config.group, config.vector, masked)
        tail = (gluon_pipes.layout_of(config), gluon_pipes.shared_layout_of(config), gluon_pipes.chunks_of(config))
        return (problem.inner, problem.n, *problem.inner_strides, *fixed, *tail)
    if config.variant == "strip":
        from isograd.softmax import gluon_strips

        lanes = config.rows // config.vector
        covered = config.ctas * config.warps * 32 // lanes * config.group == problem.n
        covered = covered and problem.inner % config.rows == 0
        strides = (*problem.axis_strides, problem.outer_shape, *problem.outer_strides)
        fixed = (
            kind,
            config.ctas,
            config.group,
            lanes,
            config.vector,
            vec,
            not covered,
            gluon_strips.layout_of(config),
        )
        return (problem.n, problem.inner, *strides, *fixed)
    strides = tuple(v for pair in zip(problem.axis_strides, problem.inner_strides, strict=True) for v in pair)
    common = (problem.n, problem.inner, *strides, problem.outer_shape, *problem.outer_strides)
    masked = config.block != problem.n or problem.inner % config.rows != 0
    long_row = problem.n > (SHORT_ROW if itemsize == 2 else _INT32_ROW)
    switch = masked if config.variant == "tile" else long_row
    tile = (config.block, config.rows, config.group, config.vector)
    return (*common, kind, *tile, problem.contiguous, vec, switch, config.native)


def programs(problem: Problem, config: Configuration) -> int:
    """How many programs serve the problem."""
    return -(-problem.inner // config.rows) * math.prod(problem.outer_shape)


class Specification(NamedTuple):
    """A kernel with everything that a problem fixes; the tensors' addresses come before `tail`."""

    kernel: Any
    tail: tuple[Any, ...]
    programs: int
    options: dict[str, Any]
    config: Configuration


def specify(
    kernels: Kernels,
    op: str,
    tensors: Sequence[torch.Tensor],
    axis: int,
    config: Configuration | None = None,
    arch: int | None = None,
) -> Specification:
    """Choose the kernel of a problem and lay out its arguments; `arch` overrides the tensors' device."""
    like = tensors[0]
    itemsize = like.element_size()
    problem = describe(like.shape, [t.stride() for t in tensors], axis % like.dim())
    vec = _alignment(problem, [t.data_ptr() for t in tensors], itemsize)
    if config is None:
        arch = _arch(like.device) if arch is None else arch
        aligned = _aligned(problem, vec, itemsize)
        config = configuration(problem.n, itemsize, op, arch, problem.contiguous, problem.inner, aligned)
    free = ("inner",) if problem.contiguous and config.variant in ("tile", "loop") else ()
    kernel = unspecialized(kernels["forward" if op in FORWARD else "backward", config.variant], free)
    tail = arguments(problem, config, int(op.startswith("log")), itemsize, vec)
    options = {"num_warps": config.warps, "enable_fp_fusion": False}
    if config.ctas > 1:
        options["num_ctas"] = config.ctas
    if config.registers:
        options["maxnreg"] = config.registers
    return Specification(kernel, tail, programs(problem, config), options, config)


def resident(compiled: Any, config: Configuration) -> int:
    """Clusters, of a kernel in which they stay, that the current device holds at a time."""
    from triton.runtime import driver

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    registers = config.registers or compiled.n_regs
    available = properties.shared_memory_per_multiprocessor
    # What the exchanges take at most (`gluon_exchange.py`), and what every block needs besides.
    boxes = 32 * config.ctas * config.warps + 2048
    blocks = min(65536 // (registers * 32 * config.warps), available // (compiled.metadata.shared + boxes))
    blocks = max(blocks, 1)
    if config.ctas == 1:
        return int(properties.multi_processor_count) * blocks
    # The driver knows how many clusters fit its groups of processors. It counts shared memory alone, so it is asked
    # with as much of that as leaves room for `blocks` blocks.
    shared = max(compiled.metadata.shared, available // blocks - boxes)
    return int(driver.active.utils.cuOccupancyMaxActiveClusters(compiled.function, shared, config.ctas))


def _prepare(
    kernels: Kernels, op: str, tensors: Sequence[torch.Tensor], axis: int, config: Configuration | None
) -> Callable[..., None]:
    """Compile and load the kernel of a problem; what comes back takes the stream and the addresses."""
    kernel, tail, size, options, config = specify(kernels, op, tensors, axis, config)
    with torch.cuda.device(tensors[0].device), compilation_told():
        compiled = kernel.warmup(*tensors, *tail, grid=(size,), **options)
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        if config.variant in ("staged", "piped"):
            size = min(size, resident(compiled, config))

    def launch_prepared(stream: int, *addresses: int) -> None:
        run(size, 1, 1, stream, function, metadata, None, None, None, *addresses, *tail)

    return launch_prepared


_PREPARED_LIMIT = 4096
_prepared: dict[Any, Callable[..., None]] = {}


def launch(
    kernels: Kernels, op: str, tensors: Sequence[torch.Tensor], axis: int, config: Configuration | None = None
) -> None:
    """Run `op` over `axis` of tensors of one shape and type, the last of which is the output.

    The launch goes to the current stream of the tensors' device, which need not be the current device.
    """
    like = tensors[0]
    if like.numel() == 0:
        return
    index = like.get_device()
    if index < 0:  # Triton's interpreter
        kernel, tail, size, options, _ = specify(kernels, op, tensors, axis, config)
        kernel[(size,)](*tensors, *tail, **options)
        return
    addresses = [t.data_ptr() for t in tensors]
    key = (
        op,
        index,
        like.dtype,
        like.shape,
        axis,
        config,
        *[t.stride() for t in tensors],
        *[a & 15 for a in addresses],
    )
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        prepared = _prepared[key] = _prepare(kernels, op, tensors, axis, config)
    submit(prepared, index, tensors, addresses)
