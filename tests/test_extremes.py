"""Bounds hold, and bits are the reference's, for inputs at the ends of the range: see `extremes.py`."""

import numpy as np
import pytest
from choices import exhaustive, thorough
from extremes import entries, ratios, zeros

from isograd.cli.check import Runner, reference_results
from isograd.cli.devices import DEVICES
from isograd.cli.suites import SUITES
from isograd.core.cases import Case
from isograd.errors import UnsupportedError

FLOATS = {name: suite for name, suite in SUITES.items() if set(suite.dtypes) >= {"float32", "bfloat16"}}
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float32", thorough("float16"), thorough("float64")])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@each_dtype
@pytest.mark.parametrize(
    "seeds", [range(2), thorough(range(2, 16)), exhaustive(range(16, 1200))], ids=["few", "more", "many"]
)
@pytest.mark.parametrize("operation", FLOATS)
def test_bounds_hold(operation, seeds, dtype):
    for entry in entries(operation, dtype):
        broken = [
            (entry.kernel.name, seed, case.name, ratio) for seed, case, ratio in ratios(entry, seeds) if ratio > 1
        ]
        assert broken == []


def layouts(array):
    """The array in C and Fortran order, with gaps, and backwards."""
    gaps = np.empty([2 * n for n in array.shape], array.dtype)[(..., *[slice(None, None, 2)] * array.ndim)]
    gaps[...] = array
    back = (slice(None, None, -1),) * array.ndim
    return array, np.array(array, order="F"), gaps, np.array(array[back], order="C")[back] if array.ndim else array


@each_dtype
@pytest.mark.parametrize("seeds", [range(3), thorough(range(3, 6))], ids=["few", "more"])
@pytest.mark.parametrize("operation", [name for name in FLOATS if SUITES[name].reference is not None])
def test_zeros_of_both_signs_in_every_layout(operation, seeds, dtype):
    suite = SUITES[operation]
    for entry in entries(operation, dtype):
        run = Runner(suite, entry, DEVICES["cpu"])
        for seed in seeds:
            case = zeros(seed, operation, dtype)
            expected = None
            try:
                guarantee = run.plan(case).precision_guarantee
            except UnsupportedError:
                continue
            if guarantee.bit_stable_across_hardware:
                expected = [a.tobytes() for a in reference_results(suite, case)]
            for number in range(4):
                inputs = {name: layouts(array)[number] for name, array in case.inputs.items()}
                found = [a.tobytes() for a in run(Case(case.name, inputs, case.options))]
                expected = expected or found
                assert found == expected, (entry.kernel.name, seed, case.name, number)
