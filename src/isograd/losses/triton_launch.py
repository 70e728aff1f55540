"""How the Triton kernels of cross entropy are configured and launched, on torch tensors of one device.

The rules pick tiles from shape, dtype and architecture; nothing is timed at run time, and no choice changes a bit.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from isograd import faults
from isograd.losses import triton_cross_entropy as kernels
from isograd.losses.cross_entropy_plans import _CrossEntropy, scalars
from isograd.numerics.constants import SHORT_ROW
from isograd.reduction import cuda as reduction
from isograd.softmax.triton_launch import Configuration, configuration
from isograd.triton_launcher import Rows, Specification, architecture, c_strides, launch, rows

_INT32_ROW = 1 << 17


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
    def programs(self) -> int:
        """Programs that serve all rows."""
        return self.rows.outer * -(-self.rows.inner // self.config.rows)

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
    long_row = problem.n > (SHORT_ROW if problem.itemsize == 2 else _INT32_ROW)
    flags = (problem.mode, fused, problem.weighted, problem.z)
    tail = (*problem.sizes, *flags, *problem.tile, held, long_row, problem.config.native)
    return Specification(tail, problem.programs, problem.config.warps)


def _backward(problem: _Problem) -> Specification:
    tail = (*problem.sizes, problem.mode, problem.weighted, *problem.tile, problem.config.native)
    return Specification(tail, problem.programs, problem.config.warps)


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


@functools.lru_cache(maxsize=4096)
def _problem(
    descriptor: _CrossEntropy, strides: tuple[tuple[int, ...], ...], state_part: int, itemsize: int, arch: int,
    config: Configuration | None,
) -> _Problem:  # fmt: skip
    n, values = descriptor.classes, scalars(descriptor, None)
    problem = rows(descriptor.shape, strides, descriptor.axis)
    if config is None:
        config = configuration(n, itemsize, "log_softmax", arch, _contiguous(n, problem), problem.inner, False)
    mode = kernels.SMOOTH if values.spread else kernels.HARD
    mode = mode if descriptor.by_index else kernels.PROBABILITIES
    # One that no index can have stands for one that int64 cannot hold.
    ignored = descriptor.ignore_index if -(2**63) <= descriptor.ignore_index < 2**63 else -(2**63)
    code = faults.code(descriptor.operation, "targets", False)
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
            strides.append(_inserted((state[0] if name == "state" else arguments[name]).stride(), axis))
    part = 0 if state is None else state.stride(0)
    return _problem(descriptor, tuple(strides), part, x.element_size(), architecture(x), config)


_FORWARD = ("logits", "probabilities", "targets", "position", "dlosses", "losses", "state", "dlogits")
_BACKWARD = ("logits", "probabilities", "targets", "position", "dlosses", "state", "dlogits")


def cross_entropy(
    descriptor: _CrossEntropy, arguments: Mapping[str, Any], config: Configuration | None = None
) -> None:
    """Any of the three operations on the plan's arguments, on the current stream of their device."""
    x, targets, weight = arguments["logits"], arguments["targets"], arguments.get("weight")
    if descriptor.rows == 0:
        return
    flag = faults.flag(x.device)
    constants = numbers(descriptor, weight, x.device)
    # What is absent is never looked at, but an address has to stand there.
    y, index = (x, targets) if descriptor.by_index else (targets, flag)
    common = (x, y, index, constants if weight is None else weight.contiguous(), constants)
    if descriptor.operation == "cross_entropy_backward":
        problem = _describe(descriptor, arguments, _BACKWARD, config)
        tensors = (*common, arguments["dlosses"], arguments["state"], arguments["dlogits"], flag)
        launch(kernels.backward, tensors, _backward, problem)
    else:
        fused = descriptor.operation == "cross_entropy_gradient"
        losses = arguments["losses"]
        problem = _describe(descriptor, arguments, _FORWARD, config)
        tensors = (
            *common,
            arguments.get("dlosses", losses),
            losses,
            arguments.get("state", losses),
            arguments.get("dlogits", x),
            flag,
        )
        launch(kernels.forward, tensors, _forward, problem, fused)
    faults.after_launch(x.device)
