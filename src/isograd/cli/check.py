"""The checks behind `isograd verify`: error against the promised bound, invariances, digests. No output here."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd import parallel
from isograd.cli.cases import SUITES, Case, Suite
from isograd.cli.devices import DEVICES, Device
from isograd.errors import UnsupportedError
from isograd.fenv import default_environment
from isograd.numerics import random
from isograd.plan import PrecisionGuarantee
from isograd.registry import Entry

Array = NDArray[Any]

# What must not change a bit, and the promise of a plan that says so.
INVARIANCES = {
    "threads": "deterministic",
    "batch": "batch_invariant",
    "order": "order_invariant",
    "layout": "batch_invariant",
    "padding": "batch_invariant",
}
_SINGLE_ROWS = 64  # rows of a case that are computed one by one
# Where longdouble is binary64 the oracle is no more exact than a float64 result; the digests still cover those.
WIDE_ORACLE = np.finfo(np.longdouble).nmant > np.finfo(np.float64).nmant


@dataclass
class Failure:
    """One thing that is not as promised. check: "error bound", "digest", "inputs", "run" or an invariance."""

    case: str
    check: str
    message: str


@dataclass
class Report:
    """What verify found out about one registered kernel."""

    operation: str
    dtype: str
    device: str
    kernel: str
    cases: int = 0
    skipped: int = 0
    worst: float | None = None
    worst_case: str = ""
    invariances: dict[str, bool] = field(default_factory=dict)
    digests_checked: int = 0
    digests_equal: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def fail(self, case: str, check: str, message: str) -> None:
        """Record a failure."""
        self.failures.append(Failure(case, check, message))

    @property
    def bound_kept(self) -> bool:
        """Whether every error was within its bound."""
        return all(f.check != "error bound" for f in self.failures)


def digest(array: Array) -> str:
    """SHA-256 of the elements in C order, little-endian."""
    contiguous = np.ascontiguousarray(array)
    little = contiguous.view(np.dtype(f"u{contiguous.itemsize}")).astype(f"<u{contiguous.itemsize}", copy=False)
    return hashlib.sha256(little.tobytes()).hexdigest()


def inputs_digest(cases: list[Case]) -> str:
    """One SHA-256 over the inputs of several cases; tells a wrong result from wrong inputs."""
    parts = [digest(array) for case in cases for array in case.inputs.values()]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def published() -> Any:
    """The digests that ship with the package."""
    return json.loads((importlib.resources.files("isograd.cli") / "digests.json").read_text("utf-8"))


class Runner:
    """Computes an operation with one certain kernel."""

    def __init__(self, suite: Suite, entry: Entry, device: Device) -> None:
        self._suite, self._entry, self._device = suite, entry, device

    def plan(self, shape: tuple[int, ...], axis: int) -> Any:
        """The kernel's plan for a shape; UnsupportedError if it does not serve it."""
        descriptor = self._suite.descriptor(shape, self._entry.dtype, axis)
        return self._suite.plan.select(descriptor, self._entry.device, self._entry.kernel.name)

    def __call__(self, inputs: Mapping[str, Array], axis: int) -> Array:
        """The result as a NumPy array, laid out like the last input."""
        *_, like = inputs.values()
        plan = self.plan(like.shape, axis)
        out = self._device.empty(like)
        arguments = {name: self._device.send(array) for name, array in inputs.items()}
        plan.run(**arguments, **{plan.descriptor.output: out})
        return self._device.receive(out)


def _same(a: Array, b: Array) -> bool:
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _each(inputs: Mapping[str, Array], change: Callable[[Array], Array]) -> dict[str, Array]:
    return {name: change(array) for name, array in inputs.items()}


def worst_error(got: Array, expected: Array, bound: Array) -> float:
    """The largest error as a fraction of its bound; infinite where a special value is wrong."""
    with np.errstate(all="ignore"):
        wide = got.astype(np.longdouble)
        ratio = np.abs(wide - expected) / bound
        ratio = np.where((wide == expected) | (np.isnan(wide) & np.isnan(expected)), 0, ratio)
        # An infinite bound says that an intermediate result overflows and nothing is promised.
        ratio = np.where(np.isposinf(bound), 0, ratio)
        return float(np.max(np.where(np.isnan(ratio), np.inf, ratio), initial=0))


# --- invariances: each yields pairs of arrays that must have the same bits -------------------------------------------
def _threads(run: Runner, case: Case, base: Array) -> Iterator[tuple[Array, Array]]:
    before = parallel.get_num_threads()
    try:
        for threads in (1, 2):
            parallel.set_num_threads(threads)
            yield run(case.inputs, case.axis), base
    finally:
        parallel.set_num_threads(before)


def _batch(run: Runner, case: Case, base: Array) -> Iterator[tuple[Array, Array]]:
    """Rows one by one, then the largest other dimension cut in two at several places."""
    axis = case.axis % base.ndim
    moved = _each(case.inputs, lambda a: np.moveaxis(a, axis, -1))
    result = np.moveaxis(base, axis, -1)
    for _, index in zip(range(_SINGLE_ROWS), np.ndindex(result.shape[:-1]), strict=False):
        yield run({name: a[index] for name, a in moved.items()}, -1), result[index]
    if base.ndim == 1:
        return
    cut = int(np.argmax(result.shape[:-1]))
    size = result.shape[cut]
    for first in sorted({1, size // 3, size // 2} - {0, size}):
        for part in (slice(first), slice(first, None)):
            index = (slice(None),) * cut + (part,)
            yield run({name: a[index] for name, a in moved.items()}, -1), result[index]


def _order(run: Runner, case: Case, base: Array) -> Iterator[tuple[Array, Array]]:
    """The elements of each row shuffled and reversed, the result put back."""
    length = base.shape[case.axis]
    for order in (random.permutation(length, seed=length), np.arange(length)[::-1]):
        shuffled = {name: np.take(a, order, case.axis) for name, a in case.inputs.items()}
        yield run(shuffled, case.axis), np.take(base, order, case.axis)


def _layout(run: Runner, case: Case, base: Array) -> Iterator[tuple[Array, Array]]:
    """The same values with the reduced axis innermost, outermost, and in reversed memory."""
    axis = case.axis

    def innermost(a: Array) -> Array:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, axis, -1)), -1, axis)

    def outermost(a: Array) -> Array:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, axis, 0)), 0, axis)

    def backwards(a: Array) -> Array:
        step = (slice(None, None, -1),) * a.ndim
        return np.ascontiguousarray(a[step])[step]

    for change in (innermost, outermost, backwards):
        yield run(_each(case.inputs, change), axis), base


def _padding(run: Runner, case: Case, base: Array, fills: Mapping[str, float]) -> Iterator[tuple[Array, Array]]:
    shape = list(base.shape)
    shape[case.axis] = 37
    padded = {
        name: np.concatenate([a, np.full(shape, fills[name], a.dtype)], axis=case.axis)
        for name, a in case.inputs.items()
    }
    length = base.shape[case.axis]
    yield np.take(run(padded, case.axis), range(length), case.axis), base


def _check_invariances(
    report: Report, suite: Suite, run: Runner, case: Case, base: Array, g: PrecisionGuarantee
) -> None:
    checks: dict[str, Callable[[], Iterator[tuple[Array, Array]]]] = {
        "threads": lambda: _threads(run, case, base),
        "batch": lambda: _batch(run, case, base),
        "order": lambda: _order(run, case, base),
        "layout": lambda: _layout(run, case, base),
    }
    if suite.padding:
        checks["padding"] = lambda: _padding(run, case, base, suite.padding)
    for name, pairs in checks.items():
        if not getattr(g, INVARIANCES[name]):
            continue
        try:
            held = all(_same(a, b) for a, b in pairs())
        except UnsupportedError:  # another shape or layout is outside what this kernel takes
            continue
        report.invariances[name] = report.invariances.get(name, True) and held
        if not held:
            report.fail(case.name, name, _MEANING[name])


_MEANING = {
    "threads": "the bits change from run to run or with the number of threads",
    "batch": "the bits of a row change with the rows computed beside it",
    "order": "the bits change with the order of the elements of a row",
    "layout": "the bits change with the layout in memory",
    "padding": "the bits change when the row is padded",
}


def _check_error(report: Report, suite: Suite, case: Case, got: Array, g: PrecisionGuarantee) -> None:
    if report.dtype == "float64" and not WIDE_ORACLE:
        return
    with default_environment():
        expected = suite.oracle(**case.inputs, axis=case.axis)
        bound = g.error_bound(**case.inputs, axis=case.axis)
        error = worst_error(got, expected, bound)
    if report.worst is None or error > report.worst:
        report.worst, report.worst_case = error, case.name
    if error > 1:
        size = "a wrong special value (NaN or infinity)" if math.isinf(error) else f"{error:.3g} times the bound"
        report.fail(case.name, "error bound", f"the error is {size}; promised: {g.error_bound.formula}")


def _check_digest(report: Report, case: Case, got: Array, known: Mapping[str, str]) -> None:
    value = digest(got)
    report.sha256[case.name] = value
    report.digests_checked += 1
    if known.get(case.name) == value:
        report.digests_equal += 1
    else:
        report.fail(case.name, "digest", f"SHA-256 is {value}; published: {known.get(case.name, 'none')}")


def _check_case(report: Report, suite: Suite, run: Runner, case: Case, known: Mapping[str, str]) -> None:
    *_, like = case.inputs.values()
    guarantee = run.plan(like.shape, case.axis).precision_guarantee
    report.cases += 1
    got = run(case.inputs, case.axis)
    _check_error(report, suite, case, got, guarantee)
    _check_invariances(report, suite, run, case, got, guarantee)
    if guarantee.bit_stable_across_hardware:
        _check_digest(report, case, got, known)


def verify_kernel(
    entry: Entry, cases: list[Case], digests: Mapping[str, Any], step: Callable[[str], None] = lambda _: None
) -> Report:
    """Run every check on one registered kernel. `step` is called with a case's name before it is computed."""
    suite = SUITES[entry.operation]
    report = Report(entry.operation, entry.dtype, entry.device, entry.kernel.name)
    run = Runner(suite, entry, DEVICES[entry.device])
    known = digests["results"].get(entry.operation, {}).get(entry.dtype, {})
    if inputs_digest(cases) != digests["inputs"].get(entry.operation, {}).get(entry.dtype):
        report.fail("all", "inputs", "this machine generates other inputs than the published ones")
    for case in cases:
        step(case.name)
        try:
            _check_case(report, suite, run, case, known)
        except UnsupportedError:
            report.skipped += 1
        except Exception as error:
            # The other kernels are worth checking all the same; this one would go on failing.
            report.fail(case.name, "run", f"{type(error).__name__}: {error}")
            break
    return report
