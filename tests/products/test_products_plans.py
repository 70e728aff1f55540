"""Plans of matrix products: the published bits from every engine, what is refused, and what a balance is."""

import numpy as np
import pytest

import isograd as ig
from isograd.cli import check, suites
from isograd.cli.check import Runner, digest
from isograd.cli.devices import DEVICES
from isograd.core import registry
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.numerics import int16, numba_int16
from isograd.numerics.matmul import matmul
from isograd.products.plans import IntegerProduct


def kernels(operation, dtype):
    return [e for e in registry.kernels() if e[:3] == (operation, "cpu", dtype)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_engine_gives_the_published_digests(dtype, monkeypatch):
    published = check.published()["results"]["matmul"][dtype]
    (entry, _) = kernels("matmul", dtype)
    cases = suites.cases("matmul", dtype)
    assert len(cases) == len(published) == 14
    for engine in numba_int16.engine_names():
        monkeypatch.setattr(IntegerProduct, "engine", engine)
        run = Runner(suites.SUITES["matmul"], entry, DEVICES["cpu"])
        found = {case.name: digest(run(case)[0]) for case in cases}
        assert found == published, engine


def test_cases_reach_what_they_name():
    cases = {case.name: case.inputs for case in suites.cases("matmul", "bfloat16")}
    for name in ("NN", "NT", "TN", "TT"):
        for letter, x in zip(name, cases[name].values(), strict=True):
            assert x.flags.c_contiguous == (letter == "N"), name
    rows = int16.rounded(cases["long, extreme digits"]["a"], None, -1)[0]
    low = (rows + 128) % 256 - 128
    assert set(rows[0]) == {127 * 256}
    assert (set(low[1]), set((rows[1] - low[1]) / 256)) == ({-128}, {127})
    assert abs(int16.exact_sums(rows, rows.T)).max() > 2**45
    weight, tokens = cases["weight"], cases["tokens"]
    found = set(int16.balance_of(weight["b"]))
    assert found >= {0, 8, int16.DROPPED}
    assert {0, int16.DROPPED, -int16.DROPPED} <= set(int16.balance_between(tokens["a"], tokens["b"]))
    special = matmul(*cases["NaN and inf"].values())
    assert np.isnan(special).any()
    assert (special == np.inf).any()
    assert (special == -np.inf).any()
    assert np.isfinite(special).any()


@pytest.mark.parametrize(
    ("precision", "operation"), [(None, "matmul_wide"), ("wide", "matmul_wide"), ("int16", "matmul")]
)
def test_a_plan_computes_what_isograd_matmul_does(precision, operation):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 5, 40)).astype(np.float32), rng.standard_normal((40, 7)).astype(np.float32)
    plan = ig.MatmulPlan.select(ig.MatmulDescriptor(a.shape, b.shape, "float32", precision))
    assert (plan.sku.op, plan.outputs) == (operation, ("c",))
    c = np.empty((2, 5, 7), np.float32)
    plan.run(a=a, b=b, c=c)
    assert np.array_equal(c, ig.matmul(a, b, precision=precision))
    out = np.full((7, 5, 2), np.nan, np.float32).transpose(2, 1, 0)
    plan.run(a=a, b=b, c=out)
    assert np.array_equal(out, c)


@pytest.mark.parametrize("balance", ["other", "tokens"])
def test_a_balance_is_that_of_its_definition(balance):
    (case,) = [c for c in suites.cases("matmul", "float32") if c.options.get("balance") == balance]
    a, b = case.inputs.values()
    expected = int16.balance_of(b) if balance == "other" else int16.balance_between(a, b)
    for entry in kernels("matmul", "float32"):
        (found,) = Runner(suites.SUITES["matmul"], entry, DEVICES["cpu"])(case)
        assert np.array_equal(found, matmul(a, b, "int16", expected))
        assert not np.array_equal(found, matmul(a, b, "int16"))


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        (((3,), (3, 4), "float32"), InvalidProblemError, "a_shape"),
        (((2, 3), (4, 5), "float32"), InvalidProblemError, "expected as many columns of a as rows of b"),
        (((2, 2, 3), (3, 3, 5), "float32"), InvalidProblemError, "batches do not broadcast"),
        (((2, 3), (3, 5), "float32", "fp8"), InvalidProblemError, "precision is 'fp8'"),
        (((2, 3), (3, 5), "float64", "int16"), UnsupportedError, "accepted for float64: wide"),
        (((2, 3), (3, 5), "float32", "wide", "other"), InvalidProblemError, "balance is 'other'"),
        (((1, 2, 3), (3, 5), "float32", "int16", "tokens"), InvalidProblemError, "balance is 'tokens'"),
        (((2, 3), (3, 5), "float32", "int16", "some"), InvalidProblemError, "balance is 'some'"),
        (((1, 2**26 + 1), (2**26 + 1, 1), "float32"), UnsupportedError, "supported: up to 67108864"),
        (((2, 3), (3, 5), "int8"), UnsupportedError, "int8"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, error, said):
    with pytest.raises(error, match=said):
        ig.MatmulPlan.select(ig.MatmulDescriptor(*fields))


def test_wide_is_for_the_cpu():
    with pytest.raises(UnsupportedError, match="devices with one: \\['cpu'\\]"):
        ig.MatmulPlan.select(ig.MatmulDescriptor((2, 3), (3, 5), "float32", "wide"), "cuda")


def test_the_oracle_sees_what_a_wide_float_would_not():
    a = np.array([[1 + 2.0**-52, 1.0, 2.0**-40]])
    b = np.array([[1 - 2.0**-52], [-1.0], [2.0**-40]])
    found = suites.SUITES["matmul_wide"].oracle(a, b)
    assert found[0, 0] == 2.0**-80 - 2.0**-104
