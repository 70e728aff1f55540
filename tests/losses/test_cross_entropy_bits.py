"""The CPU kernels of cross entropy return the reference's bits for every layout, however the work is cut."""

import numpy as np
import pytest
from cross_entropy_problems import KINDS, NUMPY, Problem, by_definition, by_plan, problem, raw, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import isograd as ig
from isograd.losses import cross_entropy_reference as reference
from isograd.numerics import constants as c
from isograd.numerics.numba_memory import BLOCK, LANES
from isograd.runtime import parallel

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", NUMPY)
each_kind = pytest.mark.parametrize("kind", KINDS)


# --- any shape, stride, axis, dtype, option -------------------------------------------------------------------------
SPECIAL = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -3e38, 6e4, -6e4]


@st.composite
def problems(draw):
    rank = draw(st.integers(1, 8))
    shape, room = [], 300
    for _ in range(rank):
        size = draw(st.sampled_from([1, 1, 2, 3, 3, 5, 7, 12, 40]))
        size = size if size <= room else 1
        room //= size
        shape.append(size)
    axis = draw(st.integers(0, rank - 1))
    if draw(st.booleans()) and rank > 1:
        other = (axis + 1) % rank
        shape[other] = draw(st.sampled_from([0, shape[other]]))
    return {
        "shape": tuple(shape),
        "axis": axis,
        "kind": draw(st.sampled_from(KINDS)),
        "weighted": draw(st.booleans()),
        "z_loss": draw(st.sampled_from([0.0, 1e-3])),
        "index": draw(st.sampled_from([np.int32, np.int64, np.uint32])),
        "special": draw(st.booleans()),
        "order": draw(st.permutations(range(rank))),
        "steps": draw(st.lists(st.sampled_from([1, 1, 2, -1]), min_size=rank, max_size=rank)),
        "seed": draw(st.integers(0, 2**32)),
    }


def laid_out(x, order, steps):
    """The array with its dimensions stored in another order, with gaps and backwards."""
    base = np.full([x.shape[d] * abs(steps[d]) for d in order], np.array(7, x.dtype))
    view = base[tuple(slice(None, None, steps[d]) for d in order)].transpose(np.argsort(order))
    view[...] = x
    return view


@each_dtype
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=problems())
def test_any_layout_and_option(dtype, drawn):
    rng = np.random.default_rng(drawn["seed"])
    names = ("kind", "weighted", "z_loss", "index")
    p = problem(rng, drawn["shape"], NUMPY[dtype], drawn["axis"], **{n: drawn[n] for n in names})
    x, targets = p.logits, p.targets
    if drawn["special"]:
        with np.errstate(all="ignore"):
            x = np.where(rng.random(x.shape) < 0.1, rng.choice(SPECIAL, x.shape), x).astype(x.dtype)
            if drawn["kind"] == "probabilities":
                targets = np.where(rng.random(x.shape) < 0.1, rng.choice(SPECIAL, x.shape), targets).astype(x.dtype)
    expected = by_definition(p._replace(logits=x, targets=targets))
    if targets.shape == x.shape and x.ndim:
        targets = laid_out(targets, drawn["order"][::-1], drawn["steps"])
    else:
        targets = np.repeat(targets[..., None], 2, axis=-1)[..., 0]
    q = p._replace(logits=laid_out(x, drawn["order"], drawn["steps"]), targets=targets)
    assert same(by_plan(q), expected) == []
    assert same(by_plan(q, gradient_in_place=True), expected) == []
    assert raw(q.logits) == raw(x)


@each_kind
@each_dtype
def test_rows_and_lanes_of_critical_sizes(dtype, kind):
    rng = np.random.default_rng(1)
    shapes = [(2, BLOCK - 1), (2, BLOCK), (2, BLOCK + 1), (1, 2 * BLOCK + 300), (3, 256), (3, 257), (9, 1)]
    for shape in shapes:
        p = problem(rng, shape, NUMPY[dtype], kind=kind, weighted=True, z_loss=1e-3)
        assert same(by_plan(p, True), by_definition(p)) == [], shape
    for shape in ((1, 3, LANES - 1), (2, 2, LANES + 1), (1, 5, 2 * LANES), (1, 300, 70), (2, 600, 3)):
        p = problem(rng, shape, NUMPY[dtype], kind=kind, weighted=True, z_loss=1e-3)
        assert same(by_plan(p, True), by_definition(p)) == [], shape


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_rows_on_both_sides_of_the_long_class(dtype):
    rng = np.random.default_rng(2)
    for n in (c.SHORT_ROW, c.SHORT_ROW + 1):
        p = problem(rng, (1, n), NUMPY[dtype], ignored=0, scale=1)
        expected = by_definition(p)
        assert same(by_plan(p), expected) == []
        two = p._replace(
            logits=np.repeat(p.logits.T, 2, axis=1), targets=np.repeat(p.targets, 2), dlosses=np.repeat(p.dlosses, 2),
            options=p.options | {"axis": 0},
        )  # fmt: skip
        assert raw(by_plan(two)[2]) == raw(np.repeat(expected[2].T, 2, axis=1))


@each_dtype
def test_zeros_of_both_signs(dtype):
    # The state holds the maximum, and a largest zero of either sign is +0 (rule 3).
    zeros = np.where(np.eye(6), 0.0, -0.0).astype(NUMPY[dtype])
    for axis in (0, 1):
        p = problem(np.random.default_rng(5), zeros.shape, NUMPY[dtype], axis)._replace(logits=zeros)
        assert same(by_plan(p), by_definition(p)) == []
        assert not np.signbit(by_plan(p)[1][0]).any()


def test_single_rows_of_floats_beyond_a_word():
    # Beyond 2^17 float32 terms the sum of a lane no longer fits the word that the vectorised way uses.
    rng = np.random.default_rng(3)
    for n in (1 << 17, (1 << 17) + 1):
        p = problem(rng, (n, 2), np.float32, axis=0, ignored=0, scale=1e-3)
        assert same(by_plan(p), by_definition(p)) == []


# --- one result, however memory and work are cut --------------------------------------------------------------------
def check_invariances(run, kind, dtype):
    """run(problem): (losses, state, gradient, …); bits must not depend on layout, batch, order or padding."""
    rng = np.random.default_rng(4)
    classes, rows = 500, 9
    p = problem(rng, (rows, classes), NUMPY[dtype], kind=kind, weighted=True, z_loss=1e-3)
    losses, _, dx, *_ = run(p)
    dense = kind == "probabilities"

    turned = p._replace(
        logits=np.ascontiguousarray(p.logits.T), targets=np.ascontiguousarray(p.targets.T) if dense else p.targets,
        options=p.options | {"axis": 0},
    )  # fmt: skip
    got = run(turned)
    assert raw(got[0]) == raw(losses)
    assert raw(got[2].T) == raw(dx), "rows against lanes"
    for part in (slice(0, 1), slice(1, 4), slice(4, None)):
        got = run(p._replace(logits=p.logits[part], targets=p.targets[part], dlosses=p.dlosses[part]))
        assert raw(got[0]) == raw(losses[part]), "batch"
        assert raw(got[2]) == raw(dx[part]), "batch"

    for order in (np.arange(classes)[::-1], rng.permutation(classes)):
        place = np.argsort(order)
        targets = p.targets[:, order] if dense else np.where(p.targets < 0, p.targets, place[p.targets])
        got = run(p._replace(logits=p.logits[:, order], targets=targets, weight=p.weight[order]))
        assert raw(got[0]) == raw(losses), "order of classes"
        assert raw(got[2]) == raw(dx[:, order]), "order of classes"
    order = rng.permutation(rows)
    got = run(p._replace(logits=p.logits[order], targets=p.targets[order], dlosses=p.dlosses[order]))
    assert raw(got[0]) == raw(losses[order]), "order of rows"
    assert raw(got[2]) == raw(dx[order]), "order of rows"

    if kind == "hard":  # smoothing reaches every class, padded ones too
        wide = np.pad(p.logits, ((0, 0), (3, 700)), constant_values=-np.inf)
        weight = np.pad(p.weight, (3, 700), constant_values=1)
        targets = np.where(p.targets < 0, p.targets, p.targets + 3)
        got = run(p._replace(logits=wide, targets=targets, weight=weight))
        assert raw(got[0]) == raw(losses), "padding"
        assert raw(got[2][:, 3 : 3 + classes]) == raw(dx), "padding"


@each_kind
@each_dtype
def test_invariances(kind, dtype):
    check_invariances(by_plan, kind, dtype)


@each_kind
def test_the_invariance_checks_catch_a_sum_in_floats(kind, monkeypatch):
    exact = reference.ref.order_free_sum
    monkeypatch.setattr(
        reference.ref, "order_free_sum", lambda p: p.cumsum(axis=-1, dtype=p.dtype)[:, -1] if p.size else exact(p)
    )
    if kind == "hard":  # has no other sum than that of the exponentials
        monkeypatch.setattr(reference.family.ref, "integer_terms", lambda p, _: [[int(v) for v in row] for row in p])
        exponentials = reference.family.scaled_exponentials
        monkeypatch.setattr(
            reference.family,
            "log_sums",
            lambda s: (
                (s.m + np.log((exponentials(s.x, s.m, s.short)[0] * np.float32(2.0**-64)).cumsum(1)[:, -1:]),)
                + (np.zeros_like(s.m),) * 2
            ),
        )
    with pytest.raises(AssertionError):
        check_invariances(by_definition, kind, "float32")


@pytest.mark.usefixtures("restore_threads")
@each_kind
def test_threads(kind, monkeypatch):
    helpers = []
    submit = parallel._submit
    monkeypatch.setattr(parallel, "_SMALLEST", 1 << 15)  # chunks for every thread
    monkeypatch.setattr(parallel, "_submit", lambda task, count: helpers.append(count) or submit(task, count))
    rng = np.random.default_rng(5)
    all_problems = [
        problem(rng, (300, 1000), np.float32, kind=kind),
        problem(rng, (3, 40, 3000), np.float32, kind=kind, weighted=True),
    ]
    ig.set_num_threads(1)
    expected = [list(map(raw, by_plan(p))) for p in all_problems]
    assert helpers == []
    for threads in (2, 5):
        ig.set_num_threads(threads)
        assert [list(map(raw, by_plan(p))) for p in all_problems] == expected
    assert set(helpers) == {1, 4}


def test_long_rows_and_tiles_keep_their_scratch_memory(run_python):
    code = """
        import numpy as np, isograd as ig
        rng = np.random.default_rng(0)
        x, t = rng.standard_normal((2, 70_001)).astype(np.float32), np.array([5, 70_000])
        dx = ig.cross_entropy(x, t, return_gradient=True, reduction="sum")[1]
        y = rng.random((2, 9_000, 3)).astype(np.float32)
        dy = ig.cross_entropy(y, y, return_gradient=True, reduction="sum")[1]
        print(bool(abs(dx.sum(1)).max() < 1e-5), bool(np.isfinite(dy).all()))
    """
    assert run_python(code, MALLOC_MMAP_THRESHOLD_="65536") == "True True"


# --- special values -------------------------------------------------------------------------------------------------
@each_dtype
def test_special_rows(dtype):
    inf, nan = np.inf, np.nan
    rows = [[-inf, -inf, -inf], [inf, 0, 1], [0, nan, 1], [5, -inf, -inf], [5, -inf, -inf], [0, 0, 0], [nan, inf, 0]]
    x = np.array(rows, NUMPY[dtype])
    t = np.array([0, 0, 0, 0, 1, 2, -100])
    for logits, axis in ((x, 1), (np.ascontiguousarray(x.T), 0)):
        of = np.float64 if dtype == "float64" else np.float32
        losses = ig.cross_entropy(logits, t, axis=axis, reduction="none")
        expected = np.array([nan, nan, nan, 0, inf, -np.log(of(1) / 3), 0])
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert not np.signbit(losses[3])
        _, dx = ig.cross_entropy(logits, t, axis=axis, reduction="none", return_gradient=True)
        dx = np.moveaxis(dx, axis, 1).astype(float)
        assert np.isnan(dx[:3]).all()
        np.testing.assert_array_equal(dx[3], [0, 0, 0])
        np.testing.assert_array_equal(dx[4], [1, -1, 0])
        np.testing.assert_allclose(dx[5], [1 / 3, 1 / 3, -2 / 3], rtol=1e-2)
        np.testing.assert_array_equal(dx[6], [0, 0, 0])


def test_every_nan_is_the_canonical_one():
    x = np.array([[np.nan, 1], [1, -np.nan], [np.inf, np.inf]], np.float32)
    x.view(np.uint32)[0, 0] = 0xFFABCDEF
    p = Problem(x, np.array([0, 1, 0]), None, np.array([1, -np.nan, np.nan], np.float32), {})
    for a in by_plan(p):
        assert set(a.view(np.uint32)[np.isnan(a)].ravel().tolist()) == {0x7FC00000}


@each_dtype
def test_rows_of_a_single_class(dtype):
    logits = np.array([[3], [-2]], NUMPY[dtype])
    loss, dx = ig.cross_entropy(logits, np.array([0, 0]), return_gradient=True)
    assert loss == 0
    assert not dx.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(reduction):
    x, t = np.empty((0, 5), np.float32), np.empty(0, np.int64)
    loss, dx = ig.cross_entropy(x, t, reduction=reduction, return_gradient=True)
    assert dx.shape == (0, 5)
    assert loss.shape == ((0,) if reduction == "none" else ())
    if reduction != "none":
        assert np.isnan(loss) if reduction == "mean" else loss == 0


def test_all_rows_ignored():
    x = np.ones((3, 5), np.float32)
    loss, dx = ig.cross_entropy(x, np.full(3, -100), return_gradient=True)
    assert np.isnan(loss)
    assert not dx.any()
    assert ig.cross_entropy(x, np.full(3, -100), reduction="sum") == 0


def test_a_large_offset_changes_little():
    # Elsewhere log-probabilities are wrong from some offset on.
    x = np.random.default_rng(6).standard_normal((4, 50))
    t = np.arange(4)
    for offset in (-1e7, 1e4, 1e7):
        shifted = (x + offset).astype(np.float32)
        expected, _ = reference.oracle_cross_entropy(shifted, t)
        np.testing.assert_allclose(ig.cross_entropy(shifted, t, reduction="none"), expected.astype(float), rtol=1e-6)
