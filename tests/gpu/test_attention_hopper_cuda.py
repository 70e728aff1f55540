"""The Hopper kernels of attention on a real GPU, through plans: errors, equal bits, options, what is chosen."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from attention_bounds import FEW_KEYS, check_bound, to_numpy  # noqa: E402

import isograd  # noqa: E402
import isograd.torch as igt  # noqa: E402
from isograd.flash_attention import gluon_launch, reference  # noqa: E402
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor, AttentionDescriptor  # noqa: E402
from isograd.flash_attention.options import AttentionOptions  # noqa: E402
from isograd.flash_attention.plans import AttentionBackwardPlan, AttentionPlan  # noqa: E402

CAUSAL, FULL = AttentionOptions(causal=True), AttentionOptions()
OPTIONS = {"full": FULL, "causal": CAUSAL, "upper left": AttentionOptions(causal=True, alignment="upper_left")}
# batch, heads, heads of keys, lengths: ends within tiles, rows that see nothing, shared keys, several tiles
SHAPES = (
    (1, 1, 1, 64, 64),
    (2, 4, 2, 200, 333),
    (1, 2, 1, 257, 130),
    (1, 2, 1, 300, 500),
    (1, 8, 1, 1, 700),
    (2, 2, 2, 1000, 1000),
    (1, 2, 1, 1500, 2048),
)


class Variant(NamedTuple):
    """What the kernels take besides: sizes, dtype, options, sinks, whether packed."""

    head_dim: int
    dtype: str
    options: AttentionOptions
    sinks: str | None = None
    packed: bool = False


LEFT = AttentionOptions(causal=True, window=(150, None))
_VARIANTS = {
    "packed": Variant(128, "bfloat16", CAUSAL, packed=True),
    "packed, full": Variant(64, "float16", FULL, packed=True),
    "window": Variant(128, "bfloat16", LEFT),
    "window of two sides": Variant(64, "bfloat16", AttentionOptions(window=(100, 50))),
    "softcap": Variant(128, "bfloat16", AttentionOptions(causal=True, softcap=20.0)),
    "sinks": Variant(64, "bfloat16", CAUSAL, "float32"),
    "head dimension 80": Variant(80, "bfloat16", CAUSAL),
    "head dimension 96, packed": Variant(96, "bfloat16", CAUSAL, packed=True),
    "everything": Variant(112, "bfloat16", replace(LEFT, softcap=20.0), "bfloat16", True),
    "everything, 64": Variant(64, "float16", replace(LEFT, softcap=20.0), "float32", True),
}


def served(v: Variant) -> bool:
    """Whether the kernels take it; tests/attention/test_attention_gluon.py says what they have to take."""
    sizes = (1, 4, 2, 450, 600, v.head_dim, v.head_dim, v.dtype, v.options)
    descriptor = AttentionDescriptor(*sizes, sequences=8 if v.packed else None, sinks_dtype=v.sinks)
    return gluon_launch.supports(descriptor.validated()) is None


VARIANTS = {name: variant for name, variant in _VARIANTS.items() if served(variant)}
# Lengths of packed sequences, of q and of k: short, ends of tiles, without rows, without keys; some rows are left over.
LENGTHS = ((1, 127, 0, 128, 129, 40, 450, 64), (1, 130, 70, 128, 257, 0, 450, 500))
LEFT_OVER = 37


def ends_of(lengths: Sequence[int]) -> Any:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def operands(shape: tuple[int, ...], head_dim: int, dtype: Any, seed: int = 0) -> dict[str, Any]:
    """Inputs with the axes of heads and rows in either order."""
    batch, heads, kv_heads, lq, lk = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def rows(n: int, length: int, swapped: bool) -> Any:
        sizes = (batch, length, n, head_dim) if swapped else (batch, n, length, head_dim)
        t = torch.randn(sizes, generator=generator, device="cuda").to(dtype)
        return t.transpose(1, 2) if swapped else t

    return {
        "q": rows(heads, lq, True),
        "k": rows(kv_heads, lk, False),
        "v": rows(kv_heads, lk, True),
        "do": rows(heads, lq, False),
    }


def given(variant: Variant, sizes: tuple[int, int, int] = (2, 4, 2)) -> dict[str, Any]:
    """Inputs of a variant: packed sequences, or one length for all."""
    dtype = getattr(torch, variant.dtype)
    if variant.packed:
        q_ends, k_ends = map(ends_of, LENGTHS)
        lengths = int(q_ends[-1]) + LEFT_OVER, int(k_ends[-1]) + LEFT_OVER
        a = operands((1, *sizes[1:], *lengths), variant.head_dim, dtype)
        a |= {"cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends}
    else:
        a = operands((*sizes, 450, 600), variant.head_dim, dtype)
    if variant.sinks:
        a["sinks"] = torch.linspace(-2, 3, sizes[1], device="cuda").to(getattr(torch, variant.sinks))
    return a


def descriptors_of(a: dict[str, Any], options: AttentionOptions) -> tuple[Any, Any]:
    """Of the forward and of the backward pass."""
    q, k, v = (a[name] for name in "qkv")
    dtype = str(q.dtype).removeprefix("torch.")
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], dtype, options)
    extra: dict[str, Any] = {}
    if "cu_seqlens_q" in a:
        extra["sequences"] = a["cu_seqlens_q"].numel() - 1
    if "sinks" in a:
        extra["sinks_dtype"] = str(a["sinks"].dtype).removeprefix("torch.")
    return AttentionDescriptor(*sizes, **extra), AttentionBackwardDescriptor(*sizes, **extra, dsinks="sinks" in a)


def compute(a: dict[str, Any], options: AttentionOptions, kernel: str | None = "hopper") -> dict[str, Any]:
    q, do = a["q"], a["do"]
    forward, backward = descriptors_of(a, options)
    found = {**a, "o": torch.full_like(do, math.nan), "lse": torch.full(q.shape[:3], math.nan, device="cuda")}
    rest = {n: found[n] for n in ("cu_seqlens_q", "cu_seqlens_k", "sinks") if n in a}
    plan = AttentionPlan.select(forward, "cuda", kernel)
    plan.run(**{name: found[name] for name in ("q", "k", "v", "o", "lse")}, **rest)
    found |= {"d" + name: torch.full_like(a[name], math.nan) for name in "qkv"}
    if "sinks" in a:
        found["dsinks"] = torch.full_like(a["sinks"], math.nan)
    AttentionBackwardPlan.select(backward, "cuda", kernel).run(**found)
    return found


def plain(a: dict[str, Any], options: AttentionOptions) -> dict[str, Any]:
    """The same in PyTorch and the dtype of q, rounded after every step."""
    q, k, v, do = (a[name] for name in ("q", "k", "v", "do"))
    group, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[3])
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    seen = torch.from_numpy(reference.visible(options, q.shape[2], k.shape[2])).cuda()
    p = torch.softmax((q @ k.mT * scale).masked_fill(~seen, -math.inf).float(), -1).nan_to_num(0.0).to(q.dtype)
    ds = p * (do @ v.mT - (a["o"] * do).sum(-1, keepdim=True)) * scale
    shape = (*a["k"].shape[:2], group, *a["k"].shape[2:])
    return {"o": p @ v, "dq": ds @ k, "dk": (ds.mT @ q).view(shape).sum(2), "dv": (p.mT @ do).view(shape).sum(2)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_at_most_twice_that_of_a_plain_computation(
    shape: tuple[int, ...], name: str, head_dim: int, dtype: Any
) -> None:
    a = compute(operands(shape, head_dim, dtype), OPTIONS[name])
    inputs = [a[n].double().cpu().numpy() for n in ("q", "k", "v")]
    o, lse = reference.oracle_attention(*inputs, OPTIONS[name])
    np.testing.assert_allclose(a["lse"].cpu().numpy(), lse, rtol=1e-5, atol=1e-5)
    gradients = reference.oracle_attention_backward(a["do"].double().cpu().numpy(), *inputs, OPTIONS[name])
    exact = {"o": o, "dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}
    few = reference.visible(OPTIONS[name], shape[3], shape[4]).sum(-1).max() <= FEW_KEYS
    for n, found in plain(a, OPTIONS[name]).items():
        if few and n in ("dq", "dk"):
            check_bound(a, OPTIONS[name], n)
            continue
        error, least = (np.abs(t.double().cpu().numpy() - exact[n]).max() for t in (a[n], found))
        assert error <= 2 * least + 1e-5 * np.abs(exact[n]).max(), n


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_repetitions_under_load_have_equal_bits(head_dim: int) -> None:
    a = operands((2, 4, 2, 500, 700), head_dim, torch.bfloat16)
    first = compute(a, CAUSAL)
    load, side = torch.empty(1 << 26, device="cuda"), torch.cuda.Stream()
    for turn in range(1000):
        if turn % 10 == 0:
            with torch.cuda.stream(side):
                load.add_(1.0)
        again = compute(a, CAUSAL)
        assert all(torch.equal(first[n], again[n]) for n in ("o", "lse", "dq", "dk", "dv")), turn


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_do_not_depend_on_the_batch(head_dim: int) -> None:
    a = operands((8, 4, 2, 300, 500), head_dim, torch.float16)
    whole = compute(a, CAUSAL)
    alone = compute({n: t[5:6].contiguous() for n, t in a.items()}, CAUSAL)
    for n in ("o", "lse", "dq", "dk", "dv"):
        assert torch.equal(whole[n][5:6], alone[n]), n


# --- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", VARIANTS)
def test_options_are_within_the_promised_bound(name: str) -> None:
    variant = VARIANTS[name]
    a = compute(given(variant), variant.options)
    forward, backward = descriptors_of(a, variant.options)
    arrays = {n: to_numpy(a[n]) for n in ("do", "q", "k", "v", "o", "lse")}
    rest = {n: to_numpy(a[n]) for n in ("cu_seqlens_q", "cu_seqlens_k", "sinks") if n in a}
    inputs, qkv = reference.inputs_of(rest), [arrays[n] for n in "qkv"]
    o, lse = reference.oracle_attention(*qkv, variant.options, inputs)
    promised = AttentionPlan.select(forward, "cuda", "hopper").precision_guarantee.error_bound
    of_o, of_lse = promised(**{n: arrays[n] for n in "qkv"}, **rest, options=variant.options)
    seen = lse > -np.inf
    assert np.all(np.abs(arrays["o"].astype(np.float64) - o) <= of_o)
    assert np.all(np.isneginf(arrays["lse"][~seen]))
    assert np.all(np.abs(arrays["lse"][seen] - lse[seen]) <= of_lse[seen])
    exact = reference.oracle_attention_backward(
        arrays["do"], *qkv, variant.options, inputs, o=arrays["o"], lse=arrays["lse"]
    )
    promised = AttentionBackwardPlan.select(backward, "cuda", "hopper").precision_guarantee.error_bound
    limits = promised(**arrays, **rest, options=variant.options)
    names = ("dq", "dk", "dv", *(["dsinks"] if "sinks" in a else []))
    for n, limit in zip(names, limits, strict=True):
        assert np.all(np.abs(to_numpy(a[n]).astype(np.float64) - getattr(exact, n)) <= limit), n


RESULTS = ("o", "lse", "dq", "dk", "dv")


@pytest.mark.parametrize("name", [n for n, variant in VARIANTS.items() if variant.packed])
def test_a_sequence_has_its_bits_alone_packed_and_in_a_batch(name: str) -> None:
    """All of the others, and what is left over, are NaN in turn; nothing of them is read and none is written."""
    variant = VARIANTS[name]
    packed = given(variant)
    whole = compute(packed, variant.options)
    starts = [packed[f"cu_seqlens_{side}"].tolist() for side in "qk"]
    for n, (lq, lk) in enumerate(zip(*LENGTHS, strict=True)):
        if not lq:
            continue
        kernel = "hopper" if lk else "triton"  # which takes empty operands, with the same bits
        here = {x: slice(starts[s][n], starts[s][n] + length) for s, x, length in ((0, "q", lq), (1, "k", lk))}
        of = {**here, "v": here["k"], "dk": here["k"], "dv": here["k"]}
        alone = {x: packed[x][:, :, of.get(x, here["q"])] for x in ("q", "k", "v", "do")}
        if "sinks" in packed:
            alone["sinks"] = packed["sinks"]
        others = {x: t.repeat(3, 1, 1, 1) if t.ndim == 4 else t for x, t in alone.items()}
        for x in ("q", "k", "v", "do"):
            others[x][::2] = 0.5
        poisoned = dict(packed)
        for x in ("q", "k", "v", "do"):
            poisoned[x] = torch.full_like(packed[x], math.nan)
            poisoned[x][:, :, of.get(x, here["q"])] = alone[x]
        runs = (alone, kernel), (others, kernel), (poisoned, "hopper")
        one, three, among = (compute(x, variant.options, k) for x, k in runs)
        for x in RESULTS:
            part = of.get(x, here["q"])
            assert torch.equal(one[x], whole[x][:, :, part]), (x, n)
            assert torch.equal(one[x][0], three[x][1]), (x, n)
            assert torch.equal(one[x], among[x][:, :, part]), (x, n)
    for found in (whole, among):
        for x in ("o", "dq", "dk", "dv"):
            assert not found[x][:, :, -LEFT_OVER:].any(), x
        assert found["lse"][:, :, -LEFT_OVER:].isneginf().all()


@pytest.mark.parametrize("name", VARIANTS)
def test_options_have_equal_bits_on_every_run(name: str) -> None:
    a = given(VARIANTS[name])
    first = compute(a, VARIANTS[name].options)
    for _ in range(20):
        again = compute(a, VARIANTS[name].options)
        assert all(torch.equal(first[n], again[n]) for n in RESULTS)


def test_starts_out_of_order_are_reported() -> None:
    a = given(VARIANTS["packed"])
    a["cu_seqlens_q"] = a["cu_seqlens_q"].flip(0).contiguous()
    a["cu_seqlens_k"] = a["cu_seqlens_k"] * 3
    compute(a, CAUSAL)
    with pytest.raises(isograd.IndexOutOfRangeError, match="cu_seqlens"):
        isograd.check()


def test_rows_in_any_strides_have_equal_bits() -> None:
    """What descriptors cannot address is copied, which changes no bit: where memory lies does not enter."""
    a = given(VARIANTS["packed"])
    odd = dict(a)
    for n in ("q", "k", "v", "do"):
        wide = torch.empty((*a[n].shape[:3], 131), dtype=a[n].dtype, device="cuda")[..., 3:]
        odd[n] = wide.copy_(a[n])
    one, other = compute(a, CAUSAL), compute(odd, CAUSAL)
    assert all(torch.equal(one[n], other[n]) for n in RESULTS)


# --- what is chosen --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", VARIANTS)
def test_chosen_by_the_descriptor(name: str) -> None:
    """In both directions; what the kernels do not take goes to Triton's."""
    variant = VARIANTS[name]
    forward, backward = descriptors_of(given(variant), variant.options)

    def names(**changes: Any) -> list[str]:
        plans = (
            AttentionPlan.select(replace(forward, **changes), "cuda"),
            AttentionBackwardPlan.select(replace(backward, **changes), "cuda"),
        )
        return [plan.kernel.name for plan in plans]

    assert names() == ["hopper", "hopper"]
    assert names(dtype="float32", sinks_dtype="float32" if variant.sinks else None) == ["triton", "triton"]
    assert names(head_dim=256, v_dim=256) == ["triton", "triton"]
    assert names(v_dim=128 if variant.head_dim == 64 else 64) == ["triton", "triton"]
    assert names(options=replace(variant.options, dropout_p=0.1)) == ["triton", "triton"]
    if not variant.packed:
        assert names(mask_shape=(1, 1, 1, forward.k_length)) == ["triton", "triton"]
        assert names(bias_shape=(1, 1, 1, forward.k_length)) == ["triton", "triton"]
    assert AttentionPlan.select(forward, "cuda", "triton").kernel.name == "triton"


def test_taken_in_torch() -> None:
    """Without a word, with their bits; `isograd.prefer` brings back Triton's."""
    a = operands((2, 4, 2, 300, 500), 64, torch.bfloat16)
    q, k, v = (a[n].detach().requires_grad_() for n in "qkv")

    def results() -> list[Any]:
        o = igt.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return [o, *torch.autograd.grad(o, (q, k, v), a["do"])]

    usual = results()
    with isograd.prefer("triton"):
        other = results()
    for kernel, found in (("hopper", usual), ("triton", other)):
        expected = compute(a, FULL, kernel)
        assert all(torch.equal(x, expected[n]) for n, x in zip(("o", "dq", "dk", "dv"), found, strict=True))
    assert not torch.equal(usual[0], other[0])
    sequences = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    rows = [t[:1, :, :300].detach() for t in (q, k, v)]
    packed = igt.attention(*rows, causal=True, cu_seqlens=(sequences, sequences))
    alone = [igt.attention(*(t[:, :, i] for t in rows), causal=True) for i in (slice(0, 100), slice(100, 300))]
    assert torch.equal(packed, torch.cat(alone, 2))
