"""Checks the address spaces and types of Metal kernels, which a C++ compiler does not know.

Clang's C++ for OpenCL has the same ones: a pointer to `constant` or `threadgroup` memory is none to `device` memory. It
has a generic one besides, for pointers that name none, and these are refused here. Syntax only; nothing runs.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import clang.cindex
from emulator import _VARIABLE, without_comments

_HEADERS = Path(__file__).parent / "strict"
_INSTANCE = re.compile(
    r"template\s*\[\[host_name\(\"\w+\"\)\]\]\s*(?:\[\[kernel\]\])?\s*decltype\s*\((.*?)\)\s*[^;]*;", re.S
)
_GENERIC = 5  # clang's number of the generic address space
_DECLARED = (clang.cindex.CursorKind.VAR_DECL, clang.cindex.CursorKind.PARM_DECL, clang.cindex.CursorKind.FIELD_DECL)
_INDIRECT = (clang.cindex.TypeKind.POINTER, clang.cindex.TypeKind.LVALUEREFERENCE)
_ARGUMENTS = [
    *("-x", "clcpp", "-cl-std=clc++2021", "-nostdinc", "-cl-no-stdinc", "-Wno-unknown-pragmas", "--target=spir64"),
    *("-Xclang", "-cl-ext=-__opencl_c_device_enqueue,-__opencl_c_pipes"),
    *("-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64"),
]


def complaints(source: str) -> list[str]:
    """What is wrong with a source, one message each."""
    text = without_comments(source)
    # OpenCL has no instantiation by decltype; taking a function's address instantiates it as well.
    uses = _INSTANCE.findall(text)
    text = _INSTANCE.sub(lambda m: re.sub(r"[^\n]", "", m[0]), text)
    text = re.sub(r"\[\[.*?\]\]", "", text)
    text = _VARIABLE.sub(r"\1threadgroup \2(&\3)\4 = *(threadgroup \2(*)\4)threadgroup_memory();", text)
    text += "\n#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable"
    text += "".join(f"\nvoid use_{i}() {{ (void)&{use}; }}" for i, use in enumerate(uses))
    unit = clang.cindex.Index.create().parse(
        "kernels.metal", args=[*_ARGUMENTS, f"-I{_HEADERS}"], unsaved_files=[("kernels.metal", text)]
    )
    messages = [str(d) for d in unit.diagnostics if d.severity >= clang.cindex.Diagnostic.Error]
    return messages or [f"{c.location.line}: {c.spelling} names no address space" for c in _unqualified(unit.cursor)]


def _unqualified(cursor: clang.cindex.Cursor) -> Iterator[clang.cindex.Cursor]:
    """Declared pointers and references of the kernels that name no address space."""
    for child in cursor.get_children():
        if child.location.file is None or child.location.file.name != "kernels.metal":
            continue
        indirect = child.kind in _DECLARED and child.type.kind in _INDIRECT
        if indirect and child.type.get_pointee().get_address_space() == _GENERIC:
            yield child
        yield from _unqualified(child)
