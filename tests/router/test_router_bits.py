"""The CPU kernels of the router family return the reference's bits for every layout, however the work is cut."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_problems import (
    DTYPES,
    EACH,
    FLAVOURS,
    SUITES,
    expected,
    laid_out,
    permutation,
    problem,
    raw,
    run,
    values,
    with_layouts,
)

import isograd as ig
from isograd.core.cases import Case
from isograd.numerics.numba_memory import LANES
from isograd.numerics.numba_sum import PARTIAL
from isograd.ops.router import reference
from isograd.ops.router.numba_select import INSERTED
from isograd.runtime import parallel

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in cast:RuntimeWarning")
relaxed = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def same(got, wanted):
    return [raw(x) for x in got] == [raw(x) for x in wanted]


# --- any shape, stride, dtype and value -------------------------------------------------------------------------------
@pytest.mark.parametrize(("operation", "dtype"), EACH)
@relaxed
@given(seed=st.integers(0, 2**32), flavour=st.sampled_from(FLAVOURS))
def test_any_layout(operation, dtype, seed, flavour):
    rng = np.random.default_rng(seed)
    case = with_layouts(rng, problem(operation, rng, dtype, flavour))
    before = [raw(a) for a in case.inputs.values()]
    wanted = expected(operation, case)
    assert same(run(operation, case, dtype), wanted)
    assert same(run(operation, case, dtype, lambda a: laid_out(rng, a)), wanted)
    assert [raw(a) for a in case.inputs.values()] == before


@pytest.mark.parametrize("operation", ["moe_router", "moe_combine", "load_balancing_loss", "router_z_loss"])
def test_a_slip_is_noticed(operation, monkeypatch):
    case = list(SUITES[operation].cases("float32"))[2]
    got = run(operation, case, "float32")
    assert same(got, expected(operation, case))
    sums = reference.ref.order_free_sum
    monkeypatch.setattr(reference.ref, "order_free_sum", lambda p: sums(p) * np.float32(1 + 2**-20))
    monkeypatch.setattr(reference, "scores", lambda x, scoring: x)
    assert not same(got, expected(operation, case))


# --- sizes around those at which the kernels change their way ---------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flavour", ["normal", "ties", "special", "zeros"])
def test_top_k_of_critical_sizes(dtype, flavour):
    rng = np.random.default_rng(1)
    for n in (1, 2, INSERTED, INSERTED + 1, 300, 5000):
        x = values(rng, flavour, (2, n), dtype)
        for k in sorted({min(k, n) for k in (1, 2, 8, INSERTED, INSERTED + 1, n // 2 or 1, n)}):
            case = Case("", {"x": x}, {"k": k, "axis": -1})
            assert same(run("top_k", case, dtype), expected("top_k", case)), (n, k)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_top_k_of_equal_leading_bits(dtype):
    # The leading bits of the keys tell nothing apart here, and hardly any of the others do.
    x = 1 + np.arange(3000) % 5 * float(np.finfo(dtype).eps)
    case = Case("", {"x": x[None].astype(dtype)}, {"k": 700, "axis": -1})
    assert same(run("top_k", case, dtype), expected("top_k", case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_routers_of_critical_sizes(dtype):
    rng = np.random.default_rng(2)
    for n, k in ((PARTIAL - 1, 3), (PARTIAL + 1, 3), (2 * PARTIAL + 5, INSERTED + 1), (1024, 128), (9000, 8)):
        case = Case("", {"logits": values(rng, "normal", (2, n), dtype)}, {"k": k, "renormalize": True})
        weights, experts = run("moe_router", case, dtype)
        assert same((weights, experts), expected("moe_router", case)), (n, k)
        inputs = {"dweights": weights[:, ::-1], "logits": case.inputs["logits"], "experts": experts}
        case = Case("", inputs, {"renormalize": True})
        assert same(run("moe_router_backward", case, dtype), expected("moe_router_backward", case)), (n, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flavour", ["normal", "spread", "special"])
def test_combinations_of_critical_sizes(dtype, flavour):
    rng = np.random.default_rng(3)
    for tokens, k, width in ((2, 1, LANES - 1), (2, 3, LANES + 1), (1, PARTIAL, 4), (1, PARTIAL + 1, 4)):
        order = permutation(rng, tokens * k)
        rows = values(rng, flavour, (tokens * k, width), dtype)
        weights = values(rng, flavour, (tokens, k), "float64" if dtype == "float64" else "float32")
        case = Case("", {"dy": rows, "order": order}, {"k": k})
        assert same(run("moe_permute_backward", case, dtype), expected("moe_permute_backward", case))
        case = Case("", {"expert_out": rows, "weights": weights, "order": order})
        assert same(run("moe_combine", case, dtype), expected("moe_combine", case))


@pytest.mark.parametrize("count", [(1 << 14) - 1, (1 << 14) + 1, 3 << 14])
@pytest.mark.parametrize("bound", [1, 7, 1 << 15])
@pytest.mark.usefixtures("restore_threads")
def test_permutations_cut_into_blocks(count, bound):
    experts = np.random.default_rng(4).integers(0, bound, count)
    for threads in (1, 2, 5):
        ig.set_num_threads(threads)
        order, offsets = ig.expert_permutation(experts, bound)
        assert same((order, offsets), reference.expert_permutation(experts, bound))
        assert raw(ig.expert_counts(experts, bound)) == raw(np.diff(offsets))


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_special_values_in_several_blocks_of_tokens(dtype):
    p = values(np.random.default_rng(8), "normal", (1500, 5), dtype)
    p[[3, 1400], 0] = np.inf
    p[3, 1], p[1400, 1] = np.inf, -np.inf
    p[700, 2], p[3, 3] = np.nan, -np.inf
    for column in range(5):
        # The expert of the column has all the load, so that the others do not hide it.
        case = Case("", {"probabilities": p[:, column:], "experts": np.zeros((1500, 1), np.int64)})
        for threads in (1, 2):
            ig.set_num_threads(threads)
            assert same(run("load_balancing_loss", case, dtype), expected("load_balancing_loss", case)), column
            one = Case("", {"probabilities": p[:, column : column + 1], "experts": np.zeros((1500, 1), np.int64)})
            assert same(run("load_balancing_loss", one, dtype), expected("load_balancing_loss", one)), column


def test_duplicate_experts_count_once():
    rng = np.random.default_rng(5)
    logits, dweights = values(rng, "normal", (6, 12), "float32"), values(rng, "normal", (6, 4), "float32")
    for options in ({}, {"scoring": "sigmoid"}, {"renormalize": True}):
        case = Case("", {"dweights": dweights, "logits": logits, "experts": rng.integers(0, 3, (6, 4))}, options)
        assert same(run("moe_router_backward", case, "float32"), expected("moe_router_backward", case))


# --- one result, however the work is cut ------------------------------------------------------------------------------
@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("operation", SUITES)
def test_threads(operation, monkeypatch):
    helpers = []
    submit = parallel._submit
    monkeypatch.setattr(parallel, "_submit", lambda task, count: helpers.append(count) or submit(task, count))
    rng = np.random.default_rng(6)
    big = {
        "x": values(rng, "normal", (900, 300), "float32"),
        "w": values(rng, "normal", (900, 300), "float32"),
        "dt": values(rng, "normal", (900, 300), "float32"),
        "logits": values(rng, "normal", (900, 300), "float32"),
        "probabilities": values(rng, "normal", (900, 300), "float32"),
        "dloss": np.array(0.3, np.float32),
        "dweights": values(rng, "normal", (900, 4), "float32"),
        "weights": values(rng, "normal", (900, 4), "float32"),
        "dy": values(rng, "normal", (900, 300), "float32"),
        "expert_out": values(rng, "normal", (3600, 300), "float32"),
        "order": permutation(rng, 3600),
        "experts": rng.integers(0, 300, (900, 4)),
    }
    if operation in ("expert_counts", "expert_permutation"):
        big["experts"] = rng.integers(0, 300, (90_000, 4))
    if operation == "moe_permute_backward":
        big["dy"] = big["expert_out"]
    first = next(iter(SUITES[operation].cases("int64" if "expert_" in operation[:7] else "float32")))
    options = {
        "top_k": {"k": 4, "axis": -1},
        "moe_router": {"k": 4},
        "moe_permute": {"k": 4},
        "moe_permute_backward": {"k": 4},
        "expert_counts": {"num_experts": 300},
        "expert_permutation": {"num_experts": 300},
        "load_balancing_loss_backward": {"shape": (900, 300), "dtype": "float32"},
    }
    case = Case("", {name: big[name] for name in first.inputs}, options.get(operation, {}))
    dtype = "int64" if operation in ("expert_counts", "expert_permutation") else "float32"
    found = set()
    for threads in (1, 2, 5):
        ig.set_num_threads(threads)
        found.add(str([raw(x) for x in run(operation, case, dtype)]))
    assert len(found) == 1
    # The work really was shared: one helper beside the caller, then several.
    assert 1 in helpers
    assert max(helpers) > 1


# --- in place ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("operation", "output", "aliases"),
    [
        ("renormalize", "t", ["w"]),
        ("renormalize_backward", "dw", ["dt", "w"]),
        ("moe_router_backward", "dlogits", ["logits"]),
        ("moe_combine_backward", "d_expert_out", ["expert_out"]),
        ("router_z_loss_backward", "dlogits", ["logits"]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(operation, output, aliases, dtype):
    for case in SUITES[operation].cases(dtype):
        wanted = expected(operation, case)
        plan = SUITES[operation].plan.select(SUITES[operation].descriptor(case, dtype))
        for alias in aliases:
            inputs = {name: np.array(a) for name, a in case.inputs.items()}
            others = {
                o.name: np.empty(o.shape, np.dtype(o.dtype))
                for o in plan.descriptor.operands()
                if o.output and o.name != output
            }
            plan.run(**inputs, **others, **{output: inputs[alias]})
            assert same((inputs[alias], *others.values()), wanted), case.name


# --- the single operations together ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_fused_router_equals_its_parts(dtype, flavour, scoring):
    from isograd.elementwise import api as elementwise

    rng = np.random.default_rng(7)
    for renormalize, with_bias, scale in ((False, False, 1.0), (True, True, 2.5), (True, False, 1.0)):
        logits = values(rng, flavour, (40, 24), dtype)
        work = logits.astype("float64" if dtype == "float64" else "float32")
        bias = values(rng, "normal", (24,), work.dtype.name) if with_bias else None
        s = ig.softmax(work) if scoring == "softmax" else elementwise.sigmoid(work)
        with np.errstate(all="ignore"):
            values_, experts = ig.top_k(s if bias is None else s + bias, 5)
            weights = np.take_along_axis(s, experts, -1)
            assert with_bias or raw(values_) == raw(weights)
            weights = ig.renormalize(weights) if renormalize else weights
            weights = weights * weights.dtype.type(scale) if scale != 1 else weights
        options = {"scoring": scoring, "renormalize": renormalize}
        fused = ig.moe_router(logits, 5, bias=bias, scale=scale, **options)
        assert same(fused, (reference.ref.narrow(weights, weights.dtype), experts))

        g = values(rng, "normal", weights.shape, work.dtype.name)
        with np.errstate(all="ignore"):
            dw = g * g.dtype.type(scale) if scale != 1 else g
            dw = ig.renormalize_backward(dw, np.take_along_axis(s, experts, -1)) if renormalize else dw
            ds = reference.top_k_backward(dw, experts, s.shape)
            dx = ig.softmax_backward(ds, s) if scoring == "softmax" else elementwise.sigmoid_backward(ds, s)
        got = ig.moe_router_backward(g, logits, experts, scale=scale, **options)
        # Where no expert was chosen the sigmoid's gradient is +0 even if the score is no number.
        chosen = np.zeros(s.shape, bool)
        np.put_along_axis(chosen, experts, True, -1)
        dx = dx if scoring == "softmax" else np.where(chosen, dx, dx.dtype.type(0))
        assert raw(got) == raw(reference.ref.narrow(dx, logits.dtype))


def test_long_rows_keep_their_scratch_memory(run_python):
    # With this setting memory of more than 64 KiB leaves the process as soon as it is freed.
    code = """
        import numpy as np, isograd as ig
        rng = np.random.default_rng(0)
        x = rng.standard_normal((2, 70_001)).astype(np.float32)
        w, e = ig.moe_router(x, 300, renormalize=True)
        ig.top_k(x, 70_001), ig.moe_router_backward(w, x, e, renormalize=True), ig.renormalize_backward(x, x)
        ig.router_z_loss(x), ig.router_z_loss_backward(np.array(1, np.float32), x)
        ig.load_balancing_loss(x, e)
        ig.moe_combine_backward(x, x, np.ones((2, 1), np.float32), np.arange(2))
        print(abs(ig.renormalize(w).sum(1) - 1).max() < 1e-5)
    """
    assert run_python(code, MALLOC_MMAP_THRESHOLD_="65536") == "True"
