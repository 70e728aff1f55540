"""The kernels of GradientSum: the reference's bits on the CPU and in Triton's interpreter, bounds, code for GPUs."""

import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

sys.path.insert(0, str(Path(__file__).parent))
from gradients import DTYPES, SETTINGS, as_torch, gradient, totals  # noqa: E402

import isograd  # noqa: E402
from isograd.core import arrays  # noqa: E402
from isograd.torch.distributed import kernels, reference  # noqa: E402

SCRIPT = Path(__file__).parent / "interpreted_sums.py"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_reference(dtype: str, threads: int, restore_threads: Any) -> None:
    isograd.set_num_threads(threads)
    for i, (quantum, limit) in enumerate(SETTINGS):
        for n in (0, 1, 4097, 100_003):
            total, peaks = torch.full((n,), 7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
            right, peak = np.zeros(n, np.int64), 0
            for unit in range(3):
                g = gradient(dtype, n, 3 * i + unit, special=unit == 1)
                kernels.accumulate(as_torch(g), total, peaks, 1, quantum, limit, unit == 0)
                found = reference.quanta(g, quantum, limit)
                right, peak = right + found.units, max(peak, found.peak)
            assert (total.numpy() == right).all(), (quantum, n)
            assert peaks.tolist() == [0, peak, 0]
            for units in (1, 3, (1 << 24) + 1):
                whole = totals(n)
                y = torch.full((n,), 7, dtype=getattr(torch, dtype))
                kernels.mean(torch.from_numpy(whole), torch.tensor([units, 0, 5]), y, quantum)
                assert arrays.numpy_view(y).tobytes() == reference.mean(whole, units, quantum, DTYPES[dtype]).tobytes()
                kernels.mean(torch.from_numpy(whole), torch.tensor([units, 1, 5]), y, quantum)
                assert arrays.numpy_view(y).tobytes() == np.full(n, np.nan, DTYPES[dtype]).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_rounded_one_by_one(dtype: str) -> None:
    for i, (quantum, limit) in enumerate(SETTINGS):
        for n in (1, 4097, 100_003):
            parts = [gradient(dtype, n, 3 * i + rank, special=rank == 1) for rank in range(3)]
            found = [reference.quanta(g, quantum, limit) for g in parts]
            right, peak = sum(f.units for f in found), max(f.peak for f in found)
            rows = torch.stack([as_torch(g) for g in parts])
            total, peaks = torch.full((n,), 7, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
            kernels.accumulate(rows, total, peaks, 1, quantum, limit, True)
            assert (total.numpy() == right).all()
            assert peaks.tolist() == [0, peak, 0]
            wide = torch.stack([as_torch(g) for g in parts], 1).T.contiguous()  # rows that something follows
            wide = torch.cat([wide, torch.ones_like(wide)], 1)
            kernels.accumulate(wide[:, :n], total, peaks, 1, quantum, limit, False)
            assert (total.numpy() == 2 * right).all()
            for header in ([3, 0, 0], [3, 1, 0]):
                y, z = (torch.full((n,), 7, dtype=rows.dtype) for _ in range(2))
                kernels.mean_of_parts(rows, torch.tensor(header), y, quantum, limit)
                kernels.mean(torch.from_numpy(right), torch.tensor(header), z, quantum)
                assert arrays.numpy_view(y).tobytes() == arrays.numpy_view(z).tobytes()
            y, peaks = torch.full((n,), 7, dtype=rows.dtype), torch.zeros(3, dtype=torch.int64)
            kernels.keep(rows[1], y, peaks, 2)
            assert arrays.numpy_view(y).tobytes() == parts[1].tobytes()
            assert peaks.tolist() == [0, 0, found[1].peak]


def test_rounding_is_to_nearest_with_ties_to_even() -> None:
    q = 2.0**-48
    g = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.75, -0.25, 3.0], np.float32) * np.float32(q)
    units, peak = reference.quanta(g, -48, 14)
    assert units.tolist() == [0, 2, 2, 0, -2, -2, 1, 0, 3]
    assert reference.magnitude(peak, g.dtype) == 3 * q


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantum", [-48, -40, -30])
def test_error_bound(dtype: str, quantum: int) -> None:
    random = np.random.default_rng(-quantum)
    u = 2.0**-53 if dtype == "float64" else 2.0**-24
    for units in (1, 3, 1000):
        g = (random.standard_normal((units, 60)) * 10.0 ** random.integers(-9, 0, 60)).astype(DTYPES[dtype])
        got = reference.gradient_sum(list(g), quantum)
        for j in range(60):
            exact = sum((Fraction(float(x)) for x in g[:, j]), Fraction(0)) / units
            half_ulp = float(np.spacing(np.abs(got[j]))) / 2 if g.dtype.itemsize == 2 else 0.0
            bound = 2.0 ** (quantum - 1) + 2.1 * u * abs(float(exact)) + half_ulp * (1 + 2.0**-10)
            assert abs(float(Fraction(float(got[j])) - exact)) <= bound


@pytest.mark.parametrize(("worst", "fits"), [(2.0**13 - 1, True), (2.0**13, False), (np.inf, False), (np.nan, False)])
def test_range_is_judged_by_the_largest_of_all_units(worst: float, fits: bool) -> None:
    units = [np.array([1.0, -worst], np.float32), np.array([1.0, 0.0], np.float32)]
    assert bool(np.isfinite(reference.gradient_sum(units)).all()) is fits


def test_interpreter_returns_the_bits_of_the_reference(interpret: Any) -> None:
    pytest.importorskip("triton", reason="needs triton")
    found, which = interpret(SCRIPT, "accumulate", "mean", "parts", exhaustive=False)
    assert found == {"accumulate": (64, 0), "mean": (64, 0), "parts": (80, 0)}, which


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_compiles_for_gpus(target: str) -> None:
    pytest.importorskip("triton", reason="needs triton")
    import triton_targets

    from isograd.torch.distributed import triton_launch

    total, peaks, header = (torch.zeros(n, dtype=torch.int64) for n in (5000, 4, 3))
    for name in DTYPES:
        g = torch.zeros(5000, dtype=getattr(torch, name))

        def every(g: torch.Tensor = g) -> None:
            triton_launch.accumulate(g, total, peaks, 1, -48, 14, False)
            triton_launch.mean(total, header, g, -48)
            triton_launch.keep(g, g, peaks, 1)
            triton_launch.mean_of_parts(g.view(2, 2500), header, g[:2500], -48, 14)

        found = triton_targets.kernels_of(target, every, triton_launch)
        assert set(found) == {"accumulate", "mean", "keep", "mean_of_parts"}
        for compiled in found.values():
            need = triton_targets.resources(compiled)
            assert need["stack"] <= 64
            assert need["registers"] <= 128


def test_sizes_of_parameters_compile_few_kernels() -> None:
    """One for multiples of 16, which loads wide words, one for other numbers, and one for a single element."""
    pytest.importorskip("triton", reason="needs triton")
    import triton_variants

    from isograd.torch.distributed import triton_launch

    total, peaks, header = (torch.zeros(n, dtype=torch.int64) for n in (1 << 16, 4, 3))
    with triton_variants.watched() as variants:
        for i, n in enumerate((1, 2, 3, 16, 100, 1024, 4096, 1 << 16)):
            g = torch.zeros(n)
            triton_launch.accumulate(g, total[:n], peaks, i % 4, -48, 14, False)
            triton_launch.mean(total[:n], header, g, -48)
            triton_launch.keep(g, torch.zeros(n), peaks, i % 4)
            triton_launch.mean_of_parts(torch.zeros(2, 16 * n), header, g, -48, 14)
    three = dict.fromkeys(("accumulate", "mean", "keep", "mean_of_parts"), 3)
    assert {name: len(found) for name, found in variants.items()} == three
