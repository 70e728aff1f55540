"""The fused router's Metal kernels in the emulator: the bits of the reference under several schedules."""

from typing import Any

import numpy as np
import pytest
import torch
from emulated import needed_barriers, run
from emulator import FLUSHES, SCHEDULES, EmulatorError, Library, needs_compiler, without_barrier
from problems import DTYPES, array, same_bits, stored, tensor

import isograd
from isograd.cli.suites import SUITES
from isograd.core import registry
from isograd.core.arrays import numpy_dtype
from isograd.core.cases import Case
from isograd.devices import metal
from isograd.errors import IndexOutOfRangeError, UnsupportedError
from isograd.ops.router import reference
from isograd.ops.router.metal import too_large

pytestmark = needs_compiler
OPERATIONS = ("moe_router", "moe_router_backward")
KERNELS = {e.operation: e.kernel for e in registry.kernels() if e.device == "mps" and e.operation in OPERATIONS}


def _computed(
    operation: str, case: Case, dtype: str, seed: int, compiled: Library | None = None, **views: torch.Tensor
) -> list[np.ndarray[Any, Any]]:
    descriptor = SUITES[operation].descriptor(case, dtype)
    given = {name: views.get(name, tensor(a)) for name, a in case.inputs.items()}
    outputs = {
        o.name: tensor(np.empty(o.shape, numpy_dtype(o.dtype))) for o in descriptor.validated().operands() if o.output
    }
    run(KERNELS[operation], descriptor, seed, FLUSHES and seed % 2 == 0, compiled, **given, **outputs)
    return [array(out) for out in outputs.values()]


def _expected(operation: str, case: Case) -> list[np.ndarray[Any, Any]]:
    results = SUITES[operation].reference(**case.inputs, **case.options)
    return [np.ascontiguousarray(r) for r in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bits_of_every_case_that_verify_has(operation: str, dtype: str) -> None:
    for number, case in enumerate(SUITES[operation].cases(dtype)):
        expected = _expected(operation, case)
        for seed in {number % 4, 3 - number % 4}:
            for got, wanted in zip(_computed(operation, case, dtype, seed), expected, strict=True):
                assert same_bits(got, wanted), (case.name, seed)


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("experts", [1, 31, 32, 33, 255, 256, 257, 4096])
def test_numbers_of_experts(experts: int, seed: int) -> None:
    rng = np.random.default_rng(experts)
    logits = stored(rng.standard_normal((2, experts)), DTYPES[seed % 3])
    k = min(experts, 8)
    case = Case("", {"logits": logits}, {"k": k, "renormalize": True, "scoring": ("softmax", "sigmoid")[seed // 2]})
    for got, wanted in zip(
        _computed("moe_router", case, DTYPES[seed % 3], seed), _expected("moe_router", case), strict=True
    ):
        assert same_bits(got, wanted)


def test_more_tokens_than_a_16_bit_number_counts() -> None:
    logits = np.random.default_rng(9).standard_normal((70_000, 2)).astype(np.float16)
    got = _computed("moe_router", Case("", {"logits": logits}, {"k": 1}), "float16", 0)
    some = np.r_[:100, 65_500:65_600, 69_900:70_000]
    for result, wanted in zip(got, reference.moe_router(logits[some], 1), strict=True):
        assert same_bits(result[some], wanted)


def _difficult(operation: str) -> tuple[Case, torch.Tensor]:
    """Five times three tokens with strided logits, and these logits; groups, or an expert that occurs four times."""
    rng = np.random.default_rng(5)
    wide = stored(rng.standard_normal((5, 3, 160)), "bfloat16")
    options: dict[str, Any] = {"renormalize": operation != "moe_router", "scale": 1.5}
    inputs = {"logits": wide[:, :, ::2]}
    if operation == "moe_router":
        options |= {"k": 4, "groups": 16, "group_k": 2}
    else:
        inputs["experts"] = rng.integers(0, 80, (5, 3, 4)).astype(np.int32)
        inputs["experts"][0, 0] = 7
        inputs = {"dweights": rng.standard_normal((5, 3, 4)).astype(np.float32), **inputs}
    return Case("", inputs, options), tensor(wide)[:, :, ::2]


def _right(operation: str, seed: int, compiled: Library | None = None) -> bool:
    case, logits = _difficult(operation)
    got = _computed(operation, case, "bfloat16", seed, compiled, logits=logits)
    return all(same_bits(*pair) for pair in zip(got, _expected(operation, case), strict=True))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_strided_logits_and_groups_that_serve_several_tokens(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isograd.devices.metal.MOST_GROUPS", 2)
    assert all(_right(operation, seed) for seed in SCHEDULES)


@pytest.mark.thorough
@pytest.mark.parametrize("which", needed_barriers("ops/router"))
def test_a_removed_barrier_is_found(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isograd.devices.metal.MOST_GROUPS", 2)
    compiled = Library(without_barrier(metal.source("ops/router"), which), ("-O0",))

    def right(operation: str, seed: int) -> bool:
        try:
            return _right(operation, seed, compiled)
        except EmulatorError:
            return False

    assert not all(right(operation, seed) for operation in OPERATIONS for seed in SCHEDULES)


def test_a_token_with_an_expert_out_of_range() -> None:
    rng = np.random.default_rng(6)
    logits, dweights = rng.standard_normal((3, 20)).astype(np.float16), rng.standard_normal((3, 2)).astype(np.float32)
    experts = np.array([[3, 4], [5, 20], [0, 19]])
    case = Case("", {"dweights": dweights, "logits": logits, "experts": experts})
    (got,) = _computed("moe_router_backward", case, "float16", 0)
    expected = reference.moe_router_backward(dweights, logits, np.where(experts == 20, 0, experts))
    expected[1] = np.nan
    assert same_bits(got, expected)
    with pytest.raises(IndexOutOfRangeError, match="moe_router_backward: experts has 20 at flat position 3"):
        isograd.check()


def test_no_tokens_and_too_many_experts() -> None:
    empty = torch.empty(0, 4)
    descriptor = isograd.MoeRouterDescriptor((0, 4), 2, "float32").validated()
    kernel = KERNELS["moe_router"]
    assert list(kernel.launches(descriptor, dict.fromkeys(("logits", "weights", "experts"), empty))) == []
    assert "4096 experts" in str(too_large(isograd.MoeRouterDescriptor((2, 4097), 2, "float32")))
    assert "1024 groups" in str(too_large(isograd.MoeRouterDescriptor((2, 2048), 2, "float32", groups=2048)))
    with pytest.raises(UnsupportedError, match=r"no Apple GPU|torch"):
        isograd.MoeRouterPlan.select(descriptor, device="mps")
