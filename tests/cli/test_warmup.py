"""`isograd warmup`, and `isograd verify` where kernels have to be compiled: other processes compile them."""

import multiprocessing

import pytest

from isograd.cli import ahead, suites
from isograd.runtime import compilation, parallel

ONE = ("--operation", "index_select", "--dtype", "float32")


def test_a_process_compiles(cli):
    result = cli("warmup", *ONE)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Kernels of 1 of 1 operations and dtypes are compiled, in ")
    assert multiprocessing.active_children() == []


@pytest.mark.thorough
def test_verify_has_nothing_left_to_compile(cli_process, cli, monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    limits = [part for name in ("softmax_backward", "top_k") for part in ("--operation", name)] + ["--dtype", "float32"]
    assert cli("warmup", *limits).exit_code == 0
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    assert kept
    assert cli_process("verify", "--json", *limits)["passed"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == kept


def test_what_fails_is_named(cli, monkeypatch):
    monkeypatch.setattr(ahead.Pool, "start", lambda pool, given: list(given))
    monkeypatch.setattr(ahead, "outcomes", lambda given: [(problem, "ValueError: no such thing") for problem in given])
    result = cli("warmup", *ONE)
    assert result.exit_code == 1
    assert "Kernels of 0 of 1" in result.stdout
    assert "not compiled: index_select float32: ValueError: no such thing" in result.stdout


def test_an_error_is_told_and_processes_end_with_the_block():
    unknown = ahead.Problem("nothing", "float32", "cpu")
    with ahead.Pool(1) as pool:
        assert list(ahead.outcomes(pool.start([unknown]))) == [(unknown, "KeyError: 'nothing'")]
        assert len(multiprocessing.active_children()) == 1
    assert multiprocessing.active_children() == []


def test_an_interrupt_says_what_was_done(cli, monkeypatch):
    def interrupted(given):
        yield given[0], ""
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead.Pool, "start", lambda pool, given: list(given))
    monkeypatch.setattr(ahead, "outcomes", interrupted)
    result = cli("warmup", "--operation", "softmax", "--operation", "attention")
    assert result.exit_code == 130
    count = sum(len(suites.SUITES[name].dtypes) for name in ("softmax", "attention"))
    assert f"Kernels of 1 of {count} operations and dtypes are compiled" in result.stdout
    assert "Interrupted. Compiling kernels: 1 of" in result.stderr


def test_processes_help_verify_where_kernels_are_compiled(cli, monkeypatch):
    """They begin with what comes last here, and only where there is something to compile."""
    started = []
    spent = [0.0]

    def verified(entry, *_):
        spent[0] += 2 if entry.dtype == "float16" else 0

    monkeypatch.setattr("isograd.cli.verify.verify_kernel", verified)
    monkeypatch.setattr(compilation, "seconds", lambda: spent[0])
    monkeypatch.setattr(ahead.Pool, "start", lambda pool, given: started.append(list(given)))
    monkeypatch.setattr(parallel, "get_num_threads", lambda: 2)
    cli("verify", "--operation", "softmax", "--dtype", "float32", "--dtype", "float64")
    assert not started
    monkeypatch.setattr(ahead.Pool, "started", property(lambda pool: bool(started)))
    cli("verify", "--operation", "softmax")
    assert started == [[ahead.Problem("softmax", dtype, "cpu") for dtype in ("float64", "float32", "bfloat16")]]
