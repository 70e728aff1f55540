"""`isograd doctor` says what is there, and what to do about it."""

import importlib.metadata
import json
import os

import numpy as np
import pytest

from isograd.cli import doctor


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No setting that it complains of, and folders of this test."""
    for name in doctor.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name in ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


@pytest.fixture
def versions(monkeypatch):
    """Pretend that packages have other versions, or are not installed, and that isograd's metadata asks for some."""
    real = importlib.metadata.version

    def pretend(requires, **found):
        def version(name):
            if name in found:
                if found[name] is None:
                    raise importlib.metadata.PackageNotFoundError(name)
                return found[name]
            return real(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)

    return pretend


def test_a_machine_without_problems(cli, clean):
    folder = clean / "NUMBA_CACHE_DIR/softmax_1"
    folder.mkdir(parents=True)
    (folder / "kernel.nbc").write_bytes(bytes(3_000_000))
    result = cli("doctor")
    assert result.exit_code == 0, result.stdout
    lines = result.stdout.splitlines()
    assert lines[0].startswith("isograd ")
    assert f"  numpy         {np.__version__}" in lines
    assert f"  cpu           1 files, 3.0 MB in {clean / 'NUMBA_CACHE_DIR'}" in lines
    assert lines[-1] == "Nothing has to be done. `isograd verify` checks the bits."


def test_settings_that_hurt_are_named(cli, clean, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "0")
    result = cli("doctor", "--json")
    assert result.exit_code == 1
    (advice,) = json.loads(result.stdout)["advice"]
    assert advice.startswith("TRITON_INTERPRET is set: ")


@pytest.mark.usefixtures("clean")
def test_an_old_package_is_named_with_what_to_install(cli, versions):
    versions(["numpy>=2.0", "numba>=0.63", 'torch>=2.11; extra == "torch"'], numpy="1.26.4", numba="0.63.0", torch=None)
    result = cli("doctor")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-2:] == [
        "what to do",
        "  numpy 1.26.4 is older than isograd needs: pip install 'numpy>=2.0'",
    ]
    assert "  torch         not installed" in result.stdout


@pytest.mark.parametrize(
    ("have", "least", "old"),
    [("2.9.1", "2.11", True), ("2.11.0+cpu", "2.11", False), ("2.14.0a1", "2.11", False), ("3", "2.11", False)],
)
def test_versions_are_compared_as_numbers(versions, have, least, old):
    versions([f"torch>={least}"])
    assert bool(list(doctor._old({"torch": have}))) == old


def test_a_cache_that_others_can_write_is_named(cli, clean):
    folder = clean / "NUMBA_CACHE_DIR"
    folder.mkdir()
    folder.chmod(0o777)
    assert "every user can write there" in cli("doctor").stdout
    folder.chmod(0o755)
    assert cli("doctor").exit_code == 0


def test_a_cache_that_cannot_be_written_is_named(cli, clean, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(clean)) and real(path, mode))
    report = json.loads(cli("doctor", "--json").stdout)
    assert [line for line in report["advice"] if "cannot be written, so kernels are compiled" in line]


@pytest.mark.parametrize("kind", ["file", "below a file", "broken link"])
def test_a_cache_that_cannot_be_a_folder_is_named(cli, clean, monkeypatch, kind):
    place = clean / "NUMBA_CACHE_DIR"
    place.symlink_to(clean / "missing") if kind == "broken link" else place.touch()
    if kind == "below a file":
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(place / "folder"))
    result = cli("doctor")
    assert result.exit_code == 1, result.stdout
    assert "cannot be written, so kernels are compiled" in result.stdout


def test_files_that_vanish_are_left_out(cli, clean):
    folder = clean / "TRITON_CACHE_DIR"
    folder.mkdir()
    (folder / "moved").symlink_to(clean / "missing")
    (folder / "kernel").write_bytes(bytes(10))
    assert doctor._cache("cuda", folder)[2:] == (1, 10, None)
