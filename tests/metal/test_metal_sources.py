"""What can be checked of the Metal sources without running them."""

import re
from pathlib import Path

import pytest

from isograd.devices import metal

PACKAGE = Path(metal.__file__).parent.parent
FAMILIES = sorted(path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("metal_kernels.metal"))
_HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
_ENTRY = "kernel void k(device float* o [[buffer(0)]], constant float* c [[buffer(1)]]) "
WRONG = {
    "constant memory as device memory": "float f(device const float* p) { return p[0]; }\n"
    + _ENTRY
    + "{ o[0] = f(c); }",
    "threadgroup memory as device memory": _ENTRY + "{ threadgroup float p[4]; device float* q = p; q[0] = 1; }",
    "a write to constant memory": _ENTRY + "{ c[0] = 2; }",
    "a pointer to no address space": _ENTRY + "{ float* p = o; p[0] = 1; }",
    "a reference to no address space": "void f(float& x) { x = 1; }\n" + _ENTRY + "{ o[0] = 1; }",
    "double": _ENTRY + "{ double d = 1.0; o[0] = d; }",
    "an unknown function": _ENTRY + "{ o[0] = exp2(1.0f); }",
    "new": _ENTRY + "{ o[0] = *new float(1); }",
    "an implicit bfloat": "kernel void k(device bfloat* o [[buffer(0)]]) { float x = o[0]; o[1] = x; }",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sources_are_ascii_without_hardware_functions(family: str) -> None:
    source = metal.source(family)
    assert source.isascii()
    assert '#include "' not in source
    code = re.sub(r"//[^\n]*", "", source)
    assert not re.search(r"precise::|fast::|\b(exp2?|log2?|pow|sqrt|rsqrt|divide|sin|cos|tanh)\s*\(", code)
    assert not re.search(r"atomic_\w*float|\bdouble\b", code)
    assert "#pragma METAL fp math_mode(safe)" in source
    assert "#pragma METAL fp contract(off)" in source


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_come_without_entry_points(family: str) -> None:
    assert "[[kernel]]" in metal.source(family)
    assert metal.source(family).startswith(functions := metal.functions(family))
    assert "[[" not in functions


@pytest.mark.parametrize("family", FAMILIES)
def test_address_spaces_and_types(family: str) -> None:
    pytest.importorskip("clang.cindex", reason="needs libclang")
    from strict_pass import complaints

    assert complaints(metal.source(family)) == []


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_that_a_cpp_compiler_accepts_or_knows_otherwise(name: str) -> None:
    pytest.importorskip("clang.cindex", reason="needs libclang")
    from strict_pass import complaints

    assert complaints(_HEADER + WRONG[name])
    assert complaints(_HEADER + _ENTRY + "{ o[0] = c[0]; }") == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("threadgroup long* part", "device long* part"),
        ("device const T* from", "constant const T* from"),
        ("constant long* shape = layout + 3", "device long* shape = layout + 3"),
    ],
)
def test_a_wrong_address_space_in_a_template_is_found(old: str, new: str) -> None:
    pytest.importorskip("clang.cindex", reason="needs libclang")
    from strict_pass import complaints

    source = metal.source("ops/softmax")
    assert old in source
    assert complaints(source.replace(old, new, 1))
