"""`isograd verify`: passes as published, and finds every kind of fault that is planted."""

import json
from dataclasses import replace

import numpy as np
import pytest
from softmax_kernel import NumbaSoftmax

import isograd as ig
from isograd.cli import check, devices, suites
from isograd.cli.devices import DEVICES
from isograd.core import registry
from isograd.gather.plans import COPIES
from isograd.runtime import parallel

ONE = ("--operation", "softmax", "--dtype", "float32")
SOME = ("softmax_backward", "cross_entropy", "index_sum", "moe_combine")  # one of each family that sums
EXACT = (*COPIES, "top_k", "expert_counts", "expert_permutation", "moe_permute")  # nothing is rounded


class Faulty(NumbaSoftmax):
    """The library's kernel, and then a fault."""

    name = "faulty"
    priority = 10

    def __init__(self, spoil):
        self._spoil = spoil

    def launch(self, descriptor, arguments, workspace, stream):
        super().launch(descriptor, arguments, workspace, stream)
        self._spoil(descriptor, arguments)


@pytest.fixture
def plant():
    """Register a faulty kernel for softmax in float32."""
    planted = []

    def register(kernel):
        ig.register_kernel("softmax", "cpu", "float32", kernel, priority=10)
        planted.append(kernel.name)

    yield register
    for name in planted:
        ig.unregister_kernel("softmax", "cpu", "float32", name)


def reports(result):
    return {k["kernel"]: k for k in json.loads(result.stdout)["kernels"]}


def checks(report):
    return {f["check"] for f in report["failures"]}


# Sums, copies, a choice, products of matrices, and bits that are the machine's. `.ci/run` verifies everything.
ATTENTION = ("attention", "attention_backward", "attention_with_cache")
FEW = (*SOME, "index_select", "top_k", "attention", "linear_cross_entropy", "matmul")


@pytest.mark.parametrize(
    ("operations", "dtypes"),
    [(FEW, ("float32",)), pytest.param((), (), marks=pytest.mark.exhaustive)],
    ids=["few", "all"],
)
def test_kernels_are_as_published(cli, operations, dtypes):
    limits = [part for name in operations for part in ("--operation", name)]
    limits += [part for name in dtypes for part in ("--dtype", name)]
    result = cli("verify", "--json", *limits)
    found = json.loads(result.stdout)
    assert [f for k in found["kernels"] for f in k["failures"]] == []
    assert result.exit_code == 0
    assert found["passed"]
    assert found["not_verified"] == []
    assert {(k["operation"], k["dtype"]) for k in found["kernels"]} >= {
        (operation, dtype) for operation in operations or suites.SUITES
        for dtype in dtypes or suites.SUITES[operation].dtypes
    }  # fmt: skip
    for kernel in found["kernels"]:
        suite = suites.SUITES[kernel["operation"]]
        assert kernel["cases"] >= 5
        own = kernel["kernel"] == "blas" and "linear" in kernel["operation"]  # whose bits are the machine's
        attention = kernel["kernel"] == "numba" and kernel["operation"] in ATTENTION
        promised = 0 if own or attention or suite.reference is None else kernel["cases"]
        assert kernel["digests_checked"] == kernel["digests_equal"] == promised == len(kernel["sha256"])
        invariances = {"threads"} if own else {"threads", *suite.changes} - ({"order"} if attention else set())
        assert kernel["invariances"].keys() == invariances
        assert all(kernel["invariances"].values())
        if kernel["operation"] in EXACT:
            assert kernel["worst"] == 0
        elif check.WIDE_ORACLE:
            # A bound that nothing comes near, or an error that was not measured, would be no check.
            assert (0.2 if "softmax" in kernel["operation"] else 0.02) < kernel["worst"] <= 1, kernel["operation"]


def test_json(cli):
    found = json.loads(cli("verify", "--json", *ONE).stdout)
    assert found.keys() == {
        "isograd", "device", "machine", "threads", "passed", "interrupted", "seconds", "not_verified", "kernels",
    }  # fmt: skip
    (kernel,) = found["kernels"]
    assert kernel.keys() == {
        "operation", "dtype", "device", "kernel", "cases", "skipped", "worst", "worst_case", "bound_kept",
        "invariances", "digests_checked", "digests_equal", "unpromised_checked", "unpromised_equal", "sha256",
            "failures",
    }  # fmt: skip
    assert found["isograd"] == ig.__version__


def test_table(cli):
    result = cli("verify", *ONE)
    assert result.exit_code == 0
    assert "All as promised" in result.stdout
    assert "24 of 24" in result.stdout
    assert "all 5" in result.stdout


def test_threads_are_restored(cli):
    before = parallel.get_num_threads()
    cli("verify", *ONE)
    assert parallel.get_num_threads() == before


def test_altered_published_digest(cli, monkeypatch):
    altered = check.published()
    known = altered["results"]["softmax"]["float32"]
    known["64 x 256"] = known["64 x 256"][::-1]
    monkeypatch.setattr("isograd.cli.verify.published", lambda: altered)
    result = cli("verify", *ONE)
    assert result.exit_code == 1
    assert "23 of 24" in result.stdout
    assert "case '64 x 256', digest: SHA-256 is" in result.stdout
    assert "please report it at https://" in result.stdout


def test_missing_published_digest(cli, monkeypatch):
    altered = check.published()
    del altered["results"]["softmax"]["float32"]["-inf"]
    monkeypatch.setattr("isograd.cli.verify.published", lambda: altered)
    result = cli("verify", *ONE)
    assert result.exit_code == 1
    assert "published: none" in result.stdout


def test_other_inputs_are_told_from_wrong_results(cli, monkeypatch):
    monkeypatch.setattr("isograd.ops.softmax.cases.normal", lambda shape, stream: np.zeros(shape))
    result = cli("verify", "--json", *ONE)
    assert result.exit_code == 1
    assert "inputs" in checks(reports(result)["numba"])


def test_a_wrong_bit_fails_the_digest_alone(cli, plant):
    def spoil(descriptor, arguments):
        y = arguments["y"]
        y[y == 1] = np.nextafter(np.float32(1), np.float32(0))  # within the bound

    plant(Faulty(spoil))
    result = cli("verify", "--json", *ONE)
    assert result.exit_code == 1
    assert checks(reports(result)["faulty"]) == {"digest"}
    assert reports(result)["numba"]["failures"] == []


def test_a_large_error_fails_the_bound(cli, plant):
    def spoil(descriptor, arguments):
        arguments["y"][...] *= np.float32(1 + 1e-6)

    plant(Faulty(spoil))
    faulty = reports(cli("verify", "--json", *ONE))["faulty"]
    assert checks(faulty) == {"error bound", "digest"}
    assert faulty["worst"] > 1
    assert not faulty["bound_kept"]
    assert all(faulty["invariances"].values())


def test_a_wrong_special_value_fails_the_bound(cli, plant):
    def spoil(descriptor, arguments):
        np.nan_to_num(arguments["y"], copy=False)

    plant(Faulty(spoil))
    faulty = reports(cli("verify", "--json", *ONE))["faulty"]
    assert checks(faulty) == {"error bound", "digest"}
    assert faulty["worst"] is None
    assert "wrong" in cli("verify", *ONE).stdout


def flip(y):
    bits = y.view(np.int32)
    bits ^= 1


@pytest.mark.parametrize(
    ("invariance", "when"),
    [
        ("threads", lambda d, a: parallel.get_num_threads() == 1),
        ("batch", lambda d, a: d.shape == (1, 256)),
        ("padding", lambda d, a: d.shape[d.axis] in {n + 37 for n in (1, 2, 31, 256)}),
    ],
)
def test_a_broken_invariance_is_named(cli, plant, two_threads, monkeypatch, invariance, when):
    def spoil(descriptor, arguments):
        if when(descriptor, arguments):
            flip(arguments["y"])

    plant(Faulty(spoil))
    result = cli("verify", "--json", *ONE)
    assert result.exit_code == 1
    faulty = reports(result)["faulty"]
    assert checks(faulty) == {invariance}
    assert [name for name, held in faulty["invariances"].items() if not held] == [invariance]
    assert invariance in cli("verify", *ONE).stdout


def test_a_kernel_that_raises_is_reported(cli, plant):
    def spoil(descriptor, arguments):
        raise RuntimeError("out of luck")

    plant(Faulty(spoil))
    result = cli("verify", *ONE)
    assert result.exit_code == 1
    assert "case '6 x 1', run: RuntimeError: out of luck" in result.stdout
    assert "24 of 24" in result.stdout


class PlainSoftmax(NumbaSoftmax):
    """What one would write in NumPy: its sum depends on the order and the layout."""

    name = "plain"

    def launch(self, descriptor, arguments, workspace, stream):
        x, axis = arguments["x"], descriptor.axis
        with np.errstate(all="ignore"):
            e = np.exp(x - x.max(axis=axis, keepdims=True))
            arguments["y"][...] = e / e.sum(axis=axis, keepdims=True)


def test_a_plain_numpy_softmax_is_caught_in_every_way(cli, plant):
    plant(PlainSoftmax())
    plain = reports(cli("verify", "--json", *ONE))["plain"]
    assert {"error bound", "digest", "order", "layout", "padding"} <= checks(plain)


class Modest(PlainSoftmax):
    """Promises neither the order nor other machines, and takes contiguous rows only."""

    name = "modest"

    def reject(self, descriptor):
        return None if len(descriptor.shape) == 2 else "matrices only"

    def sku(self, descriptor):
        sku = super().sku(descriptor)
        modest = replace(
            sku.precision_guarantee, batch_invariant=False, order_invariant=False, bit_stable_across_hardware=False,
            error_bound=ig.ErrorBound("none", lambda x, axis=-1: np.full(x.shape, np.inf)),
        )  # fmt: skip
        return replace(sku, precision_guarantee=modest)


def test_an_interrupted_run_reports_what_it_did(cli, plant):
    def spoil(descriptor, arguments):
        arguments["y"][...] = 0
        if descriptor.shape == (64, 256):
            raise KeyboardInterrupt

    plant(Faulty(spoil))
    result = cli("verify", *ONE)
    assert result.exit_code == 130
    assert "Interrupted. Verifying kernels: 0 of 2, 0:" in result.stderr
    assert "softmax float32: 64 x 256" in result.stderr
    assert "kernel faulty, case '6 x 1', error bound" in result.stdout
    assert "All as promised" not in result.stdout
    found = json.loads(cli("verify", "--json", *ONE).stdout)
    assert (found["interrupted"], found["passed"]) == (True, False)
    (faulty,) = found["kernels"]
    assert faulty["kernel"] == "faulty"
    assert faulty["failures"]


def test_an_interrupted_run_without_failures_has_not_passed(cli, plant):
    def stop(descriptor, arguments):
        raise KeyboardInterrupt

    plant(Faulty(stop))
    result = cli("verify", *ONE)
    assert result.exit_code == 130
    assert "Interrupted: as promised so far" in result.stdout
    assert json.loads(cli("verify", "--json", *ONE).stdout)["passed"] is False


def test_only_what_is_promised_is_checked(cli, plant):
    plant(Modest())
    result = cli("verify", "--json", *ONE)
    assert result.exit_code == 0
    modest = reports(result)["modest"]
    assert modest["skipped"] == 2
    assert modest["cases"] == 22
    assert modest["invariances"] == {"threads": True}
    assert modest["digests_checked"] == 0
    assert modest["unpromised_checked"] == 22
    assert 0 < modest["unpromised_equal"] < 22
    assert "of 22*" in cli("verify", *ONE).stdout


def test_an_owner_of_a_mac_is_told_what_to_report(cli, monkeypatch):
    assert "which this machine does not have" in cli("verify", "--device", "mps").stderr
    monkeypatch.setitem(DEVICES, "mps", DEVICES["cpu"])
    monkeypatch.setattr("isograd.cli.verify.select", lambda *given: ([], []))
    result = cli("verify", "--device", "mps")
    assert result.exit_code == 0
    assert "the chip's name, the version of macOS, and the output of `isograd verify --device mps --json`" in (
        " ".join(result.stdout.split())
    )
    assert "macOS" not in cli("verify", *ONE).stdout


def test_operations_without_cases_are_named(cli):
    kernel = NumbaSoftmax()
    ig.register_kernel("hardmax", "cpu", "float32", kernel)
    try:
        result = cli("verify", *ONE)
    finally:
        ig.unregister_kernel("hardmax", "cpu", "float32", kernel.name)
    assert result.exit_code == 0
    assert "not verified: hardmax" in result.stdout


@pytest.mark.parametrize("option", ["--device", "--operation", "--dtype"])
def test_unknown_names_end_in_one_line(cli, option):
    result = cli("verify", option, "abacus")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"isograd: {option} is 'abacus'; accepted: ")
    assert "Traceback" not in result.stderr


def test_absent_device(cli, monkeypatch):
    absent = replace(devices.DEVICES["cpu"], available=lambda: False)
    monkeypatch.setitem(devices.DEVICES, "tpu", absent)
    result = cli("verify", "--device", "tpu")
    assert result.exit_code == 2
    assert "this machine does not have" in result.stderr


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_digests_are_those_of_the_reference(every):
    known = check.published()
    for operation, suite in suites.SUITES.items():
        few = [dtype for dtype in suite.dtypes if dtype == "float32"] or suite.dtypes  # others are of integers
        for dtype in suite.dtypes if every else few:
            given = suites.cases(operation, dtype)
            results = known["results"][operation][dtype]
            assert known["inputs"][operation][dtype] == check.inputs_digest(given)
            names = {c.name for c in given}
            if operation in ATTENTION:  # some kernels promise bits of some cases
                assert results.keys() <= names
            else:
                assert results.keys() == (set() if suite.reference is None else names)
            for case in given:
                if case.name in ("5 x 31", "-inf", "middle axis") or case is given[len(operation) % len(given)]:
                    computed = check.reference_results(suite, case)
                    found = None if computed is None else check.results_digest(computed)
                    assert results.get(case.name) == found
    assert {e.operation for e in registry.kernels() if e.device == "cpu"} <= known["results"].keys()


def test_digest_does_not_depend_on_layout_and_byte_order():
    a = np.arange(12, dtype="<f4").reshape(3, 4)
    assert check.digest(a) == check.digest(np.asfortranarray(a))
    assert check.digest(a) != check.digest(a.T)


def hashes(found):
    return {(k["operation"], k["dtype"]): k["sha256"] for k in found["kernels"]}


@pytest.mark.thorough
def test_digests_do_not_depend_on_the_number_of_threads(cli_process):
    limits = [part for name in SOME for part in ("--operation", name)] + ["--dtype", "float32"]
    one = cli_process("verify", "--json", *limits, ISOGRAD_NUM_THREADS="1")
    two = cli_process("verify", "--json", *limits, ISOGRAD_NUM_THREADS="2")
    assert (one["threads"], two["threads"]) == (1, 2)
    assert hashes(one) == hashes(two)


@pytest.mark.exhaustive  # test_installation.py and attention's tests compare the bits of such a machine
def test_digests_do_not_depend_on_vector_instructions(cli_process, tmp_path):
    limits = ("--operation", "log_softmax", "--dtype", "float32")
    generic = cli_process("verify", "--json", *limits, NUMBA_CPU_NAME="generic", NUMBA_CACHE_DIR=str(tmp_path))
    assert generic["passed"]
    assert list(tmp_path.rglob("*.nbc")), "nothing was compiled anew"
