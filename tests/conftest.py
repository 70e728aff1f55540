"""Fixtures that every folder of tests shares."""

import atexit
import functools
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# The workers of pytest-xdist take every core. More threads of BLAS and OpenMP than one each would wait for each other,
# busily. Set before NumPy is imported; the library's own threads are not concerned.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

from choices import has_other_dtype
from untraced import leave_out_compilers

import isograd

# Folders that test every dtype in every run: the arithmetic itself, and what compiled kernels do on a GPU.
EVERY_DTYPE = {"elementwise", "gpu", "numerics", "reduction"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the other dtypes, and order the files.

    The long files first, so that workers end together; then files of one family apart.

    Two workers that met the same kernels at the same time would both compile them.
    """
    files = {}
    for item in items:
        if item.path.parent.name not in EVERY_DTYPE and has_other_dtype(item):
            item.add_marker(pytest.mark.thorough)
        files.setdefault(item.path, []).append(item)
    folders = {}
    for path in files:
        folders.setdefault(path.parent, []).append(path)

    def rank(path):
        return ("triton" not in path.name and path.name != "test_verify.py", folders[path.parent].index(path))

    items[:] = [item for path in sorted(files, key=rank) for item in files[path]]


def pytest_collection_finish():
    if sys.gettrace() is not None:
        leave_out_compilers()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Let a worker end at once: pytest-xdist interrupts one that takes more than five seconds after its last test.

    pytest collects garbage in the end. With torch, Numba and all kernels loaded that can take longer on a busy machine,
    and the interrupt came out as a warning of a KeyboardInterrupt that no test had raised.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.freeze()
        atexit.register(gc.unfreeze)  # for the interpreter's own end: what bindings hold would be called leaked


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


@pytest.fixture(scope="session")
def interpret():
    """A function that runs suites of a script under Triton's interpreter, all in one process.

    It returns {suite: (cases, cases that differ)} and what was said about those.
    """

    @functools.cache
    def run(script, *suites, exhaustive):
        paths = [str(Path(isograd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(script), *suites, *(["--exhaustive"] if exhaustive else [])],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        found = [line.split() for line in done.stdout.splitlines()]
        return {name: (int(cases), int(wrong)) for name, cases, wrong in found}, done.stderr

    return run
