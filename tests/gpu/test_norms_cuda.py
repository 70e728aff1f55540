"""Norms, of sums with a residual too, and packed gates on a real GPU: the bits of the CPU for rows of many sizes."""

from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import isograd as ig  # noqa: E402
import isograd.torch as igt  # noqa: E402
from isograd.rows import triton_sums  # noqa: E402

KINDS = ["rmsnorm", "layernorm"]
# Several rows a tile, one row a tile, rows of any size, many rows for each program that stays, long rows.
SHAPES = [(20_000, 128), (700, 2048), (70, 3000), (3000, 4096), (300, 8192), (90, 16384), (20, 40_000)]


def arrays(kind: str, shape: tuple[int, ...], dtype: Any, special: bool = False) -> tuple[Any, ...]:
    """(x, residual, dy, dsummed, what lies along the axis) on the CPU."""
    generator = torch.Generator().manual_seed(shape[0])
    x, residual, dy, dsummed = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    dy *= torch.exp2(torch.randint(-9, 9, (shape[0], 1), generator=generator)).to(dtype)
    if special:
        x[1, 3], x[2, 5], dy[3, 7], dy[4, 7], dy[5, 9] = float("nan"), float("inf"), float("inf"), -float("inf"), 2e38
    along = [torch.randn(shape[-1:], generator=generator).to(dtype) for _ in range(1 + (kind == "layernorm"))]
    return x, residual, dy, dsummed, along


def results(kind: str, x: Any, residual: Any, dy: Any, dsummed: Any, along: Any) -> list[Any]:
    flag = {"return_rstd" if kind == "rmsnorm" else "return_statistics": True}
    y, *statistics = getattr(ig, kind)(x, *along, **flag)
    found = [y, *statistics, *getattr(ig, f"{kind}_backward")(dy, x, *statistics, along[0])]
    y, summed, *statistics = getattr(ig, f"add_{kind}")(x, residual, *along, **flag)
    return [*found, y, summed, *getattr(ig, f"add_{kind}_backward")(dy, summed, *statistics, dsummed, along[0])]


def same(found: list[Any], right: list[Any]) -> list[bool]:
    """Whether all bits are."""
    return [torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, right, strict=True)]


def moved(given: Any) -> list[Any]:
    return [[t.cuda() for t in a] if isinstance(a, list) else a.cuda() for a in given]


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_the_cpu(kind: str, dtype: Any, special: bool) -> None:
    for shape in SHAPES:
        given = arrays(kind, shape, dtype, special)
        assert all(same(results(kind, *moved(given)), results(kind, *given))), shape


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_more_rows_than_an_int32_holds(kind: str) -> None:
    given = arrays(kind, (50_000, 130), torch.float32)
    right = results(kind, *given)
    with mock.patch.object(triton_sums, "processors", return_value=1):
        found = results(kind, *moved(given))
    assert all(same(found, right))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_in_the_place_of_what_it_is_made_of(kind: str) -> None:
    x, residual, dy, dsummed, along = arrays(kind, (600, 4096), torch.bfloat16)
    flag = {"return_rstd" if kind == "rmsnorm" else "return_statistics": True}
    _, summed, *statistics = getattr(ig, f"add_{kind}")(x, residual, *along, **flag)
    right = getattr(ig, f"add_{kind}_backward")(dy, summed, *statistics, dsummed, along[0])
    names = ["rstd"] if kind == "rmsnorm" else ["mean", "rstd"]
    asked = ["dweight"] if kind == "rmsnorm" else ["dweight", "dbias"]
    made = getattr(ig, f"Add{kind.capitalize()}BackwardDescriptor")(
        tuple(x.shape), "bfloat16", dsummed=True, weight=True, **dict.fromkeys(asked, True)
    )
    plan = getattr(ig, f"Add{kind.capitalize()}BackwardPlan").select(made, "cuda")
    for place in ("dy", "summed", "dsummed"):
        given = {"dy": dy, "summed": summed, "dsummed": dsummed, "weight": along[0]}
        given |= dict(zip(names, statistics, strict=True))
        given = {key: t.cuda() for key, t in given.items()}
        outputs = {"dx": given[place]} | {key: torch.empty(4096, dtype=torch.bfloat16, device="cuda") for key in asked}
        plan.run(**given, **outputs)
        assert all(same(list(outputs.values()), list(right))), place


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_adds_and_normalizes_in_float32(kind: str) -> None:
    x, residual, *_ = moved(arrays(kind, (8, 64), torch.bfloat16))
    function = igt.rms_norm if kind == "rmsnorm" else igt.layer_norm
    x.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y, summed = function(x, (64,), residual=residual)
    assert y.dtype is summed.dtype is torch.float32
    assert torch.equal(summed, x.float() + residual.float())
    (y.sum() + summed.sum()).backward()
    assert x.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_packed_gates(name: str, dtype: Any) -> None:
    for shape in ((300, 4096), (7, 3, 34), (5, 2)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        dy = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
        right = [getattr(ig, name)(x), getattr(ig, f"{name}_backward")(dy, x)]
        there = x.cuda().requires_grad_()
        y = getattr(igt, name)(there)
        (dx,) = torch.autograd.grad(y, there, dy.cuda())
        assert dx.is_contiguous()
        assert all(same([y.detach(), dx], right)), shape
