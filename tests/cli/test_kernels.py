"""`isograd kernels`, and what is common to all commands."""

import json
import re
import subprocess
import sys
import time

import pytest
from softmax_kernel import NumbaSoftmax

import isograd as ig
from isograd.cli import progress
from isograd.cli.progress import Activity, message_console
from isograd.cli.suites import SUITES
from isograd.runtime.numba_compile import kernel as compiled


def test_every_operation_has_a_line(cli):
    result = cli("kernels")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:4] == ["operation", "cpu", "cuda", "mps"]
    assert {line.split()[0] for line in lines[1 : 1 + len(SUITES)]} == set(SUITES)
    assert "linear_cross_entropy          blas,order_free  triton,order_free" in result.stdout  # in the order of choice
    assert len(lines) < len(SUITES) + 10
    assert max(map(len, lines)) <= 90


def test_an_operation_in_detail(cli):
    result = cli("kernels", "--operation", "softmax", "--operation", "attention")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for line in (
        "softmax",
        "  cpu, numba: float16 bfloat16 float32 float64",
        "    same bits: run, batch, order, machine",
        "    bound: 2 ulp(y) + n·q·y; 16 bits: ulp(y)/2 + (2^-15 + n·q/2)·y",
        "attention",
        "    same bits: run, batch",
    ):
        assert line in lines
    assert max(map(len, lines)) <= 90
    assert "log_softmax" not in result.stdout


def test_filters(cli):
    def listed(*options):
        rows = json.loads(cli("kernels", "--json", *options).stdout)["kernels"]
        return {(r["operation"], r["device"], r["dtype"]) for r in rows}

    everything = listed()
    assert listed("--device", "cuda") == {r for r in everything if r[1] == "cuda"} != set()
    assert listed("--operation", "top_k", "--dtype", "int32", "--dtype", "float16") == {
        r for r in everything if r[0] == "top_k" and r[2] in ("int32", "float16")
    }
    assert cli("kernels", "--device", "cpu").stdout.splitlines()[0].split() == ["operation", "cpu"]
    assert listed("--device", "mps", "--dtype", "float64") == set()
    assert cli("kernels", "--device", "mps", "--dtype", "float64").stdout == "No kernel is registered for these.\n"


@pytest.mark.parametrize(("option", "accepted"), [("--device", "mlx"), ("--operation", "top_k"), ("--dtype", "uint32")])
def test_unknown_values_of_filters(cli, option, accepted):
    result = cli("kernels", option, "abacus")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"isograd: {option} is 'abacus'; accepted: ")
    assert accepted in result.stderr
    assert result.stderr.count("\n") == 1


def test_json(cli):
    rows = json.loads(cli("kernels", "--json").stdout)["kernels"]
    expected = [(operation, dtype) for operation, suite in SUITES.items() for dtype in suite.dtypes]
    here = [r for r in rows if r["device"] == "cpu"]
    assert list(dict.fromkeys((r["operation"], r["dtype"]) for r in here)) == expected
    several = {r["operation"]: [] for r in here}
    for r in here:
        several[r["operation"]] += [r["kernel"]] * (r["dtype"] == "float32")
    assert {name: kernels for name, kernels in several.items() if len(kernels) > 1} == {
        # in the order of choice
        "linear_cross_entropy": ["blas", "order_free"],
        "linear_cross_entropy_gradient": ["blas", "order_free"],
        "matmul": ["numba", "blas"],
    }
    row = next(r for r in rows if r["operation"] == "softmax")
    assert row.keys() == {
        "operation", "dtype", "device", "kernel", "backend", "priority", "arch", "layout", "precision_guarantee",
    }  # fmt: skip
    assert row["precision_guarantee"]["deterministic"] is True
    assert row["precision_guarantee"]["error_bound"].startswith("2 ulp(y)")


def test_metal_kernels_are_listed_with_the_reason_why_they_are_not_here(cli):
    rows = json.loads(cli("kernels", "--json").stdout)["kernels"]
    for device in ("mps", "mlx"):
        found = {(r["operation"], r["dtype"]) for r in rows if (r["device"], r["kernel"]) == (device, "metal")}
        assert found >= {("softmax", "bfloat16"), ("take_along_axis_backward", "float32"), ("moe_router", "float16")}
        assert ("softmax", "float64") not in found
    assert all("unavailable" in r for r in rows if r["kernel"] == "metal")


class Other(NumbaSoftmax):
    name = "other"

    def reject(self, descriptor):
        return "never"


def test_kernels_of_others(cli):
    ig.register_kernel("softmax", "cpu", "float32", Other(), priority=7)
    ig.register_kernel("sparsemax", "cpu", "float32", Other())
    try:
        rows = json.loads(cli("kernels", "--json").stdout)["kernels"]
        table = cli("kernels").stdout
        details = cli("kernels", "--operation", "sparsemax", "--operation", "softmax", "--device", "cpu").stdout
    finally:
        ig.unregister_kernel("softmax", "cpu", "float32", "other")
        ig.unregister_kernel("sparsemax", "cpu", "float32", "other")
    others = [r for r in rows if r["kernel"] == "other"]
    assert [(r["operation"], r["priority"]) for r in others] == [("softmax", 7), ("sparsemax", 0)]
    assert "precision_guarantee" not in others[0]
    assert re.search(r"^softmax +other,numba ", table, re.MULTILINE)
    assert "  cpu, other: float32\n    backend: numba" in details
    assert "priority 7" in details
    assert "not on this machine: never" in details


def test_version(cli):
    result = cli("--version")
    assert result.exit_code == 0
    assert result.stdout == f"isograd {ig.__version__}\n"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_the_commands_and_what_options_accept(cli, option):
    result = cli(option)
    for command in ("verify", "kernels", "bench", "demo"):
        assert command in result.stdout
        assert "Usage: " in cli(command, option).stdout
    for command in ("verify", "kernels"):
        said = cli(command, option).stdout
        for accepted in ("mps", "load_balancing_loss_backward", "uint32"):
            assert accepted in said
    assert "cpu, cuda" in cli("bench", option).stdout


@pytest.mark.parametrize(
    "command",
    [
        "--help", "kernels", "kernels --json", "kernels --operation moe_router_backward --device cpu",
        "verify --operation expert_counts --dtype int32", "bench --device tpu",
        "bench -h", "demo --epochs 1 --output {}",
    ],
)  # fmt: skip
def test_commands_on_a_terminal_without_unicode(cli, tmp_path, command):
    if command.startswith("demo"):
        pytest.importorskip("sklearn")
    result = cli(*command.format(tmp_path).split(), encoding="ascii")
    assert result.exit_code == (2 if "--device tpu" in command else 0), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if "operation moe" in command:
        assert "eta: half the smallest subnormal" in " ".join(result.stdout.split())


def test_formulas_are_spelled_where_the_encoding_lacks_their_characters(run_python):
    code = """
    from isograd.cli.main import app
    app(["kernels", "--operation", "softmax_backward", "--device", "cpu"])
    """
    said = run_python(code, PYTHONIOENCODING="ascii")
    assert "bound: 4u*|y|*(|dy| + sum |y*dy|) + |y|*n*(q/2 + eta) + ulp(dx)/2" in said


def test_the_command_imports_no_optional_package():
    code = "import sys, isograd.cli.main; print([m for m in ('torch', 'matplotlib', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def run_counting(monkeypatch, tmp_path, capsys):
    source = tmp_path / "counting.py"
    source.write_text("def twice(x):\n    return 2 * x\n")
    namespace = {"__name__": "counting"}
    exec(compile(source.read_text(), str(source), "exec"), namespace)
    monkeypatch.setenv("COLUMNS", "200")
    function = compiled(namespace["twice"])
    with Activity(message_console(), "Trying", 1) as activity:
        assert function(21) == 42
        activity.step("done")
    return function, capsys.readouterr().err


def test_compilation_is_announced_once_and_only_where_it_happens(monkeypatch, tmp_path, capsys):
    function, said = run_counting(monkeypatch, tmp_path, capsys)
    assert said.count("Compiling kernels that this machine has not used yet") == 1
    with Activity(message_console(), "Again", 1):
        assert function(4) == 8
    assert capsys.readouterr().err == ""


def test_without_a_terminal_progress_is_told_in_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_INTERVAL", 0.02)
    with Activity(message_console(), "Trying", 3) as activity:
        activity.step("the first of them")
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) > 2
    assert set(said) <= {"Trying: 1 of 3, 0:00, the first of them", "Trying: 0 of 3, 0:00, "}
    time.sleep(0.1)
    assert capsys.readouterr().err == "", "it goes on after the end"


def test_an_interrupt_is_told_with_what_was_done(capsys):
    with progress.until_interrupted() as caught, Activity(message_console(), "Trying", 3) as activity:
        activity.step("the first of them")
        raise KeyboardInterrupt
    assert len(caught) == 1
    assert capsys.readouterr().err == "Interrupted. Trying: 1 of 3, 0:00, the first of them\n"
