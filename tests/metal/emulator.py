"""Compiles Metal kernels as C++ and runs them on the CPU.

    library = Library(source)
    library.run("softmax_float", x, y, [1, n], threads=256, group_size=256, seed=2)

The source is the kernels' own; `shim/metal_stdlib` says what its words mean to a C++ compiler, and a few lines below
turn what C++ cannot say: variables of a threadgroup become static, entry points get a C function each. Buffers end, or
for odd seeds begin, where memory is not mapped, so that an access outside of them is noticed.
"""

import ctypes
import functools
import mmap
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

SHIM = Path(__file__).parent / "shim"
COMPILER = shutil.which("g++")
SCHEDULES = (0, 1, 2, 3)  # in order, reversed, shuffled twice
# Whether subnormal numbers can be flushed as an Apple GPU does.
FLUSHES = platform.machine() == "x86_64"

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the emulator of Metal needs g++")

_SELF, _GROUP = "emulator::self()", "emulator::group"
_ATTRIBUTES = {
    "thread_position_in_grid": f"{_SELF}.in_grid",
    "thread_position_in_threadgroup": f"{_SELF}.in_group",
    "threadgroup_position_in_grid": f"{_GROUP}.position",
    "threads_per_threadgroup": f"{_GROUP}.shape",
    "threadgroups_per_grid": f"{_GROUP}.groups",
    "threads_per_grid": f"{_GROUP}.grid",
    "thread_index_in_simdgroup": f"({_SELF}.index % 32)",
    "simdgroup_index_in_threadgroup": f"({_SELF}.index / 32)",
}
_SCALARS = ("thread_index_in_simdgroup", "simdgroup_index_in_threadgroup")
_VARIABLE = re.compile(r"(^\s*|[{};]\s*)threadgroup\s+([\w:]+(?:<[^<>;]*>)?)\s+(\w+)\s*((?:\[[^\]]*\])*)\s*;", re.M)
_ENTRY = re.compile(r"(?:template\s*<([^<>]*)>\s*)?(?:\[\[kernel\]\]|\bkernel)\s+void\s+(\w+)\s*\(")
_INSTANCE = re.compile(
    r"template\s*\[\[host_name\(\"(\w+)\"\)\]\]\s*(?:\[\[kernel\]\]|kernel)\s*"
    r"decltype\s*\(\s*(\w+)\s*(<[^;()]*>)\s*\)\s*\w+\s*<[^;]*>\s*;"
)


class EmulatorError(Exception):
    """What a kernel did that it must not do."""


class Parameter(NamedTuple):
    """A parameter of an entry point: its attribute, its C++ type, and its place among the buffers."""

    attribute: str
    type: str
    index: int | None


def without_comments(source: str) -> str:
    """The source with blanks for its comments, lines kept."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S)


def split_arguments(text: str) -> list[str]:
    """Text cut at its outermost commas."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += c
    return [*parts, part]


def _enclosed(source: str, start: int) -> str:
    """What stands in the parentheses that open before `start`."""
    depth = 1
    for end in range(start, len(source)):
        depth += (source[end] == "(") - (source[end] == ")")
        if depth == 0:
            return source[start:end]
    raise ValueError("unbalanced parentheses")


def _parameter(text: str) -> Parameter:
    attribute = re.search(r"\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]", text)
    assert attribute is not None, text
    plain = re.sub(r"\[\[.*?\]\]", "", text).strip()
    declared = re.match(r"(.*?)([&*]?)\s*\w+$", plain, re.S)
    assert declared is not None, text
    return Parameter(attribute[1], declared[1].strip() + declared[2], int(attribute[2]) if attribute[2] else None)


def entry_points(source: str) -> dict[str, tuple[str, list[Parameter]]]:
    """The C++ function and the parameters of every entry point, by the name that the host knows it by."""
    functions = {}
    for match in _ENTRY.finditer(source):
        parameters = [_parameter(text) for text in split_arguments(_enclosed(source, match.end()))]
        names = [p.split()[-1] for p in match[1].split(",")] if match[1] else []
        functions[match[2]] = (names, parameters)
    entries = {name: (name, parameters) for name, (names, parameters) in functions.items() if not names}
    for host_name, name, values in _INSTANCE.findall(source):
        names, parameters = functions[name]
        types = dict(zip(names, [v.strip() for v in split_arguments(values[1:-1])], strict=True))

        def typed(p: Parameter, types: dict[str, str] = types) -> Parameter:
            return p._replace(type=re.sub(r"\b\w+\b", lambda word: types.get(word[0], word[0]), p.type))

        entries[host_name] = (name + values, [typed(p) for p in parameters])
    return entries


def _argument(p: Parameter) -> str:
    if p.attribute == "buffer":
        plain = re.sub(r"\b(device|constant|threadgroup|thread)\b", "", p.type).strip()
        return f"({plain})a[{p.index}]" if plain.endswith("*") else f"*({plain[:-1]}*)a[{p.index}]"
    value = _ATTRIBUTES[p.attribute]
    if p.attribute in _SCALARS:
        return value
    return f"uint3{{{value}.x, {value}.y, {value}.z}}" if p.type.endswith("3") else f"({p.type}){value}.x"


def translated(source: str) -> tuple[str, dict[str, tuple[str, list[Parameter]]]]:
    """C++ with a C function `run_NAME` for every entry point."""
    source = without_comments(source)
    entries = entry_points(source)
    source = _INSTANCE.sub(lambda m: re.sub(r"[^\n]", "", m[0]), source)
    source = re.sub(r"\[\[(?!noreturn).*?\]\]", "", source)
    source = _VARIABLE.sub(r"\1static \2 \3\4; static_cast<void>(emulator::threadgroup_variable(\3));", source)
    functions = []
    for name, (function, parameters) in entries.items():
        call = f"{function}({', '.join(map(_argument, parameters))})"
        functions.append(
            f'extern "C" int run_{name}(void** buffers, const uint32_t* g, const uint32_t* t, unsigned seed, int flush,'
            " int toward_zero, char* error, int length) {"
            f" auto body = [](void* p) {{ void** a = static_cast<void**>(p); {call}; }};"
            " return emulator::run({g[0], g[1], g[2]}, {t[0], t[1], t[2]}, seed, flush, toward_zero, body, buffers,"
            " error, length); }"
        )
    return "\n".join([source, *functions]), entries


class _Guarded:
    """A copy of an array between pages that are not mapped; it touches the one behind it, or the one before it."""

    def __init__(self, array: np.ndarray[Any, Any], at_start: bool) -> None:
        page = mmap.PAGESIZE
        size = max(-(-array.nbytes // page), 1) * page
        self._map = mmap.mmap(-1, size + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for start in (base, base + page + size):
            assert protect(ctypes.c_void_p(start), ctypes.c_size_t(page), 0) == 0
        self.address = base + page + (0 if at_start else size - array.nbytes)
        self._array = array
        ctypes.memmove(self.address, array.ctypes.data, array.nbytes)

    def copy_back(self) -> None:
        ctypes.memmove(self._array.ctypes.data, self.address, self._array.nbytes)


def _triple(value: int | tuple[int, ...]) -> Any:
    values = (value,) if isinstance(value, int) else value
    return (ctypes.c_uint32 * 3)(*values, *(1,) * (3 - len(values)))


class Library:
    """Compiled kernels of one source."""

    def __init__(self, source: str, flags: tuple[str, ...] = ()) -> None:
        text, self.entries = translated(source)
        folder = Path(tempfile.mkdtemp(prefix="metal-"))
        path, binary = folder / "kernels.cpp", folder / "kernels.so"
        path.write_text(text)
        options = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-fast-math", "-fPIC", "-shared", "-march=native")
        quiet = ("-Wno-attributes", "-Wno-unknown-pragmas")
        command = [str(COMPILER), *options, *quiet, *flags, f"-I{SHIM}", str(path), "-o", str(binary)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise EmulatorError(result.stderr)
        self._library = ctypes.CDLL(os.fspath(binary))
        shutil.rmtree(folder)

    def run(
        self,
        name: str,
        *arguments: Any,
        threads: int | tuple[int, ...],
        group_size: int | tuple[int, ...],
        seed: int = 0,
        flush: bool = False,
        toward_zero: bool = False,
    ) -> None:
        """Run an entry point. Arguments: contiguous arrays, which are written in place, and lists of integers.

        flush: subnormal numbers. toward_zero: how the hardware rounds.
        """
        arrays = [np.array(a, np.int64) if isinstance(a, list) else a for a in arguments]
        assert all(a.flags.c_contiguous for a in arrays)
        buffers = [p for p in self.entries[name][1] if p.attribute == "buffer"]
        assert len(buffers) == len(arrays), f"{name} has {len(buffers)} buffers"
        # The same memory under two names stays the same memory.
        copies = {a.ctypes.data: _Guarded(a, seed % 2 == 1) for a in arrays}
        pointers = (ctypes.c_void_p * len(arrays))(*[copies[a.ctypes.data].address for a in arrays])
        error = ctypes.create_string_buffer(512)
        function = getattr(self._library, f"run_{name}")
        modes = int(flush), int(toward_zero)
        failed = function(pointers, _triple(threads), _triple(group_size), seed, *modes, error, len(error))
        for copy in copies.values():
            copy.copy_back()
        if failed:
            raise EmulatorError(error.value.decode())


@functools.cache
def library(source: str, flags: tuple[str, ...] = ()) -> Library:
    """A library that is compiled once in a process."""
    return Library(source, flags)


BARRIER = re.compile(r"(?:threadgroup|simdgroup)_barrier\([^()]*\);")


def without_barrier(source: str, which: int) -> str:
    """A source with one of its barriers left out."""
    match = list(BARRIER.finditer(source))[which]
    return source[: match.start()] + source[match.end() :]
