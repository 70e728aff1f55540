"""Fixtures that every folder of tests shares."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import isograd


@pytest.fixture
def restore_threads():
    """Put the number of threads back that was in force before the test."""
    before = isograd.get_num_threads()
    yield
    isograd.set_num_threads(before)


@pytest.fixture(scope="session")
def run_python():
    """A function that runs code in a fresh interpreter, with this copy of the library, and returns what it prints.

    Keywords set variables of the environment; None removes one.
    """

    def run(code, *, timeout=120, **environment):
        merged = os.environ | {"PYTHONPATH": str(Path(isograd.__file__).parents[1])} | environment
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={name: value for name, value in merged.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
