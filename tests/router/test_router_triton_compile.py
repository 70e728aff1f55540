"""The router's Triton kernels compile for GPUs that are not there, and keep what they hold in registers."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import triton_targets  # noqa: E402
from choices import exhaustive  # noqa: E402
from triton_targets import TARGETS, resources  # noqa: E402

from isograd.ops.router import triton_launch as launch  # noqa: E402
from isograd.ops.router import triton_losses_launch as losses  # noqa: E402
from isograd.reduction import cuda as reduction  # noqa: E402


def kernels_of(target: str, call: Callable[[], Any]) -> dict[str, Any]:
    """What a call launches, compiled for a target, by the kernels' names; nothing runs."""
    return triton_targets.kernels_of(target, call, launch, reduction)


def empty(*shape: int, dtype: str = "float32") -> Any:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def work(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def forward(dtype: str, n: int = 256, k: int = 8, bias: bool = False, **options: Any) -> Callable[[], None]:
    x, w, i = empty(512, n, dtype=dtype), empty(512, k, dtype=work(dtype)), empty(512, k, dtype="int64")
    b = empty(n, dtype=work(dtype)) if bias else None
    return lambda: launch.moe_router(x, b, w, i, **options)


def backward(dtype: str, n: int = 256, k: int = 8, **options: Any) -> Callable[[], None]:
    x, w, i = empty(512, n, dtype=dtype), empty(512, k, dtype=work(dtype)), empty(512, k, dtype="int64")
    return lambda: launch.moe_router_backward(w, x, i, torch.empty_like(x), **options)


def others(dtype: str) -> dict[str, Callable[[], None]]:
    x, v, i = empty(512, 256, dtype=dtype), empty(512, 8, dtype=dtype), empty(512, 8, dtype="int64")
    rows, order, w = empty(4096, 512, dtype=dtype), empty(4096, dtype="int64"), empty(512, 8, dtype=work(dtype))
    tokens, loss = empty(512, 512, dtype=dtype), torch.empty((), dtype=getattr(torch, work(dtype)))
    offsets = empty(257, dtype="int64")
    return {
        "top_k": lambda: launch.top_k(x, v, i, 1),
        "renormalize": lambda: launch.renormalize(v, v, 1),
        "renormalize_backward": lambda: launch.renormalize(v, v, 1, v),
        "expert_permutation": lambda: launch.expert_permutation(i, order, offsets),
        "moe_permute": lambda: launch.moe_permute(tokens, order, rows, 8),
        "moe_combine": lambda: launch.moe_combine("moe_combine", rows, w, order, tokens),
        "moe_combine_backward": lambda: launch.moe_combine_backward(tokens, rows, w, order, rows, w),
        "load_balancing_loss": lambda: losses.load_balancing_loss(x, i, loss),
        "load_balancing_loss_backward": lambda: losses.load_balancing_loss_backward(loss, i, x),
        "router_z_loss": lambda: losses.router_z_loss(x, loss),
        "router_z_loss_backward": lambda: losses.router_z_loss_backward(loss, x, x),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_router_on_hopper(dtype: str) -> None:
    for call, name in ((forward(dtype), "router_separated"), (backward(dtype), "router_backward")):
        needs = resources(kernels_of("sm_90", call)[name])
        # The stack is for rows that leave the short cut.
        assert needs["stack"] <= 96
        assert needs["registers"] <= (80 if name == "router_separated" else 128)
        assert needs["shared"] <= 1024


CASES = [*((target, "bfloat16") for target in TARGETS), ("sm_90", "float64")]


@pytest.mark.thorough
@pytest.mark.parametrize(("target", "dtype"), CASES)
def test_routers_compile(target: str, dtype: str) -> None:
    deepseek = {"softmax": False, "renormalize": True, "groups": 8, "group_k": 4, "scale": 2.5}
    for call in (forward(dtype), forward(dtype, bias=True, **deepseek), backward(dtype, renormalize=True)):
        (kernel,) = kernels_of(target, call).values()
        assert resources(kernel)["stack"] <= (512 if dtype == "float64" else 64)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [8, exhaustive(64), 1024])
def test_other_numbers_of_experts_compile(n: int) -> None:
    for call in (forward("float32", n, 4, renormalize=True), backward("float32", n, 4)):
        (kernel,) = kernels_of("sm_90", call).values()
        assert resources(kernel)["stack"] <= 64


@pytest.mark.thorough
@pytest.mark.parametrize(("target", "dtype"), CASES)
def test_the_others_compile(target: str, dtype: str) -> None:
    for name, call in others(dtype).items():
        kernels = kernels_of(target, call)
        assert kernels, name
        for kernel in kernels.values():
            assert resources(kernel)["stack"] <= (128 if dtype == "float64" else 0), name


def test_configurations_depend_on_nothing_but_their_arguments() -> None:
    assert launch.router_configuration(256, 8, 4, True) == launch.router_configuration(256, 8, 4, True)
    assert launch.router_configuration(256, 8, 4, True) == (launch.Tile(256, 2, 16, 4, 1), "separated", 80)
    assert launch.router_configuration(256, 8, 4, False, 8) == (launch.Tile(256, 2, 16, 4, 1), "lanes", None)
    kernels = {
        (256, 8, 8, True, 1): "tile",
        (256, 33, 4, True, 1): "tile",
        (256, 4, 4, False, 64): "tile",
        (2048, 8, 2, False, 1): "tile",
        (8, 2, 4, True, 1): "lanes",
        (4, 4, 2, False, 4): "lanes",
        (300, 31, 4, True, 1): "separated",
        (300, 32, 2, True, 1): "tile",
    }
    for problem, kernel in kernels.items():
        chosen = launch.router_configuration(*problem)
        assert chosen.kernel == kernel
        assert kernel == "tile" or chosen.tile.block // chosen.tile.group >= max(problem[1], problem[4])
    for n in (1, 2, 8, 60, 256, 1024, 4096):
        for size in (2, 4, 8):
            tile = launch.tile(n, size)
            assert tile.block >= n
            assert tile.group % tile.vector == 0
            assert tile.block % tile.group == 0
