"""`isograd bench`: files, fairness of the comparison, and what happens without the optional packages."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
from isograd.cli import measure


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(measure, "QUICK_SHAPES", (((40, 30), 1), ((3, 20, 10), 1)))
    monkeypatch.setattr(measure, "COPY_BYTES", 1 << 16)


def load(folder):
    (path,) = folder.glob("cpu-*.json")
    return path, json.loads(path.read_text())


@pytest.mark.thorough
def test_quick_writes_files(cli, tmp_path, tiny):
    pytest.importorskip("matplotlib")
    torch = pytest.importorskip("torch")
    result = cli("bench", "--quick", "--output", tmp_path / "results")
    assert result.exit_code == 0, result.stdout + result.stderr
    path, report = load(tmp_path / "results")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["threads"] == ig.get_num_threads()
    assert report["quick"] is True
    assert len(report["results"]) == 4 * 2 * 2
    for row in report["results"]:
        assert row["gb_per_s"].keys() == {"isograd", "torch", "NumPy"}
        assert row["times_as_fast_as"].keys() == {"torch", "NumPy"}
        assert row["fraction_of_copy"] > 0
    assert "3 x 20 x 10, axis 1" in result.stdout
    assert "log_softmax_backward, bfloat16" in result.stdout


def test_without_torch_and_matplotlib(cli, tmp_path, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    result = cli("bench", "--quick", "--output", tmp_path)
    assert result.exit_code == 0
    said = " ".join(result.stderr.split())
    assert "PyTorch is not installed" in said
    assert "pip install 'isograd[bench]'" in said
    path, report = load(tmp_path)
    assert not path.with_suffix(".png").exists()
    assert report["results"][0]["gb_per_s"].keys() == {"isograd", "NumPy"}


@pytest.mark.parametrize("operation", measure.OPERATIONS)
@pytest.mark.parametrize("dtype", measure.DTYPES)
def test_contenders_compute_the_same(operation, dtype):
    torch = pytest.importorskip("torch")
    inputs, out = measure._operands(operation, dtype, (6, 50, 7), 1)
    expected = getattr(ig, operation)(*inputs, axis=1).astype(np.float64)
    for make in (lambda: measure.numpy_call(operation, inputs, out, 1),
                 lambda: measure.torch_call(torch, operation, inputs, out, 1)):  # fmt: skip
        out[...] = 0
        make()()
        assert out.astype(np.float64) == pytest.approx(expected, rel=0.02, abs=0.02)


def test_bytes_and_ratios():
    result = measure.Result(
        "softmax", "float32", (10, 5), 1, 2_000_000_000, {"isograd": 0.5, "torch": 1.0, "copy": 1.0}
    )
    assert result.bandwidth("isograd") == 4
    assert result.ratio("torch") == 2
    assert result.ratio("NumPy") is None
    assert result.bandwidth("NumPy") is None


def test_turns_rotate():
    order = []
    contenders = {name: (lambda n=name: order.append(n), count) for name, count in (("a", 3), ("b", 3), ("c", 1))}
    times = measure.interleaved(contenders)
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 1}
    assert "".join(order) == "abc" + "abc" + "ba" + "ab"


def test_operands_have_the_dtype():
    inputs, out = measure._operands("softmax_backward", "bfloat16", (4, 8), 1)
    assert {a.dtype for a in (*inputs, out)} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.parametrize(
    ("model", "stem"),
    [
        ("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz", "cpu-intel-xeon-platinum-8488c"),
        ("AMD EPYC 9B14 96-Core Processor", "cpu-amd-epyc-9b14-96-core"),
        ("Apple M3 Pro", "cpu-apple-m3-pro"),
    ],
)
def test_file_names(model, stem):
    assert measure.file_stem(model) == stem


def test_machine():
    assert measure.machine(None)["torch"] is None
    assert measure.cpu_model()


def refused(result, *fragments):
    assert result.exit_code == 2
    assert result.stderr.startswith("isograd: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert [f for f in fragments if f not in result.stderr] == []


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(cli, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(measure, "problems", lambda quick: pytest.fail("it began to measure"))
    file = tmp_path / "file"
    file.write_text("")
    folder = file if kind == "a file" else file / "folder"
    refused(cli("bench", "--output", folder), f"--output is '{folder}'", "expected a writeable folder")


def test_results_that_cannot_be_written_in_the_end_are_shown(cli, tmp_path, tiny):
    (tmp_path / (measure.file_stem(measure.cpu_model()) + ".json")).mkdir()
    result = cli("bench", "--quick", "--output", tmp_path)
    assert "log_softmax_backward, bfloat16" in result.stdout
    assert result.exit_code == 2
    assert "could not be written (Is a directory); the results are above" in result.stderr
    assert "Traceback" not in result.output


def test_an_interrupted_run_keeps_its_results(cli, tmp_path, tiny, monkeypatch):
    measured, seen = measure.Bench.measure, []

    def interrupted(self, *problem):
        if len(seen) == 3:
            raise KeyboardInterrupt
        seen.append(problem)
        return measured(self, *problem)

    monkeypatch.setattr(measure.Bench, "measure", interrupted)
    result = cli("bench", "--quick", "--output", tmp_path)
    assert result.exit_code == 130
    assert "Interrupted. Measuring: 4 of 16" in result.stderr
    assert "softmax, bfloat16" in result.stdout
    _, report = load(tmp_path)
    assert report["interrupted"] is True
    assert len(report["results"]) == 3


def test_a_busy_machine_is_named_and_compared_with_nothing(cli, tmp_path, tiny, monkeypatch):
    times = iter([1.0] + [2.0] * 15)
    monkeypatch.setattr(measure, "spread", lambda seconds: next(times))
    result = cli("bench", "--quick", "--output", tmp_path)
    assert result.exit_code == 0
    assert "The machine was busy: in 15 of 16 rows" in result.stdout
    assert result.stdout.count(" busy ") == 2 * 15
    _, report = load(tmp_path)
    assert [row["copy_spread"] for row in report["results"]] == [1.0] + [2.0] * 15


def test_spread():
    assert measure.spread([1.0] * 19 + [50.0, 0.01]) == 1
    assert measure.spread([1.0] * 5 + [3.0] * 5) == 3


def test_a_device_that_is_not_there_is_named(cli):
    result = cli("bench", "--device", "tpu")
    assert result.exit_code == 2
    assert "accepted: cpu, cuda" in result.stdout + result.stderr
