"""How the Triton kernels of cross entropy are configured and launched, on torch tensors of one device.

The rules pick tiles from shape, dtype and architecture; nothing is timed at run time, and no choice changes a bit.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from isograd.core import faults
from isograd.devices.triton_launcher import (
    Rows,
    Specification,
    architecture,
    c_strides,
    launch,
    power_of_two,
    rows,
)
from isograd.losses import triton_cross_entropy as kernels
from isograd.losses.cross_entropy_plans import CrossEntropyDescriptor, _CrossEntropy, scalars
from isograd.losses.gluon_cross_entropy import gradient_staged
from isograd.numerics.constants import SHORT_ROW
from isograd.reduction import cuda as reduction
from isograd.rows import gluon_rows
from isograd.rows.triton_configuration import INT32_ROW, Configuration, clustered, configuration


class _Problem(NamedTuple):
    """Everything that fixes a kernel: sizes, strides, options, tiles."""

    n: int
    rows: Rows
    ignore_index: int
    code: int
    state_part: int
    mode: int
    weighted: bool
    z: bool
    itemsize: int
    config: Configuration

    @property
    def contiguous(self) -> bool:
        """Whether a program's tile runs along the classes."""
        return _contiguous(self.n, self.rows)

    @property
    def free(self) -> tuple[str, ...]:
        """Arguments that nothing is compiled anew for."""
        return ("inner", "state_part") if self.contiguous else ("state_part",)

    @property
    def programs(self) -> int:
        """Programs that serve all rows."""
        return self.rows.outer * -(-self.rows.inner // self.config.rows)

    @property
    def stateful(self) -> bool:
        """Whether there is a state."""
        return self.state_part > 0

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What follows the tensors."""
        return (self.n, self.rows.inner, self.ignore_index, self.code, self.state_part, *self.rows.strides)

    @property
    def tile(self) -> tuple[Any, ...]:
        """The constants of the tile."""
        config = self.config
        vec = math.gcd(16 // self.itemsize, *self._steps())
        return (config.block, config.rows, config.group, config.vector, self.contiguous, vec)

    def _steps(self) -> tuple[int, ...]:
        """Strides, of logits and gradient, of the axes that a tile does not run along."""
        across = self.rows.inner_strides if self.contiguous else self.rows.axis_strides
        full = (0, len(across) - 1)
        return tuple(abs(v) for t in full for v in (across[t], *self.rows.outer_strides[t]))


def _contiguous(n: int, problem: Rows) -> bool:
    full = (0, len(problem.axis_strides) - 1)
    return n == 1 or all(problem.axis_strides[t] == 1 for t in full) or any(problem.inner_strides[t] != 1 for t in full)


def _forward(problem: _Problem, fused: bool) -> Specification:
    held = problem.n <= problem.config.block
    long_row = problem.n > (SHORT_ROW if problem.itemsize == 2 else INT32_ROW)
    flags = (problem.mode, fused, problem.stateful, problem.weighted, problem.z)
    tail = (*problem.sizes, *flags, *problem.tile, held, long_row, problem.config.native)
    config = problem.config
    return Specification(tail, problem.programs, config.warps, registers=config.registers or None, free=problem.free)


def _backward(problem: _Problem, in_part: bool) -> Specification:
    tail = (*problem.sizes, problem.mode, problem.weighted, in_part, *problem.tile, problem.config.native)
    config = problem.config
    return Specification(tail, problem.programs, config.warps, registers=config.registers or None, free=problem.free)


@functools.lru_cache(maxsize=256)
def _fixed_numbers(values: tuple[float, ...], work: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, work), device=device)


def numbers(descriptor: _CrossEntropy, weight: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`Scalars` as a tensor on the device."""
    values = scalars(descriptor, None)
    fixed = _fixed_numbers(tuple(float(v) for v in values), descriptor.work, device)
    if weight is None or not values.spread:
        return fixed
    changed = fixed.clone()
    changed[4] = fixed[0]
    changed[5] = fixed[1] * reduction.sum(weight)
    return changed


def _inserted(strides: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The strides of something that a row has one of, in the logits' dimensions."""
    return (*strides[:axis], 0, *strides[axis:])


def _tiles(
    n: int, itemsize: int, arch: int, contiguous: bool, inner: int, operation: str, plain: bool
) -> Configuration:
    """As softmax's, but for what an H200 does faster: rows walked through in short blocks, many of them at a time.

    plain: by the targets alone, without weights and z_loss.
    """
    config = configuration(n, itemsize, "log_softmax", arch, contiguous, inner, False)
    size = power_of_two(n) * itemsize
    if not contiguous:
        return config
    if operation == "cross_entropy_gradient" or itemsize == 8:
        if config.variant == "loop":
            # One block of 16 warps fills a processor: fewer long rows at a time stay in the cache.
            return config._replace(block=32768 // itemsize, warps=16)
        if plain and config.native and itemsize == 2 and n == 1024:
            # A warp a row that it fills leaves room for more warps.
            return config._replace(rows=1, warps=1, group=32, registers=64)
        return config
    if operation == "cross_entropy_backward":
        return _walk(config, itemsize, min(max(size // 16, 2048), 8192)) if size >= 2048 else config
    if itemsize == 4 and size >= 131072 and plain:
        return _walk(config, itemsize, 16384)._replace(registers=40)
    return _walk(config, itemsize, min(size // 4, 8192)) if size >= (8192 if itemsize == 4 else 32768) else config


def _walk(config: Configuration, itemsize: int, size: int) -> Configuration:
    """Blocks of `size` bytes, 32 of them a thread."""
    block, group, vector = size // itemsize, 32 // itemsize, 16 // itemsize
    return Configuration("loop", block, 1, size // 1024, group, vector, native=config.native)


@functools.lru_cache(maxsize=4096)
def _problem(
    descriptor: _CrossEntropy, strides: tuple[tuple[int, ...], ...], state_part: int, itemsize: int, arch: int,
    config: Configuration | None, code: int,
) -> _Problem:  # fmt: skip
    n, values = descriptor.classes, scalars(descriptor, None)
    problem = rows(descriptor.shape, strides, descriptor.axis)
    mode = kernels.SMOOTH if values.spread else kernels.HARD
    mode = mode if descriptor.by_index else kernels.PROBABILITIES
    if config is None:
        plain = mode is kernels.HARD and not (descriptor.weighted or values.z)
        config = _tiles(n, itemsize, arch, _contiguous(n, problem), problem.inner, descriptor.operation, plain)
    # One that no index can have stands for one that int64 cannot hold.
    ignored = descriptor.ignore_index if -(2**63) <= descriptor.ignore_index < 2**63 else -(2**63)
    flags = (mode.value, descriptor.weighted, bool(values.z))
    return _Problem(n, problem, ignored, code, state_part, *flags, itemsize, config)


def _describe(
    descriptor: _CrossEntropy, arguments: Mapping[str, Any], names: tuple[str, ...], config: Configuration | None
) -> _Problem:
    """The problem of a call; `names` are the operands whose strides the kernel takes, in its order."""
    x, axis = arguments["logits"], descriptor.axis
    state = arguments.get("state")
    strides = []
    for name in names:
        if name == "position":
            strides.append(_inserted(c_strides(descriptor.row_shape), axis))
        elif name == "probabilities":
            strides.append((x if descriptor.by_index else arguments["targets"]).stride())
        elif name in ("logits", "dlogits"):
            strides.append(arguments.get(name, x).stride())
        elif name not in arguments or (name == "targets" and not descriptor.by_index):
            strides.append((0,) * x.dim())
        else:
            strides.append(_inserted(arguments[name].stride()[1 if name == "state" else 0 :], axis))
    part = 0 if state is None else state.stride(0)
    code = faults.code(descriptor.operation, "targets", False)
    return _problem(descriptor, tuple(strides), part, x.element_size(), architecture(x), config, code)


# --- long rows, on Hopper and its successor --------------------------------------------------------------------------
class _Staged(NamedTuple):
    """A problem for the Gluon kernel."""

    n_rows: int
    n: int
    ignore_index: int
    state_part: int
    strides: tuple[int, ...]
    stateful: bool
    weighted: bool
    z: bool
    config: Configuration


def _staged(problem: _Staged) -> Specification:
    config = problem.config
    masked = config.block * config.ctas != problem.n
    tile = (config.block, config.ctas, config.group, config.vector, masked)
    layouts = (gluon_rows.layout_of(config), gluon_rows.shared_layout_of(config))
    sizes = (problem.n_rows, problem.n, problem.ignore_index, problem.state_part, *problem.strides)
    tail = (*sizes, problem.stateful, problem.weighted, problem.z, *tile, *layouts)
    return Specification(tail, problem.n_rows, config.warps, registers=config.registers, ctas=config.ctas, stays=True)


def staged(problem: _Problem, arch: int, addresses: Sequence[int]) -> _Staged | None:
    """The problem of the kernel for long rows, if it serves this one: plain targets, rows that start at 16 bytes."""
    layout, itemsize = problem.rows, problem.itemsize
    if problem.mode != kernels.HARD.value or not 90 <= arch < 110 or layout.outer_shape:
        return None
    longest = SHORT_ROW if itemsize == 2 else INT32_ROW
    block = 1 << max(problem.n - 1, 0).bit_length()
    if itemsize == 8 or problem.n > longest or block * itemsize < 16384 or (itemsize == 2 and block <= 8192):
        return None
    logits, _, target, _, dlosses, losses, state, dlogits = layout.inner_strides
    # The length too: the last columns of a row are told from what follows it by whole accesses. The compiler is told of
    # multiples of 16 elements; by less, copies of 16-bit elements would be too narrow.
    steps = (problem.n, logits, dlogits, *addresses)
    if {layout.axis_strides[0], layout.axis_strides[-1]} != {1} or any(s % 16 for s in steps):
        return None
    strides = (logits, target, dlosses, losses, state, dlogits)
    warps = 16 if 16384 < block * itemsize <= 65536 else 4
    config = clustered("staged", block, itemsize, 128, warps, 128)
    sizes = (layout.inner, problem.n, problem.ignore_index, problem.state_part)
    return _Staged(*sizes, strides, problem.stateful, problem.weighted, problem.z, config)


def report_targets(operation: str, targets: torch.Tensor, n: int, ignore_index: int) -> None:
    """Note a target of a 1-D tensor that is no class."""
    count, block = targets.numel(), 1024
    ignored = ignore_index if -(2**63) <= ignore_index < 2**63 else -(2**63)
    tail = (count, targets.stride(0) if count > 1 else 1, n, ignored, faults.code(operation, "targets", False), block)
    launch(kernels.check_targets, (targets, faults.flag(targets.device)), _as_it_is, tail, -(-count // block))


def _as_it_is(tail: tuple[Any, ...], programs: int) -> Specification:
    return Specification(tail, programs)


_FORWARD = ("logits", "probabilities", "targets", "position", "dlosses", "losses", "state", "dlogits")
_BACKWARD = ("logits", "probabilities", "targets", "position", "dlosses", "state", "dlogits")


def cross_entropy(descriptor: _CrossEntropy, arguments: Mapping[str, Any], config: Configuration | None = None) -> None:
    """Any of the three operations on the plan's arguments, on the current stream of their device.

    The one that returns losses and gradients at once writes the state too where it is given one. Whoever calls this for
    a user calls `faults.after_launch` next.
    """
    x, targets, weight = arguments["logits"], arguments["targets"], arguments.get("weight")
    if descriptor.rows == 0:
        return
    if descriptor.operation == "cross_entropy_backward":
        _launch_backward(descriptor, arguments, numbers(descriptor, weight, x.device), None, config)
        return
    flag = faults.flag(x.device)
    constants = numbers(descriptor, weight, x.device)
    fused = descriptor.operation == "cross_entropy_gradient"
    losses = arguments["losses"]
    problem = _describe(descriptor, arguments, _FORWARD, config)
    dlosses, state = arguments.get("dlosses", losses), arguments.get("state", losses)
    dlogits = arguments.get("dlogits", x)
    places = (x.data_ptr(), dlogits.data_ptr()) if fused and config is None else ()
    long_rows = staged(problem, architecture(x), places) if places else None
    if long_rows is None:
        tensors = (*_common(descriptor, arguments, constants, flag), dlosses, losses, state, dlogits, flag)
        launch(kernels.forward, tensors, _forward, problem, fused)
        return
    report_targets(descriptor.operation, targets.reshape(-1), descriptor.classes, descriptor.ignore_index)
    weights = constants if weight is None else weight.contiguous()
    tensors = (x, targets, weights, constants, dlosses, losses, state, dlogits)
    launch(gradient_staged, tensors, _staged, long_rows)


def cross_entropy_backward_in_part(
    descriptor: CrossEntropyDescriptor, first: int, arguments: Mapping[str, Any]
) -> None:
    """The gradient of some classes' logits, as many as `arguments` have from class `first` of the descriptor's on.

    The state is that of whole rows, which reported targets that are no class; weights are those of the same classes.
    The logits may differ from those of the state by rounding.
    """
    constants = numbers(descriptor, None, arguments["logits"].device)
    part = dataclasses.replace(descriptor, shape=arguments["logits"].shape)
    if part.rows:
        _launch_backward(part, arguments, constants, first, None)


def _common(
    descriptor: _CrossEntropy, arguments: Mapping[str, Any], constants: torch.Tensor, flag: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What the kernels begin with. What is absent is never looked at, but an address has to stand there."""
    x, targets, weight = arguments["logits"], arguments["targets"], arguments.get("weight")
    y, index = (x, targets) if descriptor.by_index else (targets, flag)
    return x, y, index, constants if weight is None else weight.contiguous(), constants


def _launch_backward(
    descriptor: _CrossEntropy,
    arguments: Mapping[str, Any],
    constants: torch.Tensor,
    first: int | None,
    config: Configuration | None,
) -> None:
    flag = faults.flag(arguments["logits"].device)
    problem = _describe(descriptor, arguments, _BACKWARD, config)
    given = (arguments["dlosses"], arguments["state"], arguments["dlogits"], flag)
    tensors = (*_common(descriptor, arguments, constants, flag), *given)
    launch(kernels.backward, tensors, _backward, problem, first is not None, numbers=(first or 0,))
