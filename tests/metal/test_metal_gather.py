"""take_along_axis and its gradient in Metal, in the emulator: the bits of the reference under several schedules."""

from typing import Any

import numpy as np
import pytest
import torch
from emulated import needed_barriers, run
from emulator import FLUSHES, SCHEDULES, EmulatorError, Library, needs_compiler, without_barrier
from problems import DTYPES, array, same_bits, stored, tensor

import isograd
from isograd.cli.suites.gather import SUITES
from isograd.devices import metal
from isograd.errors import IndexOutOfRangeError
from isograd.gather import reference
from isograd.gather.metal import OPERATIONS, MetalGather
from isograd.gather.plans import TakeAlongAxisBackwardDescriptor, TakeAlongAxisDescriptor

pytestmark = needs_compiler
KERNEL = MetalGather()


def _taken(
    x: torch.Tensor, indices: torch.Tensor, axis: int, seed: int, toward_zero: bool = False
) -> np.ndarray[Any, Any]:
    dtype, index_dtype = (str(t.dtype).removeprefix("torch.") for t in (x, indices))
    descriptor = TakeAlongAxisDescriptor(tuple(x.shape), tuple(indices.shape), dtype, index_dtype, axis)
    v = torch.empty(indices.shape, dtype=x.dtype)
    run(KERNEL, descriptor, seed, FLUSHES, toward_zero=toward_zero, x=x, indices=indices, v=v)
    return array(v)


def _summed(
    shape: tuple[int, ...],
    indices: torch.Tensor,
    dv: torch.Tensor,
    axis: int,
    seed: int,
    compiled: Library | None = None,
    toward_zero: bool = False,
) -> Any:
    dtype, index_dtype = (str(t.dtype).removeprefix("torch.") for t in (dv, indices))
    descriptor = TakeAlongAxisBackwardDescriptor(shape, tuple(indices.shape), dtype, index_dtype, axis)
    dx = torch.empty(shape, dtype=dv.dtype)
    run(KERNEL, descriptor, seed, FLUSHES, compiled, toward_zero, indices=indices, dv=dv, dx=dx)
    return array(dx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bits_of_every_case_that_verify_has(operation: str, dtype: str) -> None:
    suite = SUITES[operation]
    for case in suite.cases(dtype):
        options = {name: value for name, value in case.options.items() if name != "unique_indices"}
        expected = suite.reference(**case.inputs, **options)
        given = {name: tensor(a) for name, a in case.inputs.items()}
        for seed in SCHEDULES:
            # Whatever the rounding mode: that is why these bits are promised on all hardware.
            modes = {"axis": case.options["axis"], "seed": seed, "toward_zero": FLUSHES and seed > 1}
            if operation == "take_along_axis":
                got = _taken(**given, **modes)
            else:
                got = _summed(expected.shape, **given, **modes)
            assert same_bits(got, np.ascontiguousarray(expected)), (case.name, seed)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 255, 256, 257, 8191])
def test_lengths(n: int) -> None:
    rng = np.random.default_rng(n)
    x, dv = stored(rng.standard_normal((2, n)), "bfloat16"), stored(rng.standard_normal((2, 300)), "bfloat16")
    indices = rng.integers(0, n, (2, 300))
    for seed in SCHEDULES:
        got = _taken(tensor(x), tensor(indices), -1, seed)
        assert same_bits(got, reference.take_along_axis(x, indices))
        got = _summed((2, n), tensor(indices), tensor(dv), -1, seed)
        assert same_bits(got, reference.take_along_axis_backward(dv, indices, (2, n)))


def test_40_000_destinations_and_many_lines() -> None:
    rng = np.random.default_rng(1)
    for n, k, lines in ((40_000, 50, 1), (3, 2, 70_000)):
        indices, dv = rng.integers(0, n, (lines, k)), rng.standard_normal((lines, k)).astype(np.float32)
        got = _summed((lines, n), tensor(indices), tensor(dv), 1, 2)
        some = np.unique(np.r_[:100, max(lines - 100, 0) : lines, lines // 2]) if lines > 200 else np.arange(lines)
        expected = reference.take_along_axis_backward(dv[some], indices[some], (len(some), n))
        assert same_bits(got[some], expected)
        x = rng.standard_normal((lines, n)).astype(np.float32)
        assert same_bits(_taken(tensor(x), tensor(indices), 1, 1), reference.take_along_axis(x, indices))


def test_strided_and_expanded_operands() -> None:
    rng = np.random.default_rng(2)
    x, indices = rng.standard_normal((9, 12, 10)).astype(np.float16), rng.integers(-9, 9, (6, 1, 5))
    view, wide = tensor(x)[:, ::2, 1::2], tensor(indices).expand(6, 6, 5)
    got = _taken(view, wide, 0, 3)
    assert same_bits(got, reference.take_along_axis(x[:, ::2, 1::2], np.broadcast_to(indices, (6, 6, 5)), 0))
    dv = tensor(rng.standard_normal((5, 6, 6)).astype(np.float16)).permute(1, 2, 0)
    expected = reference.take_along_axis_backward(array(dv), np.broadcast_to(indices, (6, 6, 5)), (9, 6, 5), 0)
    for seed in SCHEDULES:
        assert same_bits(_summed((9, 6, 5), wide, dv, 0, seed), expected)


def test_groups_that_serve_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isograd.gather.metal._MOST_GROUPS", 2)
    rng = np.random.default_rng(3)
    indices, dv = rng.integers(0, 40, (7, 100)), rng.standard_normal((7, 100)).astype(np.float32)
    expected = reference.take_along_axis_backward(dv, indices, (7, 40))
    for seed in SCHEDULES:
        assert same_bits(_summed((7, 40), tensor(indices), tensor(dv), 1, seed), expected)


@pytest.mark.parametrize("which", needed_barriers("gather"))
def test_a_removed_barrier_is_found(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isograd.gather.metal._MOST_GROUPS", 1)
    rng = np.random.default_rng(3)
    indices, dv = rng.integers(0, 60, (3, 100)), rng.standard_normal((3, 100)).astype(np.float32)
    expected = reference.take_along_axis_backward(dv, indices, (3, 60))
    compiled = Library(without_barrier(metal.source("gather"), which), ("-O0",))

    def right(seed: int) -> bool:
        try:
            return same_bits(_summed((3, 60), tensor(indices), tensor(dv), 1, seed, compiled), expected)
        except EmulatorError:
            return False

    assert not all(map(right, SCHEDULES))


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_indices_out_of_range(index_dtype: Any) -> None:
    """A gathered value is NaN, a source is left out, and `check` names the place."""
    rng = np.random.default_rng(4)
    x, dv = rng.standard_normal((3, 8)).astype(np.float32), rng.standard_normal((3, 5)).astype(np.float32)
    indices = rng.integers(0, 8, (3, 5)).astype(index_dtype)
    indices[1, 3] = -9
    got = _taken(tensor(x), tensor(indices), 1, 0)
    inside = np.where(indices == -9, 0, indices)
    expected = reference.take_along_axis(x, inside)
    expected[1, 3] = np.nan
    assert same_bits(got, expected)
    with pytest.raises(
        IndexOutOfRangeError, match="take_along_axis: indices has -9 at flat position 8; accepted: -8 to 7"
    ):
        isograd.check()
    got = _summed((3, 8), tensor(indices.T).T, tensor(dv), 1, 0)
    assert same_bits(
        got, reference.take_along_axis_backward(np.where(indices == -9, np.float32(0), dv), inside, (3, 8))
    )
    with pytest.raises(IndexOutOfRangeError, match="take_along_axis_backward: indices has -9 at flat position 8"):
        isograd.check()


def test_nothing_to_take_from() -> None:
    v = _taken(torch.empty(2, 0, dtype=torch.float16), torch.zeros(2, 3, dtype=torch.int64), 1, 0)
    assert v.view(np.uint16).tolist() == [[0x7E00] * 3] * 2
    with pytest.raises(IndexOutOfRangeError):
        isograd.check()
    none = torch.empty(2, 0)
    assert not _summed((2, 4), none.to(torch.int64), none, 1, 0).any()
    descriptor = TakeAlongAxisDescriptor((2, 3), (2, 0), "float32").validated()
    assert list(KERNEL.launches(descriptor, {"x": torch.ones(2, 3), "indices": none.to(torch.int64), "v": none})) == []
    descriptor = TakeAlongAxisDescriptor((2, 1 << 32), (2, 1), "float32").validated()
    assert "elements along the axis" in str(KERNEL.reject(descriptor))
