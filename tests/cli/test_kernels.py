"""`isograd kernels`, and what is common to all commands."""

import json
import subprocess
import sys

import isograd as ig
from isograd.cli.progress import Activity, message_console
from isograd.cli.suites import SUITES
from isograd.numerics.numba_compile import kernel as compiled
from isograd.softmax.plans import NumbaSoftmax


def test_table(cli):
    result = cli("kernels")
    assert result.exit_code == 0
    for word in ("softmax, cpu", "log_softmax_backward", "bfloat16", "numba", "all 4", "2 ulp(y) + n·q·y"):
        assert word in result.stdout


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
    }
    row = rows[0]
    assert row.keys() == {
        "operation", "dtype", "device", "kernel", "backend", "priority", "arch", "layout", "precision_guarantee",
    }  # fmt: skip
    assert row["precision_guarantee"]["deterministic"] is True
    assert row["precision_guarantee"]["error_bound"].startswith("ulp(y)/2")


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
    finally:
        ig.unregister_kernel("softmax", "cpu", "float32", "other")
        ig.unregister_kernel("sparsemax", "cpu", "float32", "other")
    others = [r for r in rows if r["kernel"] == "other"]
    assert [(r["operation"], r["priority"]) for r in others] == [("softmax", 7), ("sparsemax", 0)]
    assert "precision_guarantee" not in others[0]
    assert "sparsemax" in table


def test_version(cli):
    result = cli("--version")
    assert result.exit_code == 0
    assert result.stdout == f"isograd {ig.__version__}\n"


def test_help_names_the_commands(cli):
    result = cli("--help")
    for command in ("verify", "kernels", "bench", "demo"):
        assert command in result.stdout


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
