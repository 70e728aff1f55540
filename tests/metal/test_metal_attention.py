"""Attention's Metal kernels in the emulator: the bits of the row sums, and the rest within the promised bounds.

And by FlashAttention's own rule: no result is further off than twice that of a plain computation in PyTorch.
"""

from typing import Any

import numpy as np
import pytest
import torch
from emulated import needed_barriers, run
from emulator import FLUSHES, SCHEDULES, EmulatorError, Library, needs_compiler, without_barrier
from problems import DTYPES, array, same_bits, stored, tensor

from isograd.cli.suites import SUITES, cases
from isograd.devices import metal
from isograd.flash_attention import reference
from isograd.flash_attention.descriptors import (
    AttentionBackwardDescriptor,
    AttentionDeltaDescriptor,
    AttentionDescriptor,
)
from isograd.flash_attention.metal import MetalAttention
from isograd.flash_attention.options import AttentionOptions

pytestmark = needs_compiler
KERNEL = MetalAttention()
QUICK = ("-O1",)
# batch, heads, heads of k and v, queries, keys, columns of q and k, columns of v, causal
SHAPES = (
    (1, 2, 1, 33, 70, 64, 64, True),
    (2, 2, 2, 17, 40, 64, 40, False),
    (1, 4, 2, 40, 31, 128, 128, True),
    (1, 1, 1, 20, 20, 256, 256, True),
    (1, 1, 1, 1, 65, 192, 256, False),
    (1, 2, 2, 65, 1, 16, 24, True),
)


@pytest.fixture(scope="module")
def compiled() -> Library:
    return Library(metal.source("flash_attention"), QUICK)


def _problem(shape: tuple[Any, ...], dtype: str) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Arrays, and the fields of the descriptor."""
    batch, heads, kv_heads, n, m, dim, v_dim, causal = shape
    rng = np.random.default_rng(n + m)
    sizes = {"q": (heads, n, dim), "k": (kv_heads, m, dim), "v": (kv_heads, m, v_dim), "do": (heads, n, v_dim)}
    arrays = {name: stored(rng.standard_normal((batch, *size)), dtype) for name, size in sizes.items()}
    names = ("batch", "heads", "kv_heads", "q_length", "k_length", "head_dim", "v_dim")
    fields = dict(zip(names, shape[:7], strict=True)) | {"dtype": dtype, "options": AttentionOptions(causal=causal)}
    return arrays, fields


def _forward(a: dict[str, Any], fields: dict[str, Any], seed: int, library: Library) -> tuple[Any, Any]:
    descriptor = AttentionDescriptor(**fields)
    o = torch.empty(descriptor.o_shape, dtype=getattr(torch, fields["dtype"]))
    lse = torch.empty(descriptor.lse_shape)
    inputs = {name: tensor(a[name]) for name in ("q", "k", "v")}
    run(KERNEL, descriptor, seed, FLUSHES, library, **inputs, o=o, lse=lse)
    return array(o), array(lse)


def _backward(
    a: dict[str, Any], fields: dict[str, Any], o: Any, lse: Any, dlse: Any, seed: int, library: Library
) -> tuple[Any, ...]:
    descriptor = AttentionBackwardDescriptor(**fields, dlse=dlse is not None)
    inputs = {name: tensor(a[name]) for name in ("do", "q", "k", "v")} | {"o": tensor(o), "lse": tensor(lse)}
    if dlse is not None:
        inputs["dlse"] = tensor(dlse)
    outputs = {f"d{name}": torch.empty_like(inputs[name]) for name in ("q", "k", "v")}
    run(KERNEL, descriptor, seed, FLUSHES, library, **inputs, **outputs)
    return tuple(array(out) for out in outputs.values())


def _within(got: tuple[Any, ...], exact: tuple[Any, ...], bounds: tuple[Any, ...]) -> bool:
    with np.errstate(invalid="ignore"):
        return all(
            bool(np.all((np.abs(g.astype(np.float64) - e) <= b) | (g.astype(np.float64) == e)))
            for g, e, b in zip(got, exact, bounds, strict=True)
        )


def _plain(a: dict[str, Any], options: AttentionOptions) -> list[np.ndarray[Any, Any]]:
    """o, dq, dk, dv by PyTorch, in the arrays' dtype."""
    q, k, v, do = (tensor(a[name]).requires_grad_() for name in ("q", "k", "v", "do"))
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ wide_k.transpose(2, 3)) * (1 / q.shape[3] ** 0.5)
    seen = torch.from_numpy(reference.visible(options, q.shape[2], k.shape[2]))
    p = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num(0)
    o = p @ wide_v
    return [array(x.detach()) for x in (o, *torch.autograd.grad(o, (q, k, v), do))]


def _largest(x: Any, exact: Any) -> float:
    return float(np.max(np.abs(x.astype(np.float64) - exact), initial=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bounds_and_the_rule_of_flash_attention(shape: tuple[Any, ...], dtype: str, compiled: Library) -> None:
    a, fields = _problem(shape, dtype)
    options = fields["options"]
    o, lse = _forward(a, fields, 0, compiled)
    inputs = {name: a[name] for name in ("q", "k", "v")}
    exact = reference.oracle_attention(*inputs.values(), options)
    promised = KERNEL.sku(AttentionDescriptor(**fields).validated()).precision_guarantee
    assert not promised.bit_stable_across_hardware
    assert _within((o, lse), exact, promised.error_bound(**inputs, options=options))
    dlse = np.random.default_rng(3).standard_normal(lse.shape).astype(np.float32)
    dlse[np.isneginf(lse)] = -np.inf  # as from a loss of lse squared, in rows that see nothing
    found = _backward(a, fields, o, lse, dlse, 1, compiled)
    gradients = reference.oracle_attention_backward(a["do"], *inputs.values(), options, dlse=dlse, o=o, lse=lse)
    bound = KERNEL.sku(AttentionBackwardDescriptor(**fields, dlse=True).validated()).precision_guarantee.error_bound
    assert _within(found, gradients[:3], bound(do=a["do"], **inputs, o=o, lse=lse, dlse=dlse, options=options))
    if dtype == "float32":  # there a plain computation's error is that of a BLAS, and of how a processor's one adds
        return
    # The rule, for what a user computes: no gradient of lse.
    found = (o, *_backward(a, fields, o, lse, None, 2, compiled))
    right = (exact[0], *reference.oracle_attention_backward(a["do"], *inputs.values(), options)[:3])
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for got, wanted, plain in zip(found, right, _plain(a, options), strict=True):
        size = float(np.max(np.abs(wanted)))
        if size > 1e-10:  # with a single key dS is 0, and what is left is rounding: the bounds above hold
            assert _largest(got, wanted) <= 2 * _largest(plain, wanted) + unit * size


def test_same_bits_under_every_schedule_and_in_every_batch(compiled: Library) -> None:
    a, fields = _problem((3, 2, 1, 40, 50, 64, 64, True), "float16")
    results = [_forward(a, fields, seed, compiled) for seed in SCHEDULES]
    gradients = [_backward(a, fields, *results[0], None, seed, compiled) for seed in SCHEDULES]
    for got in results[1:]:
        assert all(map(same_bits, got, results[0]))
    for got in gradients[1:]:
        assert all(map(same_bits, got, gradients[0]))
    single = {name: x[1:2] for name, x in a.items()}
    alone = _forward(single, fields | {"batch": 1}, 0, compiled)
    assert all(same_bits(x, y[1:2]) for x, y in zip(alone, results[0], strict=True))
    alone = _backward(single, fields | {"batch": 1}, *alone, None, 1, compiled)
    assert all(same_bits(x, y[1:2]) for x, y in zip(alone, gradients[0], strict=True))


def test_strided_arrays_and_groups_that_serve_several_tiles(compiled: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays in the layout [B, L, H, D], every other column."""
    a, fields = _problem((2, 2, 1, 40, 50, 40, 24, True), "bfloat16")
    expected = _forward(a, fields, 0, compiled)
    monkeypatch.setattr("isograd.devices.metal.MOST_GROUPS", 2)

    def turned(x: Any) -> torch.Tensor:
        wide = tensor(np.repeat(x.transpose(0, 2, 1, 3), 2, -1))
        return wide[..., ::2].permute(0, 2, 1, 3)

    o, lse = turned(np.zeros_like(a["do"])), torch.empty(2, 2, 40)
    inputs = {name: turned(a[name]) for name in ("q", "k", "v")}
    run(KERNEL, AttentionDescriptor(**fields), 3, FLUSHES, compiled, **inputs, o=o, lse=lse)
    assert same_bits(array(o), expected[0])
    assert same_bits(array(lse), expected[1])
    given = inputs | {"do": turned(a["do"]), "o": o, "lse": lse}
    outputs = {f"d{name}": turned(np.zeros_like(a[name])) for name in ("q", "k", "v")}
    run(KERNEL, AttentionBackwardDescriptor(**fields), 2, FLUSHES, compiled, **given, **outputs)
    wanted = _backward(a, fields, *expected, None, 0, compiled)
    assert all(same_bits(array(x), y) for x, y in zip(outputs.values(), wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_row_sums(dtype: str, compiled: Library) -> None:
    for number, case in enumerate(cases("attention_delta", dtype)):
        descriptor = SUITES["attention_delta"].descriptor(case, dtype)
        delta = torch.empty(case.inputs["o"].shape[:3])
        given = {name: tensor(a) for name, a in case.inputs.items()}
        run(KERNEL, descriptor, number, FLUSHES, compiled, **given, delta=delta)
        assert same_bits(array(delta), reference.attention_delta(**case.inputs)), case.name


def test_rows_beyond_16_bits_of_the_row_sums(compiled: Library) -> None:
    rng = np.random.default_rng(4)
    o, do = stored(rng.standard_normal((2, 70_000, 16)), "bfloat16").reshape(2, 1, 70_000, 16)
    delta = torch.empty(1, 1, 70_000)
    descriptor = AttentionDeltaDescriptor(1, 1, 70_000, 16, "bfloat16")
    run(KERNEL, descriptor, 0, FLUSHES, compiled, o=tensor(o[None]), do=tensor(do[None]), delta=delta)
    some = np.r_[:100, 65_500:65_600, 69_900:70_000]
    assert same_bits(array(delta)[0, 0, some], reference.attention_delta(o[0, some], do[0, some]))


def test_long_sequences(compiled: Library) -> None:
    """8,191 keys of one query; one key of 70,000 queries."""
    a, fields = _problem((1, 1, 1, 1, 8191, 64, 64, False), "float16")
    got = _forward(a, fields, 2, compiled)
    inputs = {name: a[name] for name in ("q", "k", "v")}
    promised = KERNEL.sku(AttentionDescriptor(**fields).validated()).precision_guarantee
    exact = reference.oracle_attention(*inputs.values(), fields["options"])
    assert _within(got, exact, promised.error_bound(**inputs, options=fields["options"]))
    a, fields = _problem((1, 1, 1, 70_000, 1, 16, 16, False), "bfloat16")
    o, lse = _forward(a, fields, 3, compiled)
    assert same_bits(o, np.ascontiguousarray(np.broadcast_to(a["v"], o.shape)))
    assert np.allclose(lse, reference.oracle_attention(a["q"], a["k"], a["v"], fields["options"])[1], atol=1e-6)


def test_values_at_masked_keys_do_not_matter(compiled: Library) -> None:
    """Not even NaN and infinity."""
    a, fields = _problem((1, 1, 1, 20, 40, 64, 64, True), "float32")
    fields["options"] = AttentionOptions(causal=True, alignment="upper_left")
    expected = _forward(a, fields, 0, compiled)
    wanted = _backward(a, fields, *expected, None, 0, compiled)
    a["k"][:, :, 20:], a["v"][:, :, 20:] = np.nan, np.inf
    got = _forward(a, fields, 1, compiled)
    assert all(map(same_bits, got, expected))
    dq, dk, dv = _backward(a, fields, *got, None, 1, compiled)
    assert same_bits(dq, wanted[0])
    assert same_bits(dk, wanted[1])
    assert same_bits(dv, wanted[2])
    assert not dk[:, :, 20:].any()


def test_scores_that_are_not_finite(compiled: Library) -> None:
    a, fields = _problem((1, 1, 1, 3, 40, 64, 64, False), "float32")
    a["q"][0, 0, 1], a["k"][0, 0, 5] = np.nan, 0
    a["q"][0, 0, 2, 0], a["k"][0, 0, :, 0] = 1, 0
    a["k"][0, 0, 7, 0] = -np.inf
    a["q"][0, 0, 0, 0] = 0.5
    o, lse = _forward(a, fields, 0, compiled)
    exact = reference.oracle_attention(a["q"], a["k"], a["v"], fields["options"])
    assert np.isnan(o[0, 0, 1]).all()
    assert np.isnan(lse[0, 0, 1])
    assert np.allclose(o[0, 0, [0, 2]], exact[0][0, 0, [0, 2]], rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("which", needed_barriers("flash_attention"))
def test_a_removed_barrier_is_found(which: int) -> None:
    a, fields = _problem((1, 1, 1, 40, 50, 64, 64, True), "float32")
    library = Library(without_barrier(metal.source("flash_attention"), which), ("-O0",))
    options = fields["options"]
    exact = reference.oracle_attention(a["q"], a["k"], a["v"], options)
    o, lse = exact[0].astype(np.float32), exact[1].astype(np.float32)
    gradients = reference.oracle_attention_backward(a["do"], a["q"], a["k"], a["v"], options)[:3]

    def right(seed: int) -> bool:
        try:
            got = (*_forward(a, fields, seed, library), *_backward(a, fields, o, lse, None, seed, library))
        except EmulatorError:
            return False
        return all(np.allclose(x, y, atol=1e-4) for x, y in zip(got, (*exact, *gradients), strict=True))

    assert not all(map(right, SCHEDULES))


def test_what_is_not_served_and_what_is_nothing() -> None:
    _, fields = _problem((1, 1, 1, 3, 4, 64, 64, False), "float32")
    for options in ({"window": (1, 1)}, {"softcap": 1.0}, {"dropout_p": 0.5}):
        descriptor = AttentionDescriptor(**(fields | {"options": AttentionOptions(**options)})).validated()
        assert "it serves full and causal attention" in str(KERNEL.reject(descriptor))
    assert "it serves" in str(KERNEL.reject(AttentionDescriptor(**fields, sinks_dtype="float32").validated()))
    assert "no Apple GPU" in str(KERNEL.reject(AttentionDescriptor(**fields).validated()))
    none = torch.ones(1, 1, 3, 64)
    descriptor = AttentionDescriptor(**(fields | {"k_length": 0})).validated()
    lse = torch.zeros(1, 1, 3)
    empty = torch.empty(1, 1, 0, 64)
    assert list(KERNEL.launches(descriptor, {"q": none, "k": empty, "v": empty, "o": none, "lse": lse})) == []
    assert not none.any()
    assert lse.eq(float("-inf")).all()


def test_no_queries_or_keys_have_zero_gradients() -> None:
    _, fields = _problem((1, 1, 1, 0, 4, 64, 64, False), "float32")
    descriptor = AttentionBackwardDescriptor(**fields).validated()
    gradients = {name: torch.ones(operand.shape) for operand in descriptor.operands() if (name := operand.name)}
    assert list(KERNEL.launches(descriptor, gradients)) == []
    assert not gradients["dk"].any()
    assert not gradients["dv"].any()
    descriptor = AttentionDescriptor(**fields).validated()
    assert list(KERNEL.launches(descriptor, {name: gradients[name] for name in ("q", "k", "v", "o", "lse")})) == []
