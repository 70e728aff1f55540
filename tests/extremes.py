"""Inputs at the ends of the range for every operation that `isograd verify` knows, and how its bound holds for them."""

import functools
import itertools
from dataclasses import replace

import numpy as np

from isograd.cli.check import Runner, as_results, worst_error
from isograd.cli.devices import DEVICES
from isograd.cli.suites import SUITES
from isograd.core.cases import Case, store
from isograd.core.registry import kernels
from isograd.errors import UnsupportedError
from isograd.losses import cross_entropy_reference
from isograd.runtime.fenv import default_environment

LARGEST = 4000  # elements of an input
_LIMITS = {"float16": (-24, 15), "bfloat16": (-133, 127), "float32": (-149, 127), "float64": (-1074, 1023)}
REGIMES = ("ordinary", "subnormal", "tiny", "large", "spread", "mixed", "zeros")


def drawn(rng, shape, dtype, regime):
    """Values of a regime, float64 rounded to a dtype."""
    low, high = _LIMITS[dtype]
    x = rng.standard_normal(shape)
    match regime:
        case "subnormal":
            x = np.ldexp(rng.integers(-5, 6, shape) * 1.0, low + int(rng.integers(0, 6)))
        case "tiny":
            x = np.ldexp(x, low + int(rng.integers(0, 40)))
        case "large":
            x = np.ldexp(np.clip(x, -1.9, 1.9), high - int(rng.integers(0, 3)))
        case "spread":
            x = np.ldexp(np.clip(x, -1.9, 1.9), rng.integers(low, high + 1, shape))
        case "mixed":
            x = np.where(rng.random(shape) < 0.3, np.ldexp(x, rng.integers(low, high + 1, shape)), x)
        case "zeros":
            x = np.where(rng.random(shape) < 0.8, np.copysign(0.0, x), x)
    return store(np.asarray(np.clip(x, -1.9 * 2.0**high, 1.9 * 2.0**high)), dtype)


# Inputs that are something else than any number: they stay, or are made from the others.
_KEPT = {"targets", "experts", "order", "indices", "state", "mask", "q_segment_ids", "k_segment_ids"}
_KEPT |= {"cu_seqlens_q", "cu_seqlens_k"}

# Options, each from where it hardly matters to where the work type hardly holds it.
_OPTIONS = {
    "label_smoothing": (0.0, 1e-44, 4e-38, 1e-310, 0.1, 1.0),
    "z_loss": (0.0, 1e-44, 1e-38, 1e-310, 1e-3, 1e30),
    "temperature": (2.0**-60, 1e-10, 0.1, 1.0, 3.0, 1e9, 2.0**60),
    "tau": (2.0**-60, 1e-10, 0.1, 1.0, 3.0, 1e9, 2.0**60),
    "scale": (1.0, 0.3, 1e-44, 1e-38, 1e30),
}


def _with_options(rng, operation, options):
    changed = dict(options)
    for name, values in _OPTIONS.items():
        if name in options or (name in ("label_smoothing", "z_loss") and "cross_entropy" in operation):
            changed[name] = values[rng.integers(len(values))]
    if "options" in options:
        numbers = {"scale": (None, 0.3, 1e-38, 1e4), "softcap": (0.0, 1e-37, 1.5, 1e30)}
        chosen = {name: values[rng.integers(len(values))] for name, values in numbers.items()}
        changed["options"] = replace(options["options"], **chosen)
    return changed


def extreme(rng, operation, case, dtype):
    """The case with other values in about half of its inputs, and with other options."""
    inputs = {}
    for name, array in case.inputs.items():
        named_teacher = name == "teacher" and "indices" in case.inputs
        kept = name in _KEPT or array.dtype.kind in "iub" or named_teacher
        regime = REGIMES[rng.integers(len(REGIMES))] if rng.random() < 0.6 else None
        inputs[name] = array if kept or regime is None else drawn(rng, array.shape, array.dtype.name, regime)
    options = _with_options(rng, operation, case.options)
    _renewed_state(inputs, options)
    return Case(case.name, inputs, options)


def zeros(seed, operation, dtype):
    """A small case whose numbers are zeros of both signs for the most part."""
    rng = np.random.default_rng(seed)
    listed = small_cases(operation, dtype, 6)
    case = listed[seed % len(listed)]
    inputs = dict(case.inputs)
    for name, array in case.inputs.items():
        if name not in _KEPT and array.dtype.kind not in "iub":
            ones = rng.choice([0.0, -0.0, 0.0, -0.0, 1.0, -1.0], array.shape)
            inputs[name] = store(np.asarray(ones), array.dtype.name)
    _renewed_state(inputs, case.options)
    return Case(case.name, inputs, case.options)


def _renewed_state(inputs, options):
    """The state of rows that belongs to changed inputs of cross entropy's gradient."""
    if "state" in inputs:
        forward = {name: a for name, a in inputs.items() if name not in ("state", "dlosses")}
        with np.errstate(all="ignore"):
            inputs["state"] = cross_entropy_reference.cross_entropy(**forward, **options)[1]


@functools.lru_cache(maxsize=256)
def small_cases(operation, dtype, count):
    """The first cases of an operation that are small."""
    limit = 60_000 if operation.startswith("attention") else LARGEST
    with default_environment():
        fitting = (c for c in SUITES[operation].cases(dtype) if max(a.size for a in c.inputs.values()) <= limit)
        return list(itertools.islice(fitting, count))


def entries(operation, dtype):
    """The kernels of the CPU."""
    return [e for e in kernels() if (e.operation, e.device, e.dtype) == (operation, "cpu", dtype)]


def ratios(entry, seeds, count=100):
    """(seed, case, error as a fraction of its bound) of extreme cases."""
    suite = SUITES[entry.operation]
    run = Runner(suite, entry, DEVICES["cpu"])
    listed = small_cases(entry.operation, entry.dtype, count)
    for seed in seeds:
        rng = np.random.default_rng([seed, len(entry.operation)])
        case = extreme(rng, entry.operation, listed[seed % len(listed)], entry.dtype)
        try:
            bound = run.plan(case).precision_guarantee.error_bound
        except UnsupportedError:
            continue
        got = run(case)
        with np.errstate(all="ignore"):
            expected = as_results(suite.oracle(**case.inputs, **case.options))
            bounds = as_results(bound(**case.inputs, **case.options))
        both = zip(got, expected, bounds, strict=True)
        yield seed, case, max((worst_error(*each) for each in both if each[1] is not None), default=0.0)
