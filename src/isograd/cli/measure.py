"""The measurements behind `isograd bench`: contenders, shapes, interleaved timing. No output here."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import isograd
from isograd.numerics import random
from isograd.runtime import parallel

Array = NDArray[Any]
Call = Callable[[], Any]

OPERATIONS = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
DTYPES = ("float32", "bfloat16")
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((65536, 256), 1),
    ((16384, 1024), 1),
    ((4096, 4096), 1),
    ((1024, 32768), 1),
    ((256, 131072), 1),
    ((64, 1000, 256), 1),
)
# The same rows, fewer of them: to see that everything runs, not to compare.
QUICK_SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((2048, 256), 1),
    ((512, 1024), 1),
    ((128, 4096), 1),
    ((16, 32768), 1),
    ((4, 131072), 1),
    ((2, 1000, 256), 1),
)
REPETITIONS, QUICK_REPETITIONS = 21, 3
NUMPY_REPETITIONS = 3  # its times are so much longer that a few tell them well enough
BUSY = 1.5  # a copy that differs by more than this from one run to another shared the machine with something
COPY_BYTES = 1 << 27  # one array of a copy: larger than the caches
_COPY_GRAIN = 1 << 20
_PAUSE = 0.002


@dataclass
class Result:
    """One operation, dtype and shape: the median seconds of each contender.

    copy_spread: how many times as long as in its fastest tenth the copy took in its slowest.
    """

    operation: str
    dtype: str
    shape: tuple[int, ...]
    axis: int
    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    copy_spread: float = 1.0

    def bandwidth(self, contender: str) -> float | None:
        """Algorithmic bytes (each input read once, the output written once) in GB/s."""
        seconds = self.seconds.get(contender)
        return None if seconds is None else self.bytes / seconds / 1e9

    def ratio(self, contender: str) -> float | None:
        """How many times as fast as a contender isograd is."""
        seconds = self.seconds.get(contender)
        return None if seconds is None else seconds / self.seconds["isograd"]

    @property
    def copy_bandwidth(self) -> float:
        """GB/s of a copy in the same run, bytes read and bytes written."""
        return 2 * COPY_BYTES / self.seconds["copy"] / 1e9

    @property
    def busy(self) -> bool:
        """Whether something else used the machine meanwhile, so that comparisons say nothing."""
        return self.copy_spread > BUSY


def _copy_range(target: Array, source: Array, start: int, stop: int) -> None:
    np.copyto(target[start:stop], source[start:stop])


class Bench:
    """What stays the same over a run: whether torch takes part, and the buffers of the copy."""

    def __init__(self, torch: Any = None) -> None:
        self.torch = torch
        if torch is not None:
            torch.set_num_threads(isograd.get_num_threads())
        self._source = np.ones(COPY_BYTES, np.uint8)
        self._target = np.zeros(COPY_BYTES, np.uint8)

    def copies(self) -> dict[str, Call]:
        """Ways to copy memory with the threads that the operations have; the fastest is the ceiling."""
        ways: dict[str, Call] = {
            "NumPy": lambda: parallel.for_ranges(
                _copy_range, self._source.size, _COPY_GRAIN, self._target, self._source
            )
        }
        if self.torch is not None:
            source, target = self.torch.from_numpy(self._source), self.torch.from_numpy(self._target)
            ways["torch"] = lambda: target.copy_(source)
        return ways

    def measure(self, operation: str, dtype: str, shape: tuple[int, ...], axis: int, repetitions: int) -> Result:
        """Time every contender of one problem, in turns."""
        inputs, out = _operands(operation, dtype, shape, axis)
        contenders: dict[str, tuple[Call, int]] = {
            "isograd": (lambda: getattr(isograd, operation)(*inputs, axis=axis, out=out), repetitions)
        }
        if self.torch is not None:
            contenders["torch"] = (torch_call(self.torch, operation, inputs, out, axis), repetitions)
        contenders["NumPy"] = (numpy_call(operation, inputs, out, axis), min(NUMPY_REPETITIONS, repetitions))
        for name, call in self.copies().items():
            contenders[f"copy, {name}"] = (call, repetitions)
        times = interleaved(contenders)
        result = Result(operation, dtype, shape, axis, sum(a.nbytes for a in inputs) + out.nbytes)
        medians = {name: statistics.median(values) for name, values in times.items()}
        result.seconds = {name: value for name, value in medians.items() if not name.startswith("copy")}
        copy = min((name for name in medians if name.startswith("copy")), key=lambda name: medians[name])
        result.seconds["copy"], result.copy_spread = medians[copy], spread(times[copy])
        return result


def spread(seconds: list[float]) -> float:
    """How many times as long as a fast run a slow one takes: the ratio of the ninth decile to the first."""
    fast, slow = np.quantile(seconds, [0.1, 0.9])
    return float(slow / fast)


def interleaved(contenders: dict[str, tuple[Call, int]]) -> dict[str, list[float]]:
    """Seconds of each call, taken in turns; the order rotates so that none always follows the same one."""
    for call, _ in contenders.values():
        call()  # compiles, touches the memory, fills the caches of plans
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(max(count for _, count in contenders.values())):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            call, count = contenders[name]
            if turn < count:
                # Worker threads of the one before may spin for a while; they are not to take this one's cores.
                time.sleep(_PAUSE)
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
    return times


def _operands(operation: str, dtype: str, shape: tuple[int, ...], axis: int) -> tuple[list[Array], Array]:
    # A block of normal variates, repeated: generating all of them would take longer than the measurement.
    block = random.normal(1 << 16, seed=1)
    x = np.resize(block, shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    out = np.zeros_like(x)
    if not operation.endswith("_backward"):
        return [x], out
    forward = getattr(isograd, operation.removesuffix("_backward"))
    return [np.ascontiguousarray(x[::-1]), forward(x, axis=axis)], out


def torch_call(torch: Any, operation: str, inputs: list[Array], out: Array, axis: int) -> Call:
    """The operation in torch on the same memory, writing into the same output."""

    def tensor(a: Array) -> Any:
        if a.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(a)

    given, target = [tensor(a) for a in inputs], tensor(out)
    aten = torch.ops.aten
    if operation == "softmax":
        return lambda: torch.softmax(given[0], axis, out=target)
    if operation == "log_softmax":
        return lambda: aten._log_softmax.out(given[0], axis, False, out=target)
    if operation == "softmax_backward":
        return lambda: aten._softmax_backward_data.out(given[0], given[1], axis, given[0].dtype, grad_input=target)
    return lambda: aten._log_softmax_backward_data.out(given[0], given[1], axis, given[0].dtype, out=target)


def numpy_call(operation: str, inputs: list[Array], out: Array, axis: int) -> Call:
    """The operation as one would write it in NumPy; bfloat16 by way of float32, as NumPy has no loops for it."""

    def formula(target: Array, *arguments: Array) -> None:
        if operation.endswith("_backward"):
            dy, y = arguments
            if operation == "softmax_backward":
                np.multiply(y, dy - (y * dy).sum(axis=axis, keepdims=True), out=target)
            else:
                np.subtract(dy, np.exp(y) * dy.sum(axis=axis, keepdims=True), out=target)
            return
        (x,) = arguments
        np.subtract(x, x.max(axis=axis, keepdims=True), out=target)
        if operation == "softmax":
            np.exp(target, out=target)
            target /= target.sum(axis=axis, keepdims=True)
        else:
            target -= np.log(np.exp(target).sum(axis=axis, keepdims=True))

    def widened() -> None:
        wide = np.empty(out.shape, np.float32)
        formula(wide, *(a.astype(np.float32) for a in inputs))
        out[...] = wide

    return widened if out.dtype == ml_dtypes.bfloat16 else lambda: formula(out, *inputs)


def problems(quick: bool) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Every operation, dtype, shape and axis of a run."""
    for operation in OPERATIONS:
        for dtype in DTYPES:
            for shape, axis in QUICK_SHAPES if quick else SHAPES:
                yield operation, dtype, shape, axis


# --- the machine -----------------------------------------------------------------------------------------------------
def cpu_model() -> str:
    """The processor's name as the system tells it."""
    try:
        if sys.platform == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except (OSError, subprocess.SubprocessError):
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def machine(torch: Any) -> dict[str, Any]:
    """What a result has to be read with."""
    import numba

    return {
        "recorded": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": isograd.get_num_threads(),
        "system": platform.platform(terse=True),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "isograd": isograd.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "torch": None if torch is None else str(torch.__version__),
    }


def file_stem(model: str) -> str:
    """The name of the result files: cpu-<model>."""
    words = re.sub(r"\((r|tm|c)\)|\bcpu\b|@.*$|\bprocessor\b", " ", model.lower())
    return "cpu-" + re.sub(r"[^a-z0-9]+", "-", words).strip("-")
