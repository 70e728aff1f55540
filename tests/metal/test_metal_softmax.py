"""The softmax family's Metal kernels in the emulator: the bits of the reference under several schedules."""

from typing import Any

import numpy as np
import pytest
import torch
from emulated import run
from emulator import FLUSHES, SCHEDULES, needs_compiler
from problems import DTYPES, array, same_bits, stored, tensor

from isograd.cli.suites import SUITES as ALL
from isograd.core import registry
from isograd.ops import OPERATIONS
from isograd.ops.softmax import reference

pytestmark = needs_compiler
KERNELS = {e.operation: e.kernel for e in registry.kernels() if e.device == "mps" and "softmax" in e.operation}
SUITES = {name: ALL[name] for name in KERNELS}
LENGTHS = (1, 31, 32, 33, 255, 256, 257, 8191)


def _inputs(operation: str, shape: tuple[int, ...], dtype: str, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    x = stored(4 * rng.standard_normal(shape), dtype)
    if not operation.endswith("backward"):
        return {"x": x}
    y = rng.standard_exponential(shape)
    y /= y.sum(axis=-1, keepdims=True)
    return {"dy": x, "y": stored(np.log(y) if operation.startswith("log") else y, dtype)}


def _computed(
    operation: str, axis: int, seed: int, flush: bool = False, toward_zero: bool = False, **given: torch.Tensor
) -> np.ndarray[Any, Any]:
    like = list(given.values())[-1]
    dtype = str(like.dtype).removeprefix("torch.")
    op, out = OPERATIONS[operation], torch.empty_like(like)
    descriptor = op.descriptor_type(tuple(like.shape), dtype, axis)
    outputs = dict.fromkeys(op.outputs, out)
    run(KERNELS[operation], descriptor, seed, flush, toward_zero=toward_zero, **given, **outputs)
    return array(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", SUITES)
def test_bits_of_every_case_that_verify_has(operation: str, dtype: str) -> None:
    """Special values, cancellation, layouts; as the hardware flushes subnormals, and as it does not."""
    suite = SUITES[operation]
    for number, case in enumerate(suite.cases(dtype)):
        expected = np.ascontiguousarray(suite.reference(**case.inputs, **case.options))
        given = {name: tensor(a) for name, a in case.inputs.items()}
        got = _computed(operation, case.options.get("axis", -1), number % 4, FLUSHES and number % 2 == 0, **given)
        assert same_bits(got, expected), case.name
        got = _computed(operation, case.options.get("axis", -1), 1, FLUSHES and number % 2 == 1, **given)
        assert same_bits(got, expected), case.name


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("operation", SUITES)
def test_bits_under_every_schedule(operation: str, seed: int) -> None:
    for length in LENGTHS:
        dtype = DTYPES[(length + seed) % 3]
        for rows in (1, 3) if length < 1000 else (1,):
            given = _inputs(operation, (rows, length), dtype, length)
            expected = getattr(reference, operation)(**given)
            got = _computed(operation, -1, seed, **{name: tensor(a) for name, a in given.items()})
            assert same_bits(got, expected), (rows, length, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", SUITES)
def test_a_row_of_40_000_columns(operation: str, dtype: str) -> None:
    given = _inputs(operation, (1, 40_000), dtype, 1)
    expected = getattr(reference, operation)(**given)
    for seed in SCHEDULES:
        assert same_bits(_computed(operation, -1, seed, **{n: tensor(a) for n, a in given.items()}), expected)


@pytest.mark.parametrize("operation", SUITES)
def test_more_rows_than_a_16_bit_number_counts(operation: str) -> None:
    """Checked on rows at both ends of the batch, which all differ."""
    given = _inputs(operation, (70_000, 2), "float32", 2)
    got = _computed(operation, -1, 0, **{name: tensor(a) for name, a in given.items()})
    some = np.r_[:200, 65_436:65_636, 69_800:70_000]
    assert same_bits(got[some], getattr(reference, operation)(**{name: a[some] for name, a in given.items()}))


@pytest.mark.parametrize("operation", SUITES)
def test_groups_that_serve_several_rows(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do where there are more rows than a launch has groups."""
    monkeypatch.setattr("isograd.devices.metal.MOST_GROUPS", 2)
    given = _inputs(operation, (7, 300), "float32", 3)
    expected = getattr(reference, operation)(**given)
    for seed in SCHEDULES:
        assert same_bits(_computed(operation, -1, seed, **{n: tensor(a) for n, a in given.items()}), expected)


@pytest.mark.parametrize("operation", SUITES)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strided_tensors(operation: str, axis: int) -> None:
    """Every other element, permuted dimensions, an expanded first operand, an offset into the storage."""
    given = _inputs(operation, (5, 6, 80), "float16", 4)
    plain = {name: a[1:, :, ::2].transpose(1, 2, 0) for name, a in given.items()}
    expected = getattr(reference, operation)(**plain, axis=axis)
    views = {name: tensor(a)[1:, :, ::2].permute(1, 2, 0) for name, a in given.items()}
    assert same_bits(_computed(operation, axis, 2, **views), np.ascontiguousarray(expected))
    if operation.endswith("backward"):
        one = tensor(given["dy"][0, 0, :1]).expand(6, 40, 4)
        wide = np.broadcast_to(given["dy"][0, 0, :1], (6, 40, 4))
        expected = getattr(reference, operation)(wide, array(views["y"]), axis=axis)
        assert same_bits(_computed(operation, axis, 3, dy=one, y=views["y"]), np.ascontiguousarray(expected))


@pytest.mark.parametrize("operation", SUITES)
def test_in_place(operation: str) -> None:
    given = _inputs(operation, (4, 300), "bfloat16", 5)
    expected = getattr(reference, operation)(**given)
    views = {name: tensor(a) for name, a in given.items()}
    out = next(iter(views.values()))
    op = OPERATIONS[operation]
    run(KERNELS[operation], op.descriptor_type((4, 300), "bfloat16"), 3, **views, **dict.fromkeys(op.outputs, out))
    assert same_bits(array(out), expected)


@pytest.mark.skipif(not FLUSHES, reason="only x86-64 can be told to round toward zero")
@pytest.mark.parametrize("operation", SUITES)
def test_another_rounding_mode_would_show(operation: str) -> None:
    """Metal's specification allows one, so equal bits on all hardware are not promised."""
    given = _inputs(operation, (4, 300), "float32", 6)
    got = _computed(operation, -1, 0, toward_zero=True, **{name: tensor(a) for name, a in given.items()})
    assert not same_bits(got, getattr(reference, operation)(**given))


def test_nothing_is_launched_for_no_elements() -> None:
    x = torch.empty(0, 5)
    assert (
        list(
            KERNELS["softmax"].launches(
                OPERATIONS["softmax"].descriptor_type((0, 5), "float32").validated(), {"x": x, "y": x}
            )
        )
        == []
    )
