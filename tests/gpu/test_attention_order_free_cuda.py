"""Order-free attention on a real GPU: the bits of the reference and of the CPU, of any batch and packing."""

from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from attention_bounds import to_numpy  # noqa: E402

import isograd  # noqa: E402
from isograd.flash_attention.descriptors import AttentionBackwardDescriptor, AttentionDescriptor  # noqa: E402
from isograd.flash_attention.options import AttentionOptions  # noqa: E402
from isograd.flash_attention.order_free import reference  # noqa: E402
from isograd.flash_attention.order_free import triton_launch as launch  # noqa: E402
from isograd.flash_attention.plans import AttentionBackwardPlan, AttentionPlan  # noqa: E402
from isograd.flash_attention.reference import Inputs  # noqa: E402

FULL, CAUSAL = AttentionOptions(), AttentionOptions(causal=True)
NAMES = ("o", "lse", "dq", "dk", "dv", "dsinks")


class Shape(NamedTuple):
    batch: int = 1
    heads: int = 4
    groups: int = 2
    lq: int = 300
    lk: int = 333
    head_dim: int = 64
    v_dim: int = 64
    dtype: str = "bfloat16"


def operands(s: Shape, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda").to(getattr(torch, s.dtype))

    return {
        "q": normal(s.batch, s.heads, s.lq, s.head_dim),
        "k": normal(s.batch, s.heads // s.groups, s.lk, s.head_dim),
        "v": normal(s.batch, s.heads // s.groups, s.lk, s.v_dim),
        "do": normal(s.batch, s.heads, s.lq, s.v_dim),
    }


def fields(a: dict[str, Any], options: AttentionOptions) -> dict[str, Any]:
    """The fields of a descriptor."""
    q, k, v = (a[name] for name in "qkv")
    bias, mask, sinks = a.get("bias"), a.get("mask"), a.get("sinks")
    return {
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "q_length": q.shape[2],
        "k_length": k.shape[2],
        "head_dim": q.shape[3],
        "v_dim": v.shape[3],
        "dtype": str(q.dtype).removeprefix("torch."),
        "options": options,
        "bias_shape": None if bias is None else tuple(bias.shape),
        "bias_dtype": None if bias is None else str(bias.dtype).removeprefix("torch."),
        "mask_shape": None if mask is None else tuple(mask.shape),
        "segments": "q_segment_ids" in a,
        "sequences": a["cu_seqlens_q"].numel() - 1 if "cu_seqlens_q" in a else None,
        "sinks_dtype": None if sinks is None else str(sinks.dtype).removeprefix("torch."),
    }


def compute(a: dict[str, Any], options: AttentionOptions) -> dict[str, Any]:
    """Results through plans."""
    given, more = fields(a, options), {"dlse": "dlse" in a, "dsinks": "sinks" in a}
    found = {**a, "o": torch.full_like(a["do"], 7), "lse": torch.full(a["q"].shape[:3], 7.0, device="cuda")}
    forward = AttentionPlan.select(AttentionDescriptor(**given), "cuda", "order_free")
    forward.run(**{name: x for name, x in found.items() if name not in ("do", "dlse")})
    found |= {"d" + name: torch.full_like(a[name], 7) for name in ("q", "k", "v", "sinks") if name in a}
    AttentionBackwardPlan.select(AttentionBackwardDescriptor(**given, **more), "cuda", "order_free").run(**found)
    return {name: found[name] for name in NAMES if name in found}


def expected(a: dict[str, Any], options: AttentionOptions, found: dict[str, Any]) -> dict[str, Any]:
    """The reference's results; those of the backward pass for the o and lse that were found."""
    x = {name: to_numpy(t) for name, t in a.items()}

    def pair(first: str, second: str) -> Any:
        return (x[first], x[second]) if first in x else None

    inputs = Inputs(
        x.get("bias"),
        x.get("mask"),
        pair("q_segment_ids", "k_segment_ids"),
        pair("cu_seqlens_q", "cu_seqlens_k"),
        x.get("sinks"),
    )
    q, k, v, do = (x[name] for name in ("q", "k", "v", "do"))
    o, lse = reference.attention(q, k, v, options, inputs)
    given = to_numpy(found["o"]), to_numpy(found["lse"])
    gradients = reference.attention_backward(do, q, k, v, *given, options, inputs, x.get("dlse"))
    return {"o": o, "lse": lse} | {name: getattr(gradients, name) for name in NAMES[2:] if name in found}


def check(a: dict[str, Any], options: AttentionOptions = FULL) -> None:
    found = compute(a, options)
    for name, x in expected(a, options, found).items():
        assert to_numpy(found[name]).tobytes() == x.tobytes(), (name, options)


def bits(t: Any) -> Any:
    return t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)


# --- options ---------------------------------------------------------------------------------------------------------
def extras(s: Shape) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device="cuda")

    return {
        "bias": {"bias": normal(1, s.heads, s.lq, s.lk).to(getattr(torch, s.dtype))},
        "mask": {"mask": normal(s.batch, 1, s.lq, s.lk) > -0.5},
        "segments": {
            "q_segment_ids": torch.arange(s.lq, device="cuda").int().expand(s.batch, s.lq).contiguous() // 50,
            "k_segment_ids": torch.arange(s.lk, device="cuda").int().expand(s.batch, s.lk).contiguous() // 50,
        },
        "packed": {
            "cu_seqlens_q": torch.tensor([0, 70, 70, 75, 230], device="cuda").int(),
            "cu_seqlens_k": torch.tensor([0, 130, 140, 140, 310], device="cuda").int(),
        },
        "sinks": {"sinks": normal(s.heads), "dlse": normal(s.batch, s.heads, s.lq)},
    }


# Few problems, as each compiles kernels of its own.
CASES = {
    "full": (FULL, None),
    "causal": (CAUSAL, None),
    "window": (AttentionOptions(window=(65, 3), alignment="upper_left"), None),
    "softcap": (AttentionOptions(softcap=2.0), None),
    "dropout": (AttentionOptions(dropout_p=0.2, seed=0xFEDCBA9876543210), None),
    "causal, bias": (CAUSAL, "bias"),
    "mask": (FULL, "mask"),
    "segments": (FULL, "segments"),
    "packed, causal": (CAUSAL, "packed"),
    "sinks": (CAUSAL, "sinks"),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_options(case: str, head_dim: int) -> None:
    options, extra = CASES[case]
    s = Shape(head_dim=head_dim, v_dim=head_dim)
    check(operands(s) | (extras(s)[extra] if extra else {}), options)


@pytest.mark.parametrize(
    ("head_dim", "v_dim", "dtype"),
    [(128, 128, "float16"), (40, 128, "bfloat16"), (96, 64, "float16"), (72, 16, "bfloat16"), (256, 96, "bfloat16")],
)
def test_head_dimensions(head_dim: int, v_dim: int, dtype: str) -> None:
    check(operands(Shape(1, 2, 1, 200, 260, head_dim, v_dim, dtype)), CAUSAL)


def test_lengths() -> None:
    for lq, lk in ((1, 1), (1, 700), (63, 129), (128, 128), (129, 127), (500, 1000)):
        check(operands(Shape(1, 2, 1, lq, lk)), CAUSAL)


def test_what_is_not_finite_and_rows_out_of_reach() -> None:
    for name, place, value in (("q", 5, float("nan")), ("k", 9, float("inf")), ("v", 11, float("nan")), ("do", 7, 0.0)):
        a = operands(Shape(1, 2, 1, 130, 260))
        a[name][0, 0, place, 3] = value
        a["q"][0, 1, 20] *= 2.0**60
        a["k"][0, 1, 30] *= 2.0**60
        check(a, CAUSAL)


# --- no trace of other rows ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head_dim", [64, 128])
def test_alone_in_a_batch_and_packed(head_dim: int) -> None:
    lengths = [(77, 300), (0, 5), (300, 300), (64, 0), (128, 128), (1, 2), (513, 600)]
    parts = [operands(Shape(1, 4, 2, *lengths[n], head_dim, head_dim), n) for n in range(len(lengths))]
    alone = [compute(a, CAUSAL) for a in parts]
    packed = {name: torch.cat([a[name] for a in parts], 2) for name in parts[0]}
    starts = [torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in zip(*lengths, strict=True)]
    together = compute(packed | {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}, CAUSAL)
    for name in NAMES[:5]:
        assert torch.equal(bits(torch.cat([x[name] for x in alone], 2)), bits(together[name])), name
    eight = [operands(Shape(1, 4, 2, 300, 333, head_dim, head_dim), n) for n in range(8)]
    batch = compute({name: torch.cat([a[name] for a in eight]) for name in eight[0]}, CAUSAL)
    for n, a in enumerate(eight):
        one = compute(a, CAUSAL)
        for name in NAMES[:5]:
            assert torch.equal(bits(one[name]), bits(batch[name][n : n + 1])), name


def test_a_prefix_has_the_rows_of_the_whole() -> None:
    a = operands(Shape(1, 4, 2, 700, 700, 128, 128))
    whole = compute(a, CAUSAL)
    for length in (1, 128, 333):
        part = compute({name: x[:, :, :length] for name, x in a.items()}, CAUSAL)
        for name in ("o", "lse"):
            assert torch.equal(bits(part[name]), bits(whole[name][:, :, :length])), name


def test_tiles_and_repetitions_leave_no_trace() -> None:
    a = operands(Shape(2, 4, 2, 500, 777, 128, 128))
    first = compute(a, CAUSAL)
    d: Any = AttentionBackwardDescriptor(**fields(a, CAUSAL)).validated()
    for tile in (launch.Tile(64, 4, 1), launch.Tile(128, 8, 1)):
        found = {name: torch.full_like(x, 7) for name, x in first.items()}
        launch.forward(d, a | found, tile)
        launch.backward(d, a | found, launch.BackwardTiles(tile, tile))
        for name in NAMES[:5]:
            assert torch.equal(bits(first[name]), bits(found[name])), (name, tile)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        again = compute(a, CAUSAL)
        for name in NAMES[:5]:
            wrong += (bits(first[name]) != bits(again[name])).sum()
    assert wrong.item() == 0


# --- large -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
def test_8192(causal: bool) -> None:
    """Some rows of o and dq, and some of dk and dv, of a head of 8,192 beside the reference of the whole head."""
    a = operands(Shape(1, 1, 1, 8192, 8192, 128, 128))
    options = CAUSAL if causal else FULL
    found = compute(a, options)
    # Rows of q are independent; with the offset of their place a causal row sees what it sees in the whole.
    rows = torch.tensor([0, 1, 127, 128, 4000, 8000, 8191], device="cuda")
    for row in rows.tolist():
        keys = row + 1 if causal else 8192
        part = {name: a[name][:, :, row : row + 1] for name in ("q", "do")}
        part |= {name: a[name][:, :, :keys] for name in "kv"}
        x = {name: to_numpy(t) for name, t in part.items()}
        o, lse = reference.attention(x["q"], x["k"], x["v"], options)
        gradients = reference.attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, options)
        for name, right in (("o", o), ("lse", lse), ("dq", gradients.dq)):
            assert to_numpy(found[name][:, :, row : row + 1]).tobytes() == right.tobytes(), (name, row)
    # Keys are independent as well: 16 of them alone, with the o and lse of the whole.
    for first in (0, 4096, 8176):
        x = {name: to_numpy(found[name] if name in found else a[name]) for name in ("q", "do", "o", "lse")}
        x |= {name: to_numpy(a[name][:, :, first : first + 16]) for name in "kv"}
        seen = np.arange(8192)[:, None] >= np.arange(first, first + 16)[None] if causal else None
        inputs = Inputs(mask=None if seen is None else seen[None, None])
        given = (x[name] for name in ("do", "q", "k", "v", "o", "lse"))
        gradients = reference.attention_backward(*given, FULL, inputs)
        for name in ("dk", "dv"):
            right = getattr(gradients, name)
            assert to_numpy(found[name][:, :, first : first + 16]).tobytes() == right.tobytes(), (name, first)


def test_the_cpu_has_the_same_bits() -> None:
    a = operands(Shape(1, 2, 2, 1000, 1000, 128, 128))
    found = compute(a, CAUSAL)
    x = {name: to_numpy(t) for name, t in a.items()}
    o, lse = isograd.attention(x["q"], x["k"], x["v"], causal=True, return_lse=True, preference="order_free")
    given = (x[name] for name in ("do", "q", "k", "v"))
    gradients = isograd.attention_backward(*given, o, lse, causal=True, preference="order_free")
    for name, right in zip(NAMES[:5], (o, lse, *gradients[:3]), strict=True):
        assert to_numpy(found[name]).tobytes() == right.tobytes(), name
