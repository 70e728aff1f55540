"""The cases of the router family, and what must not change their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from isograd.core.cases import Array, Arrays, Case, Change, normal, store
from isograd.numerics import random
from isograd.numerics.storage import compute_dtype
from isograd.ops.router import reference

_TINY = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}


def _integers(shape: tuple[int, ...], bound: int, stream: int) -> Array:
    """Integers from 0 to bound - 1, some of them much more often than others."""
    u = random.uniform(shape, seed=2024, stream=stream, dtype=np.float64)
    return np.asarray(u * u * bound).astype(np.int64)


def _in_work(values: Array, dtype: str) -> Array:
    return store(values, compute_dtype(dtype))


# --- rows ------------------------------------------------------------------------------------------------------------
def _special(shape: tuple[int, int], stream: int) -> Array:
    """Rows with zeros of both signs, infinities and NaN; the last three of one value alone."""
    x = normal(shape, stream).copy()
    x[:, ::3] = 0.0
    x[:, 1::6] = -0.0
    x[0, 5], x[1, 7], x[2, [2, 9]], x[3, 4] = np.nan, np.inf, -np.inf, -np.nan
    x[4, [3, 8]] = [np.inf, np.nan]
    x[-3], x[-2], x[-1] = np.nan, -np.inf, 0.0
    return x


def top_k(dtype: str) -> Iterator[Case]:
    """Rows of every kind, with ties."""

    def case(name: str, x: Array, k: int, axis: int = -1) -> Case:
        return Case(name, {"x": store(x, dtype)}, {"k": k, "axis": axis})

    for stream, (rows, n, k) in enumerate(((6, 1, 1), (6, 2, 2), (64, 256, 8), (5, 1000, 100), (2, 20_001, 300))):
        yield case(f"{rows} x {n}, k = {k}", normal((rows, n), 100 + stream), k)
    yield case("ties", np.rint(2 * normal((8, 500), 110)), 40)
    yield case("NaN, inf and zeros", _special((9, 40), 111), 40)
    yield case("subnormal", _TINY[dtype] * np.rint(20 * normal((4, 100), 112)), 10)
    yield case("ascending", np.broadcast_to(np.arange(300.0), (3, 300)), 64)
    yield case("middle axis", normal((4, 60, 9), 113), 5, 1)
    yield Case("transposed", {"x": store(normal((70, 12), 114), dtype).T}, {"k": 6, "axis": -1})


def renormalize(dtype: str) -> Iterator[Case]:
    """Sums that are ordinary, zero, or no number."""

    def case(name: str, w: Array, axis: int = -1) -> Case:
        return Case(name, {"w": store(w, dtype)}, {"axis": axis})

    for stream, shape in enumerate(((6, 1), (64, 8), (5, 300), (3, 70_001))):
        yield case(f"{shape[0]} x {shape[1]}", random.uniform(shape, seed=2024, stream=120 + stream, dtype=np.float64))
    yield case("signs", normal((20, 50), 130) + 0.5)
    yield case("zero sums", np.where(np.arange(40) % 2 == 0, 1.0, -1.0) * normal((4, 1), 131))
    yield case("zeros", np.zeros((3, 8)))
    yield case("subnormal", _TINY[dtype] * np.rint(20 * np.abs(normal((4, 100), 132))))
    yield case("NaN and inf", _special((9, 40), 133))
    yield case("middle axis", np.abs(normal((4, 60, 9), 134)), 1)


def renormalize_backward(dtype: str) -> Iterator[Case]:
    """The same with gradients."""
    for stream, case in enumerate(renormalize(dtype), 140):
        dt = store(normal(case.inputs["w"].shape, stream), dtype)
        yield Case(case.name, {"dt": dt, **case.inputs}, case.options)


# name, tokens, experts, k, options without the bias, whether there is one
_ROUTERS: tuple[tuple[str, int, int, int, dict[str, Any], bool], ...] = (
    ("1 of 1", 6, 1, 1, {}, False),
    ("8 of 256", 64, 256, 8, {}, False),
    ("2 of 8, renormalized", 40, 8, 2, {"renormalize": True}, False),
    ("8 of 1,024, scaled", 9, 1024, 8, {"renormalize": True, "scale": 2.5}, False),
    ("150 of 300", 7, 300, 150, {"renormalize": True}, False),
    ("sigmoid", 40, 64, 6, {"scoring": "sigmoid"}, False),
    ("sigmoid, bias, groups", 40, 256, 8, {
        "scoring": "sigmoid", "renormalize": True, "groups": 8, "group_k": 4, "scale": 2.5,
    }, True),
    ("bias", 20, 60, 4, {}, True),
    ("groups", 20, 60, 4, {"groups": 12, "group_k": 3}, False),
    ("groups of one expert", 20, 30, 4, {"groups": 30, "group_k": 6}, False),
)  # fmt: skip


def _logits(dtype: str) -> Iterator[tuple[str, Array, int, dict[str, Any], Array | None]]:
    for stream, (name, tokens, experts, k, options, bias) in enumerate(_ROUTERS, 160):
        row = _in_work(normal((experts,), 180 + stream) / 8, dtype) if bias else None
        yield name, store(2 * normal((tokens, experts), stream), dtype), k, options, row
    for scoring in ("softmax", "sigmoid"):
        options = {"scoring": scoring, "renormalize": True}
        yield f"{scoring}, ties", store(np.rint(normal((20, 64), 200)), dtype), 6, options, None
        yield f"{scoring}, wide", store(60 * normal((20, 64), 201), dtype), 6, options, None
        yield f"{scoring}, NaN and inf", store(_special((9, 40), 202), dtype), 8, options, None
    yield "three dimensions", store(normal((3, 5, 32), 203), dtype), 4, {}, None
    yield "transposed", store(normal((32, 20), 204), dtype).T, 4, {"renormalize": True}, None


def moe_router(dtype: str) -> Iterator[Case]:
    """Tokens for every option."""
    for name, logits, k, options, bias in _logits(dtype):
        inputs = {"logits": logits} if bias is None else {"logits": logits, "bias": bias}
        yield Case(name, inputs, {"k": k, **options})


def moe_router_backward(dtype: str) -> Iterator[Case]:
    """Gradients of what was chosen."""
    for stream, (name, logits, k, options, bias) in enumerate(_logits(dtype), 220):
        experts = reference.moe_router(logits, k, bias=bias, **options)[1]
        kept = {key: value for key, value in options.items() if key in ("scoring", "renormalize", "scale")}
        dweights = _in_work(normal(experts.shape, stream), dtype)
        yield Case(name, {"dweights": dweights, "logits": logits, "experts": experts}, kept)


# --- permutation -----------------------------------------------------------------------------------------------------
def expert_counts(dtype: str) -> Iterator[Case]:
    """Experts in arrays of any shape."""
    for stream, (shape, bound) in enumerate((((64, 8), 256), ((1, 1), 1), ((0,), 4), ((40_000,), 60), ((3, 4, 5), 7))):
        experts = _integers(shape, bound, 250 + stream).astype(dtype)
        yield Case(f"{'x'.join(map(str, shape))} of {bound}", {"experts": experts}, {"num_experts": bound})
    experts = _integers((40, 9), 16, 260).astype(dtype)
    yield Case("transposed", {"experts": experts.T}, {"num_experts": 16})


expert_permutation = expert_counts
# tokens, k, width
_SIZES = ((6, 1, 5), (20, 2, 64), (33, 8, 700), (4, 300, 9), (5, 3, 1))


def _orders() -> Iterator[tuple[str, int, int, int, Array]]:
    for stream, (tokens, k, width) in enumerate(_SIZES, 270):
        order = reference.expert_permutation(_integers((tokens, k), 8, stream), 8)[0]
        yield f"{tokens} tokens, k = {k}, width {width}", tokens, k, width, order


def moe_permute(dtype: str) -> Iterator[Case]:
    """Rows of tokens."""
    for stream, (name, tokens, k, width, order) in enumerate(_orders(), 280):
        yield Case(name, {"x": store(normal((tokens, width), stream), dtype), "order": order}, {"k": k})


def moe_permute_backward(dtype: str) -> Iterator[Case]:
    """Rows of entries, some of which cancel."""
    for stream, (name, tokens, k, width, order) in enumerate(_orders(), 290):
        dy = store(normal((tokens * k, width), stream), dtype)
        yield Case(name, {"dy": dy, "order": order}, {"k": k})
    name, tokens, k, width, order = list(_orders())[2]
    values = normal((tokens * k, width), 299).copy()
    values[::7, ::5], values[3, ::11], values[5, ::13] = -0.0, np.inf, -np.inf
    values[8, 1] = np.nan
    yield Case("NaN and inf", {"dy": store(values, dtype), "order": order}, {"k": k})
    # The k rows of a token cancel but for their rounding.
    signs = np.where(np.argsort(order) % 2 == 0, 1.0, -1.0)
    values = 1e4 * signs[:, None] + normal((tokens * k, width), 300)
    yield Case("cancellation", {"dy": store(values, dtype), "order": order}, {"k": k})


def moe_combine(dtype: str) -> Iterator[Case]:
    """The same with weights."""
    for stream, case in enumerate(moe_permute_backward(dtype), 310):
        expert_out, order = case.inputs["dy"], case.inputs["order"]
        shape = (order.size // case.options["k"], case.options["k"])
        weights = _in_work(np.abs(normal(shape, stream)), dtype)
        yield Case(case.name, {"expert_out": expert_out, "weights": weights, "order": order})


def moe_combine_backward(dtype: str) -> Iterator[Case]:
    """Gradients of those."""
    for stream, case in enumerate(moe_combine(dtype), 330):
        shape = (case.inputs["weights"].shape[0], case.inputs["expert_out"].shape[1])
        yield Case(case.name, {"dy": store(normal(shape, stream), dtype), **case.inputs})


# --- losses ----------------------------------------------------------------------------------------------------------
def load_balancing_loss(dtype: str) -> Iterator[Case]:
    """Probabilities of experts, columns that cancel."""
    for stream, (shape, k) in enumerate((((64, 8), 2), ((1, 1), 1), ((3000, 60), 6), ((4, 30, 16), 4)), 350):
        p = random.uniform(shape, seed=2024, stream=stream, dtype=np.float64)
        experts = _integers((*shape[:-1], k), shape[-1], 10 + stream)
        yield Case("x".join(map(str, shape)), {"probabilities": store(p * p, dtype), "experts": experts})
    special = _special((60, 40), 370)
    yield Case("NaN and inf", {"probabilities": store(special, dtype), "experts": _integers((60, 2), 40, 371)})
    signs = np.where(np.arange(2000) % 2 == 0, 1e4, -1e4)[:, None] + normal((2000, 6), 372)
    yield Case("cancellation", {"probabilities": store(signs, dtype), "experts": _integers((2000, 1), 6, 373)})


def load_balancing_loss_backward(dtype: str) -> Iterator[Case]:
    """Gradients of those."""
    for case in load_balancing_loss(dtype):
        dloss = _in_work(np.array(0.37), dtype)
        options = {"shape": case.inputs["probabilities"].shape, "dtype": dtype}
        yield Case(case.name, {"dloss": dloss, "experts": case.inputs["experts"]}, options)


def router_z_loss(dtype: str) -> Iterator[Case]:
    """Logits whose sums are large, near 1, or no number."""
    for stream, shape in enumerate(((64, 8), (1, 1), (500, 256), (4, 30, 16), (3, 1024)), 380):
        yield Case("x".join(map(str, shape)), {"logits": store(3 * normal(shape, stream), dtype)})
    yield Case("offsets", {"logits": store(normal((40, 30), 386) + 300 * normal((40, 1), 387), dtype)})
    # The maximum and the logarithm of the rest cancel.
    yield Case("near zero", {"logits": store(np.full((20, 8), -2.0794415) + normal((20, 8), 388) / 1000, dtype)})
    yield Case("-inf", {"logits": store(np.where(normal((20, 8), 389) > 0, -np.inf, 1.0), dtype)})
    yield Case("NaN and inf", {"logits": store(_special((9, 40), 390), dtype)})


def router_z_loss_backward(dtype: str) -> Iterator[Case]:
    """Gradients of those."""
    for case in router_z_loss(dtype):
        yield Case(case.name, {"dloss": _in_work(np.array(0.37), dtype), **case.inputs})


# --- what must not change a bit --------------------------------------------------------------------------------------
def _each(case: Case, change: Callable[[Array], Array], names: tuple[str, ...]) -> Case:
    return Case(case.name, {n: change(a) if n in names else a for n, a in case.inputs.items()}, case.options)


def _other_experts(case: Case) -> Iterator[Change]:
    """The experts numbered otherwise, the gradient put back."""
    logits = case.inputs["logits"]
    order = random.permutation(logits.shape[-1], seed=logits.shape[-1])
    inputs = dict(case.inputs)
    inputs["logits"] = np.take(logits, order, -1)
    inputs["experts"] = np.argsort(order)[case.inputs["experts"]]
    yield Change(Case(case.name, inputs, case.options), lambda results: tuple(np.take(r, order, -1) for r in results))


def _more_experts(case: Case) -> Iterator[Change]:
    """Experts with a logit of -inf, whom nobody chooses."""
    logits = case.inputs["logits"]
    finite = np.isfinite(logits.astype(np.float64)).sum(axis=-1).min(initial=0) if logits.size else 0
    if "bias" in case.inputs or case.options.get("groups", 1) > 1 or finite < case.options.get("k", 1):
        return
    width = [(0, 0)] * (logits.ndim - 1) + [(0, 37)]
    padded = np.pad(logits, width, constant_values=np.array(-np.inf, logits.dtype))

    def kept(results: Arrays) -> Arrays:
        return tuple(r[..., : logits.shape[-1]] if r.shape[-1] == padded.shape[-1] else r for r in results)

    yield Change(Case(case.name, {**case.inputs, "logits": padded}, case.options), seen=kept)


def _other_entries(case: Case) -> Iterator[Change]:
    """The entries of every token in reversed order."""
    order = case.inputs["order"]
    k = case.options["k"] if "k" in case.options else case.inputs["weights"].shape[1]
    inputs = {**case.inputs, "order": order // k * k + (k - 1 - order % k)}
    if "weights" in inputs:
        inputs["weights"] = inputs["weights"][:, ::-1]

    def expected(results: Arrays) -> Arrays:
        return results if len(results) == 1 else (results[0], results[1][:, ::-1])

    yield Change(Case(case.name, inputs, case.options), expected)


def _other_tokens(case: Case) -> Iterator[Change]:
    """The tokens in reversed order."""
    names = tuple(name for name, a in case.inputs.items() if a.ndim)
    yield Change(
        _each(case, lambda a: a[::-1], names), lambda results: tuple(r[::-1] if r.ndim else r for r in results)
    )


def _none(case: Case) -> Iterator[Change]:
    """Nothing: what is chosen of equal elements depends on where they are, and entries are named by their places."""
    return iter(())


top_k_order = moe_router_order = _none
expert_counts_order = expert_permutation_order = moe_permute_order = _none
moe_router_backward_order = _other_experts
moe_router_padding = moe_router_backward_padding = _more_experts
moe_permute_backward_order = moe_combine_order = moe_combine_backward_order = _other_entries
load_balancing_loss_order = load_balancing_loss_backward_order = _other_tokens
router_z_loss_order = router_z_loss_backward_order = _other_tokens
