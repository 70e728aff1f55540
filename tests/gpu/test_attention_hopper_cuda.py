"""The Hopper kernels of attention on a real GPU, through plans: FlashAttention's error rule and equal bits."""

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from attention_bounds import FEW_KEYS, check_bound  # noqa: E402

import isograd  # noqa: E402
import isograd.torch as igt  # noqa: E402
from isograd.flash_attention import reference  # noqa: E402
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


def compute(a: dict[str, Any], options: AttentionOptions) -> dict[str, Any]:
    q, k, v, do = (a[name] for name in ("q", "k", "v", "do"))
    dtype = str(q.dtype).removeprefix("torch.")
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], dtype, options)
    found = {**a, "o": torch.full_like(do, math.nan), "lse": torch.full(q.shape[:3], math.nan, device="cuda")}
    forward = AttentionPlan.select(AttentionDescriptor(*sizes), "cuda", "hopper")
    forward.run(**{name: found[name] for name in ("q", "k", "v", "o", "lse")})
    found |= {"d" + name: torch.full_like(a[name], math.nan) for name in "qkv"}
    AttentionBackwardPlan.select(AttentionBackwardDescriptor(*sizes), "cuda", "hopper").run(**found)
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


def test_preferred_in_torch() -> None:
    """`isograd.prefer` brings the kernels to isograd.torch, with their bits; what they do not take goes elsewhere."""
    a = operands((2, 4, 2, 300, 500), 64, torch.bfloat16)
    q, k, v = (a[n].detach().requires_grad_() for n in "qkv")
    assert isograd.prefer("hopper") == ()
    try:
        o = igt.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        gradients = torch.autograd.grad(o, (q, k, v), a["do"])
        windowed = igt.attention(q, k, v, window=(20, 30))
    finally:
        assert isograd.prefer() == ("hopper",)
    found = compute(a, FULL)
    assert all(torch.equal(x, found[n]) for n, x in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=True))
    assert torch.equal(windowed, igt.attention(q, k, v, window=(20, 30)))
