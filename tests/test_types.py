"""What a type checker and an editor are told of the public functions."""

import inspect
import json
import re
import shutil
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
def test_mypy_sees_the_types_that_the_sample_asserts():
    """Every assert_type holds, and every line marked `wrong` is refused.

    What mypy keeps of the package serves the command `mypy` as well, and the other way round.
    """
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(SAMPLE)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    found = {int(line) for line in re.findall(r"typing_sample\.py:(\d+): error", done.stdout)}
    assert found == wrong_lines(), done.stdout


def wrong_lines():
    """The lines of the sample that a type checker has to refuse."""
    lines = SAMPLE.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


@pytest.mark.thorough
def test_pyright_sees_them_too(tmp_path):
    shutil.copy(SAMPLE, tmp_path)
    settings = {"include": [SAMPLE.name], "extraPaths": [str(Path(ig.__file__).parents[1])]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert {d["range"]["start"]["line"] + 1 for d in found if d["severity"] == "error"} == wrong_lines(), done.stdout
