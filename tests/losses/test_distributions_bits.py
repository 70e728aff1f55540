"""The CPU kernels of divergences, gumbel_softmax and sparsemax return the reference's bits, however work is cut."""

import ml_dtypes
import numpy as np
import pytest
from choices import thorough
from distributions import (
    DTYPES,
    REDUCTIONS,
    Stored,
    expanded,
    laid_out,
    log_softmax,
    named,
    raw,
    reference,
    softmax,
    values,
    work,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import isograd as ig
from isograd.numerics import reference as numerics
from isograd.numerics.numba_memory import BLOCK
from isograd.ops.distillation_loss import reference as divergence_reference
from isograd.ops.gumbel_softmax import reference as gumbel_reference
from isograd.ops.kl_div import reference as kl_reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
relaxed = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FLAVOURS = ["normal", "normal", "offset", "spread", "special", "masked"]


@st.composite
def problems(draw, least=1):
    rank = draw(st.integers(least, 8))
    shape, room = [], 300
    for _ in range(rank):
        size = draw(st.sampled_from([0, 1, 1, 2, 3, 3, 5, 7, 12, 40]))
        size = size if size <= room else 1
        room = room // size if size else room
        shape.append(size)
    return {
        "shape": tuple(draw(st.permutations(shape))),
        "flavour": draw(st.sampled_from(FLAVOURS)),
        "seed": draw(st.integers(0, 2**32)),
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "flag": draw(st.booleans()),
    }


def check(operation, arguments, options, expected_arguments=None):
    """The library on arrays in random layouts against the reference."""
    with np.errstate(all="ignore"):
        expected = reference(operation)(*(expected_arguments or arguments), **options)
    before = [raw(a) for a in arguments]
    got = getattr(ig, operation)(*arguments, **options)
    assert raw(got) == raw(expected)
    assert [raw(a) for a in arguments] == before


@each_dtype
@relaxed
@given(problem=problems(0))
def test_kl_div_on_any_layout(dtype, problem):
    rng = np.random.default_rng(problem["seed"])
    shape, flavour = problem["shape"], problem["flavour"]
    x, t = values(rng, flavour, shape, dtype), values(rng, flavour, shape, dtype)
    if shape and flavour in ("normal", "masked", "special"):
        x, t = log_softmax(x), (log_softmax if problem["flag"] else softmax)(t)
    if rng.random() < 0.3:
        t = expanded(rng, t)
    options = {"reduction": problem["reduction"], "log_target": problem["flag"]}
    x = laid_out(rng, x)
    check("kl_div", (x, t), options)
    loss_shape = shape if problem["reduction"] == "none" else ()
    dloss = values(rng, flavour, loss_shape, work(dtype))
    dloss = expanded(rng, dloss) if rng.random() < 0.5 else laid_out(rng, dloss)
    check("kl_div_backward", (dloss, x, t), options | {"wrt": "target" if problem["seed"] % 2 else "input"})


# Teachers of 16 bits as well: thorough, and of whole rows in the conformance tests.
@pytest.mark.parametrize("wide", [True, thorough(False)], ids=["wide teacher", "same dtype"])
@each_dtype
@relaxed
@given(problem=problems(), odd=st.floats(0.05, 20), temperature=st.sampled_from([1.0, 2.0, 0.5, None]))
def test_distillation_on_any_layout(dtype, wide, problem, odd, temperature):
    rng = np.random.default_rng(problem["seed"])
    shape, flavour = problem["shape"], problem["flavour"]
    student = laid_out(rng, values(rng, flavour, shape, dtype))
    other = np.float32 if wide and dtype != np.float64 else dtype
    teacher = values(rng, FLAVOURS[rng.integers(6)], shape, other)
    options = {"temperature": odd if temperature is None else temperature, "reduction": problem["reduction"]}
    dloss = values(rng, flavour, shape[:-1] if problem["reduction"] == "none" else (), work(dtype))
    dloss = expanded(rng, dloss) if rng.random() < 0.5 else laid_out(rng, dloss)
    check("distillation_loss", (student, laid_out(rng, teacher)), options)
    check("distillation_loss_backward", (dloss, student, laid_out(rng, teacher)), options)
    if shape[-1]:
        k = int(rng.integers(1, shape[-1] + 1))
        kept, indices = named(rng, teacher, k, [np.int32, np.int64, np.uint32][rng.integers(3)])
        options |= {"indices": laid_out(rng, indices)}
        kept = laid_out(rng, kept)
        check("distillation_loss", (student, kept), options)
        check("distillation_loss_backward", (dloss, student, kept), options)


@each_dtype
@relaxed
@given(
    problem=problems(),
    seed=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**64 - 1),
    tau=st.floats(0.01, 30),
)
def test_gumbel_softmax_on_any_layout(dtype, problem, seed, offset, tau):
    rng = np.random.default_rng(problem["seed"])
    shape = problem["shape"]
    axis = int(rng.integers(-len(shape), len(shape)))
    logits = laid_out(rng, values(rng, problem["flavour"], shape, dtype))
    options = {"tau": tau, "axis": axis}
    check("gumbel_softmax", (logits,), options | {"hard": problem["flag"], "seed": seed, "offset": offset})
    y = softmax(logits, axis) if problem["flag"] else logits
    dy = values(rng, problem["flavour"], shape, dtype)
    check("gumbel_softmax_backward", (expanded(rng, dy) if problem["flag"] else laid_out(rng, dy), y), options)


@each_dtype
@relaxed
@given(problem=problems())
def test_sparsemax_on_any_layout(dtype, problem):
    rng = np.random.default_rng(problem["seed"])
    shape = problem["shape"]
    axis = int(rng.integers(-len(shape), len(shape)))
    x = values(rng, problem["flavour"], shape, dtype) * np.array([1, 0.1, 0.001], dtype)[rng.integers(3)]
    x = laid_out(rng, x)
    check("sparsemax", (x,), {"axis": axis})
    y = ig.sparsemax(x, axis) if problem["flag"] else x
    dy = values(rng, problem["flavour"], shape, dtype)
    check("sparsemax_backward", (expanded(rng, dy) if problem["flag"] else laid_out(rng, dy), y), {"axis": axis})


def test_a_reference_without_the_correction_is_noticed(monkeypatch):
    # The same comparison fails where a reference leaves out the low part of the logarithmic sums.
    rng = np.random.default_rng(0)
    student, teacher = (rng.standard_normal((8, 40)).astype(np.float32) for _ in range(2))
    check("distillation_loss", (student, teacher), {})
    whole = divergence_reference._difference
    monkeypatch.setattr(divergence_reference, "_difference", lambda a, b: (whole(a, b)[0], 0 * whole(a, b)[1]))
    with pytest.raises(AssertionError):
        check("distillation_loss", (student, teacher), {"reduction": "none"})


@each_dtype
def test_logits_over_the_temperature_beyond_the_range(dtype):
    rng = np.random.default_rng(21)
    for n in (3, BLOCK + 5):
        x, t = (values(rng, "largest", (4, n), dtype) for _ in range(2))
        x[1] = t[1] = np.abs(t[1])  # both overflow throughout
        x[2, 0] = t[2, 0] = -np.inf
        kept, indices = named(rng, t / 8, 2)
        options = {"temperature": 0.01, "reduction": "none"}
        check("distillation_loss", (x, t), options)
        check("distillation_loss_backward", (np.ones(4, work(dtype)), x, t), options)
        check("distillation_loss", (x, kept), options | {"indices": indices})
        check("distillation_loss_backward", (np.ones(4, work(dtype)), x, kept), options | {"indices": indices})


def test_a_distribution_of_logits_that_overflow_is_none_of_nans():
    student, teacher = (np.array([pair], ml_dtypes.bfloat16) for pair in ([1e38, 9e37], [9e37, 1e38]))
    assert ig.distillation_loss(student, teacher, 0.1) == 0
    assert not ig.distillation_loss_backward(np.ones((), np.float32), student, teacher, 0.1).any()


# --- sizes around those at which the kernels change their way --------------------------------------------------------
SIZES = (1, 2, 255, 256, 257, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300)


@each_dtype
def test_rows_of_critical_lengths(dtype):
    rng = np.random.default_rng(20)
    for n in SIZES:
        x, t = (rng.standard_normal((2, n)).astype(dtype) for _ in range(2))
        one = np.ones(2, work(dtype))
        options = {"temperature": 1.5, "reduction": "none"}
        check("distillation_loss", (x, t), options)
        check("distillation_loss_backward", (one, x, t), options)
        kept, indices = named(rng, t, min(n, 5))
        check("distillation_loss", (x, kept), options | {"indices": indices})
        check("distillation_loss_backward", (one, x, kept), options | {"indices": indices})
        check("gumbel_softmax", (x,), {"seed": n, "offset": 3})
        check("gumbel_softmax", (np.ascontiguousarray(x.T),), {"seed": n, "hard": True, "axis": 0})
        check("gumbel_softmax_backward", (t, x), {"tau": 0.3})
        check("sparsemax", (x,), {})
        check("sparsemax_backward", (t, ig.sparsemax(x)), {})
        check("kl_div", (x, softmax(t)), {"reduction": "sum"})


@each_dtype
def test_more_named_classes_than_a_block(dtype):
    rng = np.random.default_rng(19)
    n = BLOCK + 900
    x, t = (rng.standard_normal((2, n)).astype(dtype) for _ in range(2))
    for k in (BLOCK - 1, BLOCK, BLOCK + 1, n - 1, n):
        kept, indices = named(rng, t, k)
        check("distillation_loss", (x, kept), {"indices": indices})
        check("distillation_loss_backward", (np.ones((), work(dtype)), x, kept), {"indices": indices})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_rest_on_both_sides_of_its_own_unit(dtype):
    # The student's other classes fall from as likely as the named ones to nothing beside them.
    rng = np.random.default_rng(18)
    n, k = 60, 4
    for gap in (0, 3, 8.2, 8.4, 12, 25, 40, 80, 120, 400, np.inf):
        x = rng.standard_normal((3, n)).astype(dtype)
        indices = np.broadcast_to(np.arange(k) * 7, (3, k)).astype(np.int32)
        others = np.ones(n, bool)
        others[indices[0]] = False
        x[:, others] -= dtype(gap)
        kept = np.log(np.full((3, k), 0.2)).astype(dtype)
        check("distillation_loss", (x, kept), {"indices": indices, "reduction": "none"})
        check("distillation_loss_backward", (np.ones((), dtype), x, kept), {"indices": indices})


# --- one result, however memory and work are cut ---------------------------------------------------------------------
@each_dtype
def test_order_batch_and_padding_leave_no_trace(dtype):
    rng = np.random.default_rng(23)
    n = 700
    x, t = (3 * rng.standard_normal((9, n)).astype(dtype) for _ in range(2))
    order = rng.permutation(n)
    losses = ig.distillation_loss(x, t, 2.0, reduction="none")
    assert raw(ig.distillation_loss(x[:, order], t[:, order], 2.0, reduction="none")) == raw(losses)
    assert raw(ig.distillation_loss(x[3:], t[3:], 2.0, reduction="none")) == raw(losses[3:])
    width = ((0, 0), (5, 900))
    padded = [np.pad(a, width, constant_values=-np.inf) for a in (x, t)]
    assert raw(ig.distillation_loss(*padded, 2.0, reduction="none")) == raw(losses)
    total = ig.distillation_loss(x, t, 2.0)
    rows = rng.permutation(9)
    assert raw(ig.distillation_loss(x[rows], t[rows], 2.0)) == raw(total)

    kept, indices = named(rng, t, 6)
    losses = ig.distillation_loss(x, kept, 1.0, indices, "none")
    inverse = np.argsort(order)
    assert raw(ig.distillation_loss(x[:, order], kept, 1.0, inverse[indices], "none")) == raw(losses)
    some = rng.permutation(6)
    assert raw(ig.distillation_loss(x, kept[:, some], 1.0, indices[:, some], "none")) == raw(losses)

    y = ig.sparsemax(x)
    assert raw(ig.sparsemax(x[:, order])) == raw(y[:, order])
    assert raw(ig.sparsemax(np.pad(x, width, constant_values=-np.inf))[:, 5 : 5 + n]) == raw(y)
    assert raw(ig.sparsemax(np.ascontiguousarray(x.T), 0).T) == raw(y)
    dx = ig.sparsemax_backward(t, y)
    assert raw(ig.sparsemax_backward(t[:, order], y[:, order])) == raw(dx[:, order])

    p = softmax(t)
    for reduction in ("sum", "mean", "batchmean"):
        loss = ig.kl_div(x, p, reduction)
        assert raw(ig.kl_div(x[:, order], p[:, order], reduction)) == raw(loss)
        assert raw(ig.kl_div(x[rows], p[rows], reduction)) == raw(loss)
    zeros = [np.pad(a, width) for a in (x, p)]
    assert raw(ig.kl_div(*zeros, "sum")) == raw(ig.kl_div(x, p, "sum"))


def test_terms_of_every_size_meet_in_any_order():
    # What a sum was given before its largest term turned up is summed again: the order still leaves no trace.
    rng = np.random.default_rng(22)
    n = 40 * BLOCK
    x, p = np.zeros(n, np.float32), np.full(n, 1e-6, np.float32)
    for place in (0, 1, BLOCK, n // 2, n - 1):
        q = p.copy()
        q[place] = 0.75
        q[rng.integers(n, size=20)] = 1e-3
        expected = raw(ig.kl_div(x, np.sort(q), "sum"))
        assert raw(ig.kl_div(x, q, "sum")) == expected
        assert raw(kl_reference.kl_div(x, q, "sum")) == expected


@pytest.mark.usefixtures("restore_threads")
@each_dtype
def test_threads(dtype):
    rng = np.random.default_rng(25)
    x, t = (rng.standard_normal((300, 1000)).astype(dtype) for _ in range(2))
    kept, indices = named(rng, t, 8)
    g = np.ones((), work(dtype))

    def results():
        y = ig.sparsemax(x)
        return [
            raw(r)
            for r in (
                ig.kl_div(x, softmax(t)),
                ig.kl_div_backward(g, x, t),
                ig.distillation_loss(x, t),
                ig.distillation_loss_backward(g, x, t),
                ig.distillation_loss(x, kept, 1.0, indices),
                ig.distillation_loss_backward(g, x, kept, 1.0, indices),
                ig.gumbel_softmax(x, seed=4),
                ig.gumbel_softmax_backward(t, y),
                y,
                ig.sparsemax_backward(t, y),
            )
        ]

    ig.set_num_threads(1)
    expected = results()
    for threads in (2, 5):
        ig.set_num_threads(threads)
        assert results() == expected


@each_dtype
def test_outputs_in_place_and_with_gaps(dtype):
    rng = np.random.default_rng(26)
    x, t = (rng.standard_normal((6, 50)).astype(dtype) for _ in range(2))
    kept, indices = named(rng, t, 4)
    g = np.ones((), work(dtype))
    for teacher, where in ((t, None), (kept, indices)):
        expected = raw(ig.distillation_loss_backward(g, x, teacher, 2.0, where))
        out = Stored((6, 50), dtype, (1, 0), (2, -3))
        assert ig.distillation_loss_backward(g, x, teacher, 2.0, where, out=out.view) is out.view
        assert raw(out.view) == expected
        assert out.gaps_untouched()
        logits = x.copy()
        ig.distillation_loss_backward(g, logits, teacher, 2.0, where, out=logits)
        assert raw(logits) == expected
    y = ig.sparsemax(x)
    for plan, descriptor, inputs in (
        (ig.SparsemaxPlan, ig.SparsemaxDescriptor, {"x": x}),
        (ig.GumbelSoftmaxPlan, ig.GumbelSoftmaxDescriptor, {"logits": x}),
        (ig.SparsemaxBackwardPlan, ig.SparsemaxBackwardDescriptor, {"dy": t, "y": y}),
        (ig.GumbelSoftmaxBackwardPlan, ig.GumbelSoftmaxBackwardDescriptor, {"dy": t, "y": y}),
    ):
        selected = plan.select(descriptor((6, 50), np.dtype(dtype).name))
        name = selected.outputs[0]
        out = np.empty_like(x)
        selected.run(**inputs, **{name: out})
        for alias in inputs:
            copies = {k: v.copy() for k, v in inputs.items()}
            selected.run(**copies, **{name: copies[alias]})
            assert raw(copies[alias]) == raw(out)


# --- noise -----------------------------------------------------------------------------------------------------------
def test_noise_belongs_to_the_place_of_an_element():
    x = np.zeros((4, 6), np.float32)
    y = ig.gumbel_softmax(x, seed=9, offset=100)
    assert raw(ig.gumbel_softmax(x[2:], seed=9, offset=112)) == raw(y[2:])
    assert raw(ig.gumbel_softmax(np.asfortranarray(x), seed=9, offset=100)) == raw(y)
    assert raw(ig.gumbel_softmax(x[::-1], seed=9, offset=100)) == raw(y)
    assert raw(ig.gumbel_softmax(x, seed=10, offset=100)) != raw(y)
    assert raw(ig.gumbel_softmax(x, seed=9, offset=101)) != raw(y)
    # The counter goes on past 2^32 and around at 2^64.
    for offset in (2**32 - 7, 2**34 - 3, 2**64 - 5):
        expected = gumbel_reference.gumbel_softmax(x, seed=0, offset=offset)
        assert raw(ig.gumbel_softmax(x, seed=0, offset=offset)) == raw(expected)


def test_noise_is_the_published_generator():
    # Block 5 of seed 3, computed from the words themselves.
    from isograd.numerics.random import philox

    counter = np.array([5, 0, 0, 0xFFFFFFFF], np.uint32)
    words = philox(counter, (3, 0))
    u = ((words >> 9).astype(np.float64) + 0.5) * 2.0**-23
    assert raw(gumbel_reference.uniform(np.arange(20, 24, dtype=np.uint64), 3, np.float32)) == raw(u.astype(np.float32))
    wide = words.astype(np.uint64)
    pairs = np.array([wide[1] << np.uint64(32) | wide[0], wide[3] << np.uint64(32) | wide[2]])
    u = ((pairs >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    assert raw(gumbel_reference.uniform(np.arange(10, 12, dtype=np.uint64), 3, np.float64)) == raw(u)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_is_distributed_as_gumbels_law_says(dtype):
    g = gumbel_reference.noise((200_000,), dtype, seed=1).astype(np.float64)
    assert abs(g.mean() - np.euler_gamma) < 5 * np.pi / np.sqrt(6 * 200_000)
    assert abs(g.std() - np.pi / np.sqrt(6)) < 0.02
    uniform = np.sort(np.exp(-np.exp(-g)))
    assert np.max(np.abs(uniform - (np.arange(200_000) + 0.5) / 200_000)) < 1.95 / np.sqrt(200_000)


def test_hard_samples_follow_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    y = ig.gumbel_softmax(np.broadcast_to(logits, (40_000, 4)), 0.1, True, seed=5)
    assert set(np.unique(y)) == {0, 1}
    assert (y.sum(1) == 1).all()
    np.testing.assert_allclose(y.mean(0), np.exp(logits), atol=0.012)


def test_hard_takes_the_first_of_equal_elements():
    # Perturbed logits that overflow to the same number: the first of them wins, in every layout.
    x = np.array([[1e7, 5, 1e7, 1e7]], np.float32)
    assert gumbel_reference.perturbed(x, 1.0, 0, 0)[0, [0, 2, 3]].ptp() == 0 if hasattr(x, "ptp") else True
    expected = gumbel_reference.gumbel_softmax(x, hard=True)
    assert raw(ig.gumbel_softmax(x, hard=True, seed=0)) == raw(expected)
    big = np.full((3, 2 * BLOCK), 1e30, ml_dtypes.bfloat16)
    y = ig.gumbel_softmax(big, hard=True, seed=0).astype(np.float32)
    assert (y[:, 0] == 1).all()
    assert (y[:, 1:] == 0).all()


# --- composition -----------------------------------------------------------------------------------------------------
@each_dtype
def test_probabilities_are_those_of_the_softmax_family(dtype):
    """The gradient is the difference of two softmaxes in the work type, the bits of the family's kernels."""
    rng = np.random.default_rng(27)
    x, t = ((2 * rng.standard_normal((5, 300))).astype(dtype) for _ in range(2))
    of = work(dtype)
    q, p = ig.softmax(x.astype(of)), ig.softmax(t.astype(of))
    dx = ig.distillation_loss_backward(np.ones(5, of), x, t, reduction="none")
    assert raw(dx) == raw(numerics.narrow(q - p, np.dtype(dtype)))
    y = ig.gumbel_softmax(x, seed=8)
    noisy = x.astype(of) + gumbel_reference.noise(x.shape, dtype, 8)
    assert raw(y) == raw(numerics.narrow(ig.softmax(noisy), np.dtype(dtype)))
    assert raw(ig.gumbel_softmax_backward(t, y)) == raw(ig.softmax_backward(t, y))
