"""The Triton kernels compile for GPUs that are not there, and keep what they hold in registers."""

import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

from choices import thinned  # noqa: E402
from triton_targets import kernels_of, resources  # noqa: E402

from isograd.gather import triton_launch as gather  # noqa: E402
from isograd.reduction import cuda as reduction  # noqa: E402


def _lines(dtype: torch.dtype, k: int, **options: Any) -> Callable[[], None]:
    out, v = torch.empty(4096, 256, dtype=dtype), torch.empty(4096, k, dtype=dtype)
    indices = torch.empty(4096, k, dtype=torch.int64)
    return lambda: gather.scatter_sum(indices, v, out, 1, **options)


def _take(dtype: torch.dtype) -> Callable[[], None]:
    x, v = torch.empty(4096, 256, dtype=dtype), torch.empty(4096, 8, dtype=dtype)
    indices = torch.empty(4096, 8, dtype=torch.uint32)
    return lambda: gather.take_along_axis(x, indices, v, 1)


def _rows(dtype: torch.dtype, call: Any) -> Callable[[], None]:
    weight, y = torch.empty(5030, 1024, dtype=dtype), torch.empty(4096, 1024, dtype=dtype)
    indices = torch.empty(4096, dtype=torch.int32)
    if call is gather.index_select:
        return lambda: call(weight, indices, y)
    return lambda: call(indices, y, weight)


CALLS: dict[str, Callable[[torch.dtype], Callable[[], None]]] = {
    "take": _take,
    "few": lambda dtype: _lines(dtype, 4 if dtype == torch.float64 else 8),
    "few into x": lambda dtype: _lines(dtype, 4, x=torch.zeros(4096, 256, dtype=dtype)),
    "pairs": lambda dtype: _lines(dtype, 40),
    "unique": lambda dtype: _lines(dtype, 200, unique=True),
    "atomics": lambda dtype: _lines(dtype, 100),
    "select": lambda dtype: _rows(dtype, gather.index_select),
    "sum": lambda dtype: _rows(dtype, gather.index_sum),
}
KERNELS = {
    "take": ["take"],
    "few": ["scatter_few"],
    "few into x": ["scatter_few"],
    "pairs": ["scatter_pairs"],
    "unique": ["scatter_pairs"],
    "atomics": ["scatter_keys", "scatter_words", "scatter_finish"],
    "select": ["select"],
    "sum": ["group_count", "group_allocate", "group_place", "group_copy", "group_sum"],
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "dtype"), thinned(2, CALLS, [torch.float32, torch.float64]), ids=str)
def test_hopper(name: str, dtype: torch.dtype) -> None:
    found = kernels_of("sm_90", CALLS[name](dtype), gather)
    assert list(found) == KERNELS[name]
    for kernel, compiled in found.items():
        needs = resources(compiled)
        assert needs["stack"] == 0, kernel
        assert needs["shared"] <= 48 * 1024, kernel
        # What moves the bytes must leave room for many programs, what adds may take more.
        assert needs["registers"] <= (64 if kernel in ("group_copy", "select") else 255), kernel


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", ["take", "few", "pairs", "atomics", "select", "sum"])
def test_other_architectures(target: str, name: str) -> None:
    found = kernels_of(target, CALLS[name](torch.bfloat16), gather)
    assert list(found) == KERNELS[name]
    for kernel, compiled in found.items():
        needs = resources(compiled)
        assert needs["stack"] == 0, kernel
        assert needs["registers"] <= 255, kernel


@pytest.mark.thorough
@pytest.mark.parametrize(("target", "dtype"), [("sm_90", "float32"), ("sm_80", "float64"), ("gfx942", "bfloat16")])
@pytest.mark.parametrize(("shape", "axis"), [((65536, 256), 0), ((65536, 256), 1)])
def test_sums(target: str, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    x = torch.empty(shape, dtype=getattr(torch, dtype))
    found = kernels_of(target, lambda: reduction.sum(x, axis), reduction)
    assert list(found) in (["sum_rows"], ["sum_keys", "sum_parts", "sum_finish"])
    assert all(resources(compiled)["stack"] == 0 for compiled in found.values())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sum", "atomics"])
def test_no_float_is_added_in_memory(name: str) -> None:
    atomics = 0
    for compiled in kernels_of("sm_90", CALLS[name](torch.float32), gather).values():
        found = re.findall(r"\b(?:atom|red)\.\S+", compiled.asm["ptx"])
        atomics += len(found)
        assert not [a for a in found if re.search(r"\.(f|bf)\d", a)]
    assert atomics > 0


@pytest.mark.thorough
def test_stores_of_a_row_are_ordered_by_a_barrier() -> None:
    """Between the stores that fill a row and those of its sums; the atomics of a chunk and its arrival likewise."""
    ptx = kernels_of("sm_90", _lines(torch.float32, 8), gather)["scatter_few"].asm["ptx"]
    steps = re.findall(r"st\.global\.v4|bar\.sync|st\.global\.b32", ptx)
    last_fill = max(i for i, step in enumerate(steps) if step == "st.global.v4")
    assert "bar.sync" in steps[last_fill : steps.index("st.global.b32")]
    ptx = kernels_of("sm_90", _rows(torch.float32, gather.index_sum), gather)["group_sum"].asm["ptx"]
    steps = re.findall(r"(?:red|atom)\S*relaxed\S*add\S*|bar\.sync|atom\S*acq_rel\S*add\S*", ptx)
    arrival = next(i for i, step in enumerate(steps) if "acq_rel" in step)
    added = max(i for i, step in enumerate(steps[:arrival]) if "relaxed" in step)
    assert "bar.sync" in steps[added:arrival]
