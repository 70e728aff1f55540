"""The emulator finds what it is there to find: faults planted in the library's own kernels, and in small ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from choices import first_only
from emulator import BARRIER, SCHEDULES, EmulatorError, Library, library, needs_compiler, without_barrier

from isograd.devices import metal
from isograd.ops.softmax import reference

pytestmark = needs_compiler
_HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
_QUICK = ("-O0",)
SOFTMAX = metal.source("ops/softmax")


def _x(rows: int = 3, columns: int = 300) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)


def _forward(library: Library, seed: int) -> bool:
    """Whether one group of threads computes three rows as the reference does."""
    x, y = _x(), np.empty((3, 300), np.float32)
    library.run("softmax_float32", x, y, [3, 300, 1, 3, 1, 300, 1, 300], threads=128, group_size=128, seed=seed)
    return bool(np.array_equal(y, reference.softmax(x)))


def _backward(library: Library, seed: int) -> bool:
    """The same for the gradient, with a row that is not finite."""
    dy, y, dx = _x(), _x(), np.empty((3, 300), np.float32)
    dy[1, 7] = -np.inf
    layout = [3, 300, 1, 3, 1, 300, 1, 300, 1, 300]
    library.run("softmax_backward_float32", dy, y, dx, layout, threads=128, group_size=128, seed=seed)
    return bool(np.array_equal(dx.view(np.int32), reference.softmax_backward(dy, y).view(np.int32)))


def _finds(source: str, *checks: Callable[[Library, int], bool]) -> bool:
    compiled = library(source, _QUICK)
    for check in checks:
        for seed in SCHEDULES:
            try:
                if not check(compiled, seed):
                    return True
            except EmulatorError:
                return True
    return False


def test_nothing_is_found_in_sound_kernels() -> None:
    assert not _finds(SOFTMAX, _forward, _backward)


@pytest.mark.parametrize("which", first_only(range(len(BARRIER.findall(SOFTMAX)))))
def test_a_removed_barrier_is_found(which: int) -> None:
    assert _finds(without_barrier(SOFTMAX, which), _forward, _backward)


_OFF_BY_ONE = {
    "store": ("store(y, j * y_step, row.valid ? quotient_of", "store(y, j * y_step + 1, row.valid ? quotient_of"),
    "load before the start": ("max_key(widen(x[j * step]))", "max_key(widen(x[j * step - 1]))"),
    "last column": ("j < n; j += threads) {\n      add(sum, exp", "j < n - 1; j += threads) {\n      add(sum, exp"),
    "threadgroup memory": ("part[threads + lane] = own.low;", "part[threads + lane + 1] = own.low;"),
}


@pytest.mark.parametrize("name", first_only(_OFF_BY_ONE))
def test_an_index_off_by_one_is_found(name: str) -> None:
    old, new = _OFF_BY_ONE[name]
    assert SOFTMAX.count(old) in (1, 2)
    x = _x(1, 300)
    x[0, -1] = 9

    def check(library: Library, seed: int) -> bool:
        y = np.empty_like(x)
        library.run("softmax_float32", x, y, [1, 300, 1, 1, 1, 300, 1, 300], threads=128, group_size=128, seed=seed)
        return bool(np.array_equal(y, reference.softmax(x)))

    assert _finds(SOFTMAX.replace(old, new), check)
    assert not _finds(SOFTMAX, check)


def test_an_implicit_conversion_from_float_to_bfloat_is_found() -> None:
    old, new = "to[at] = as_type<bfloat>(bfloat_bits(x));", "to[at] = x;"
    assert SOFTMAX.count(old) == 1
    with pytest.raises(EmulatorError, match=r"no match for .operator="):
        Library(SOFTMAX.replace(old, new), _QUICK)


def _run(source: str, count: int = 64, group_size: int = 64, seed: int = 0) -> np.ndarray[Any, Any]:
    y = np.zeros(count, np.float32)
    Library(_HEADER + source, _QUICK).run("k", y, threads=count, group_size=group_size, seed=seed)
    return y


_ENTRY = "kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) "


def test_barriers_that_not_all_threads_reach() -> None:
    with pytest.raises(EmulatorError, match="ended"):
        _run(_ENTRY + "{ if (i < 9) threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = 1; }")
    two = f"if (i < 9) {{ {_BARRIER} }}\n else {{ {_BARRIER} }}"
    assert np.array_equal(_run(_ENTRY + f"{{ {_BARRIER} y[i] = 1; }}"), np.ones(64))
    with pytest.raises(EmulatorError, match="threads wait at threadgroup_barrier in line"):
        _run(_ENTRY + "{ " + two + " y[i] = 1; }")
    with pytest.raises(EmulatorError, match=r"wait forever|ended"):
        _run(_ENTRY + f"{{ while (i == 3) {{ {_BARRIER} }} y[i] = 1; {_BARRIER} }}")


def test_lanes_that_do_not_meet() -> None:
    sound = _run(_ENTRY + "{ y[i] = simd_shuffle_xor(float(i), 1); }")
    assert np.array_equal(sound, np.arange(64) ^ 1)
    with pytest.raises(EmulatorError, match="lane"):
        _run(_ENTRY + "{ if (i != 3) y[i] = simd_shuffle_xor(float(i), 1); }")


@pytest.mark.parametrize("index", ["i + 1", "long(i) - 1"])
def test_accesses_outside_of_a_buffer(index: str) -> None:
    seed = 0 if "+" in index else 1
    with pytest.raises(EmulatorError, match=r"outside of every buffer \[thread \("):
        _run(_ENTRY + f"{{ y[{index}] = 1; }}", seed=seed)


def test_too_much_threadgroup_memory() -> None:
    body = "{ threadgroup float part[8192]; part[i] = 1; y[i] = part[i]; }"
    assert np.array_equal(_run(_ENTRY + body), np.ones(64))
    with pytest.raises(EmulatorError, match="more than 32768 bytes"):
        _run(_ENTRY + body.replace("8192", "8193"))


def test_every_variable_of_a_threadgroup_is_shared() -> None:
    body = "{\n  threadgroup float a[64];\n  threadgroup float b[64];\n  threadgroup float c;\n"
    body += f"a[i] = i; b[i] = 2 * i; if (i == 9) c = 1;\n{_BARRIER}\ny[i] = a[63 - i] + b[63 - i] + c; }}"
    assert np.array_equal(_run(_ENTRY + body), 3 * (63 - np.arange(64.0)) + 1)


def test_threadgroup_memory_starts_as_nan() -> None:
    assert np.isnan(_run(_ENTRY + "{ threadgroup float part[64]; y[i] = part[i]; }")).all()


@pytest.mark.parametrize("type_", ["ulong", "float"])
def test_atomics_that_metal_lacks_or_the_contract_forbids(type_: str) -> None:
    body = f"{{ atomic_fetch_add_explicit((device atomic<{type_}>*)y, 1, memory_order_relaxed); }}"
    with pytest.raises(EmulatorError, match=r"no atomics of this size|not determined"):
        _run(_ENTRY + body)


def test_portable_fibers_compute_the_same() -> None:
    library = Library(SOFTMAX, (*_QUICK, "-DEMULATOR_UCONTEXT"))
    assert all(_forward(library, seed) for seed in SCHEDULES[:2])
