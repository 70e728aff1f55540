"""Kernels are kept on disk: what was damaged is compiled again, what cannot be kept too, and the user is told."""

import errno
import fcntl
import importlib.util
import itertools
import logging
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest
from numba.core.codegen import JITCodeLibrary

from isograd.runtime import compilation, numba_compile

SOURCE = "def double(x):\n    return x + x\n"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that makes a kernel as another process would, with the folder of its cache."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(numba_compile, "_warned", False)
    for name, value in (("_begun", False), ("_warned", False), ("_seconds", 0.0), ("_since", None)):
        monkeypatch.setattr(compilation, name, value)
    source = tmp_path / "doubling.py"
    source.write_text(SOURCE)
    numbers = itertools.count()

    def make():
        spec = importlib.util.spec_from_file_location(f"doubling{next(numbers)}", source)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # code from the cache imports it
        spec.loader.exec_module(module)
        return numba_compile.kernel(module.double)

    return make


def found(kernel):
    """Whether the kernel's code came from the cache."""
    assert kernel(3) == 6
    return bool(kernel.stats.cache_hits)


def entries(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_second_process_finds_the_kernel(made, tmp_path, recwarn):
    assert not found(made())
    (entry,) = entries(tmp_path)
    assert found(made())
    kernel = made()
    assert kernel(1.5) == 3.0  # another signature has a file of its own
    assert len(entries(tmp_path)) == 2
    assert entry in entries(tmp_path)
    assert not recwarn.list


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:40],
        lambda content: content[:-1],
        lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content[:64] + pickle.dumps(Unpickled()),
    ],
    ids=["empty", "short", "truncated", "bit of the code", "bit of the checksum", "another pickle"],
)
def test_a_damaged_file_is_compiled_again(damage, made, tmp_path):
    assert not found(made())
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))

    def twice():
        assert not found(made())
        entry.write_bytes(b"")
        assert not found(made())

    with pytest.warns(RuntimeWarning, match="is damaged; compiling instead") as warned:
        twice()
    assert len(warned) == 1
    assert str(entry.parent) in str(warned[0].message)
    assert found(made())


class Unpickled:
    """Ends the test if anything unpickles it."""

    def __reduce__(self):
        return pytest.exit, ("a damaged file was unpickled",)


def test_a_file_that_cannot_be_read(made, tmp_path):
    assert not found(made())
    (entry,) = entries(tmp_path)
    entry.unlink()
    entry.mkdir()
    with pytest.warns(RuntimeWarning, match=r"cannot be (read|written)") as warned:
        assert not found(made())
    assert len(warned) == 1


def test_a_full_disk(made, tmp_path, monkeypatch):
    write = Path.write_bytes

    def full(path, content):
        write(path, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(RuntimeWarning, match="cannot be written \\(No space left on device\\)") as warned:
        assert [found(made()) for _ in range(2)] == [False, False]
    assert len(warned) == 1
    assert str(tmp_path / "cache") in str(warned[0].message)
    assert entries(tmp_path) == []  # no piece is left behind


def test_a_changed_source_is_compiled_again_in_silence(made, tmp_path, monkeypatch, recwarn):
    assert not found(made())
    monkeypatch.setattr(numba_compile, "_source_digest", lambda: "another version")
    assert not found(made())
    assert found(made())
    assert len(entries(tmp_path)) == 1  # in the place of the old one
    assert not recwarn.list


# --- what is said ----------------------------------------------------------------------------------------------------
def test_compilation_is_announced_once_and_loading_is_not(made, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "isograd"):
        found(made())
        made()(1.5)
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert str(tmp_path / "cache") in record.getMessage()
        caplog.clear()
        found(made())
        assert caplog.records == []


def test_a_long_compilation_is_a_warning(made, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(compilation, "_LONG", 0.0)
    with caplog.at_level(logging.WARNING, "isograd"):
        found(made())
        made()(1.5)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(tmp_path / "cache") in record.getMessage()


def test_seconds_add_up_to_a_warning(made, caplog):
    with caplog.at_level(logging.WARNING, "isograd"):
        compilation.add(1.5, "GPU", "/somewhere")
        assert caplog.records == []
        compilation.add(1.0, "GPU", "/somewhere")
        compilation.add(1.0, "GPU", "/somewhere")
    (record,) = caplog.records
    assert "2 seconds" in record.getMessage()
    assert "/somewhere" in record.getMessage()


def test_processes_that_need_a_kernel_at_once_compile_it_once(made, tmp_path):
    assert not found(made())
    (entry,) = entries(tmp_path)
    code = entry.read_bytes()
    entry.unlink()
    with open(f"{entry}.lock", "ab") as turn, ThreadPoolExecutor(1) as pool:
        fcntl.flock(turn, fcntl.LOCK_EX)  # another process compiles it
        waiting = pool.submit(found, made())
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        entry.write_bytes(code)
        fcntl.flock(turn, fcntl.LOCK_UN)
        assert waiting.result(timeout=60)
    assert entries(tmp_path) == [entry]


def test_nobody_waits_for_ever(made, tmp_path, monkeypatch):
    monkeypatch.setattr(numba_compile, "_PATIENCE", 0.1)
    assert not found(made())
    (entry,) = entries(tmp_path)
    entry.unlink()
    with open(f"{entry}.lock", "ab") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        assert not found(made())
    assert entries(tmp_path) == [entry]


def test_machine_code_is_made_of_kernels_alone(tmp_path, monkeypatch):
    """What kernels call is linked into them: machine code of its own would take a fifth of the time of compiling."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    made = []
    finalize = JITCodeLibrary._finalize_specific

    def finalize_specific(library):
        made.append(library.name)
        finalize(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", finalize_specific)
    twice = numba_compile.device_function(lambda x: x + x)
    thrice = numba_compile.subroutine(lambda x: twice(x) + x)

    def total(x):
        return twice(x) + thrice(x)

    assert numba_compile.kernel(total)(4) == 20
    (name,) = made
    assert "total" in name
    kernel = numba_compile.kernel(total)
    assert kernel(4) == 20
    assert kernel.stats.cache_hits


LONG = "\n".join(f"        x = (x ^ (x >> {k % 13 + 1})) * {2 * k + 3} + n" for k in range(80))
NAMESAKES = f"""
from isograd.runtime.numba_compile import kernel, subroutine

def made(n):
    @subroutine
    def long(x):
{LONG}
        return x
    return long

one, two = made(1), made(2)

@kernel
def first(x):
    return one(x) + one(x + 1)

@kernel
def second(x):
    return two(x) + two(x + 1)
"""


def test_functions_of_one_name_in_kernels_of_several_processes(tmp_path):
    """What kernels call is their own, also where Numba's names for it are the same."""
    (tmp_path / "namesakes.py").write_text(NAMESAKES)
    paths = (str(tmp_path), str(Path(numba_compile.__file__).parents[2]))
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(paths)}

    def printed(names):
        script = f"import namesakes as n; print({', '.join(f'n.{name}(5)' for name in names)})"
        command = [sys.executable, "-W", "ignore", "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    alone = [*printed(["first"]), *printed(["second"])]
    assert alone[0] != alone[1]
    assert printed(["first", "second"]) == alone
    assert printed(["second", "first"]) == alone[::-1]
