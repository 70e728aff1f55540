"""What a type checker and an editor are told of the public functions."""

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import isograd as ig
import isograd.torch as igt

SAMPLE = Path(__file__).parent / "typing_sample.py"
REPOSITORY = SAMPLE.parent.parent


def signatures(function):
    return [inspect.signature(f) for f in typing.get_overloads(function) or [function]]


@pytest.mark.parametrize("module", [ig, igt], ids=["isograd", "isograd.torch"])
def test_no_public_function_returns_any(module):
    """A result of type Any switches a user's type checker off."""
    functions = {n: f for n in module.__all__ if inspect.isfunction(f := getattr(module, n))}
    assert len(functions) > 25
    untyped = [
        name
        for name, function in functions.items()
        if any(s.return_annotation in (inspect.Signature.empty, "Any", typing.Any) for s in signatures(function))
    ]
    assert untyped == []


@pytest.mark.parametrize("module", [ig, igt], ids=["isograd", "isograd.torch"])
def test_choices_are_literals(module):
    """`reduction="avg"` is an error before the program runs."""
    loose = [
        (name, parameter.name)
        for name in module.__all__
        if inspect.isfunction(function := getattr(module, name))
        for signature in signatures(function)
        for parameter in signature.parameters.values()
        if parameter.name in ("reduction", "scoring", "alignment", "layout", "wrt")
        and (parameter.annotation is str or parameter.annotation == "str")
    ]
    assert loose == []


@pytest.mark.thorough
def test_mypy_sees_the_types_that_the_sample_asserts(tmp_path):
    """Every assert_type holds, and every line marked `wrong` is refused."""
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(tmp_path),
        "--no-error-summary",
        str(SAMPLE),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    found = {int(line) for line in re.findall(r"typing_sample\.py:(\d+): error", done.stdout)}
    lines = SAMPLE.read_text().splitlines()
    expected = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert found == expected, done.stdout
