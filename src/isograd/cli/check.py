"""The checks behind `isograd verify`: error against the promised bound, invariances, digests. No output here."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isograd.cli.devices import DEVICES, Device
from isograd.cli.suites import SUITES
from isograd.core.arrays import numpy_dtype
from isograd.core.cases import Array, Arrays, Case, Change, Suite
from isograd.core.descriptor import PrecisionGuarantee
from isograd.core.registry import Entry
from isograd.errors import UnsupportedError
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment

# What must not change a bit, and the promise of a plan that says so.
INVARIANCES = {
    "threads": "deterministic",
    "batch": "batch_invariant",
    "order": "order_invariant",
    "layout": "batch_invariant",
    "padding": "batch_invariant",
}
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
    unpromised_checked: int = 0
    unpromised_equal: int = 0
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


def results_digest(results: Arrays) -> str:
    """The digest of the result, or one over the digests of several."""
    digests = [digest(array) for array in results]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def as_results(value: Any) -> Arrays:
    """What an operation's reference returns, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def reference_results(suite: Suite, case: Case) -> Arrays | None:
    """The promised bits of a case, or None where no kernel promises any."""
    results = None if suite.reference is None else suite.reference(**case.inputs, **case.options)
    return None if results is None else as_results(results)


class Runner:
    """Computes an operation with one certain kernel."""

    def __init__(self, suite: Suite, entry: Entry, device: Device) -> None:
        self._suite, self._entry, self._device = suite, entry, device

    def plan(self, case: Case) -> Any:
        """The kernel's plan for a case; UnsupportedError if it does not serve it."""
        descriptor = self._suite.descriptor(case, self._entry.dtype)
        return self._suite.plan.select(descriptor, self._entry.device, self._entry.kernel.name)

    def __call__(self, case: Case) -> Arrays:
        """The results as NumPy arrays, each laid out like the last input of its shape."""
        plan = self.plan(case)
        outputs = {}
        for operand in plan.descriptor.operands():
            if operand.output:
                alike = [a for a in case.inputs.values() if a.shape == operand.shape]
                like = np.empty_like(alike[-1] if alike else np.empty(operand.shape), numpy_dtype(operand.dtype))
                outputs[operand.name] = self._device.empty(like)
        plan.run(**{name: self._device.send(array) for name, array in case.inputs.items()}, **outputs)
        return tuple(self._device.receive(out) for out in outputs.values())


def _same(a: Arrays, b: Arrays) -> bool:
    return len(a) == len(b) and all(
        p.shape == q.shape and np.ascontiguousarray(p).tobytes() == np.ascontiguousarray(q).tobytes()
        for p, q in zip(a, b, strict=True)
    )


def worst_error(got: Array, expected: Array, bound: Array) -> float:
    """The largest error as a fraction of its bound; infinite where a special value is wrong."""
    with np.errstate(all="ignore"):
        wide = got.astype(np.longdouble)
        ratio = np.abs(wide - expected) / bound
        ratio = np.where((wide == expected) | (np.isnan(wide) & np.isnan(expected)), 0, ratio)
        # An infinite bound says that an intermediate result overflows and nothing is promised.
        ratio = np.where(np.isposinf(bound), 0, ratio)
        return float(np.max(np.where(np.isnan(ratio), np.inf, ratio), initial=0))


def _held_with_threads(run: Runner, case: Case, base: Arrays) -> bool:
    before = parallel.get_num_threads()
    try:
        for threads in (1, 2):
            parallel.set_num_threads(threads)
            if not _same(run(case), base):
                return False
    finally:
        parallel.set_num_threads(before)
    return True


def _held_under(changes: Iterable[Any], run: Runner, base: Arrays) -> bool:
    return all(_same(c.seen(run(c.case)), c.expected(base)) for c in (Change(*change) for change in changes))


def _check_invariances(
    report: Report, suite: Suite, run: Runner, case: Case, base: Arrays, g: PrecisionGuarantee
) -> None:
    checks: dict[str, Callable[[], bool]] = {"threads": lambda: _held_with_threads(run, case, base)}
    for name, changes in suite.changes.items():
        checks[name] = functools.partial(lambda make: _held_under(make(case), run, base), changes)
    for name, check in checks.items():
        if not getattr(g, INVARIANCES[name]):
            continue
        try:
            held = check()
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


def _check_error(report: Report, suite: Suite, case: Case, got: Arrays, g: PrecisionGuarantee) -> None:
    if report.dtype == "float64" and not WIDE_ORACLE:
        return
    with default_environment():
        expected = as_results(suite.oracle(**case.inputs, **case.options))
        bounds = as_results(g.error_bound(**case.inputs, **case.options))
        errors = [worst_error(*each) for each in zip(got, expected, bounds, strict=True) if each[1] is not None]
    error = max(errors, default=0.0)
    if report.worst is None or error > report.worst:
        report.worst, report.worst_case = error, case.name
    if error > 1:
        size = "a wrong special value (NaN or infinity)" if math.isinf(error) else f"{error:.3g} times the bound"
        report.fail(case.name, "error bound", f"the error is {size}; promised: {g.error_bound.formula}")


def _check_digest(report: Report, case: Case, got: Arrays, known: Mapping[str, str], promised: bool) -> None:
    """Compare a digest with the published one; where equal bits are not promised, count alone."""
    value = results_digest(got)
    if not promised:
        report.unpromised_checked += case.name in known
        report.unpromised_equal += known.get(case.name) == value
        return
    report.sha256[case.name] = value
    report.digests_checked += 1
    if known.get(case.name) == value:
        report.digests_equal += 1
    else:
        report.fail(case.name, "digest", f"SHA-256 is {value}; published: {known.get(case.name, 'none')}")


def _check_case(report: Report, suite: Suite, run: Runner, case: Case, known: Mapping[str, str]) -> None:
    guarantee = run.plan(case).precision_guarantee
    report.cases += 1
    got = run(case)
    _check_error(report, suite, case, got, guarantee)
    _check_invariances(report, suite, run, case, got, guarantee)
    _check_digest(report, case, got, known, guarantee.bit_stable_across_hardware)


def verify_kernel(
    entry: Entry,
    cases: list[Case],
    digests: Mapping[str, Any],
    step: Callable[[str], None] = lambda _: None,
    reports: list[Report] | None = None,
) -> Report:
    """Run every check on one registered kernel. `step` is called with a case's name before it is computed.

    reports: where the report is put before the first case, so that an interrupt leaves what was found by then.
    """
    suite = SUITES[entry.operation]
    report = Report(entry.operation, entry.dtype, entry.device, entry.kernel.name)
    if reports is not None:
        reports.append(report)
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
