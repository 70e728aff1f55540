"""The launcher for PyTorch on Apple GPUs, with an emulated `torch.mps.compile_shader` and tensors of the CPU."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from emulated import memory
from emulator import FLUSHES, library, needs_compiler
from problems import array, same_bits, tensor

import isograd
from isograd.cli.check import published, verify_kernel
from isograd.cli.devices import DEVICES, Device
from isograd.cli.suites import cases
from isograd.cli.verify import as_dict
from isograd.core import arrays, registry
from isograd.core.plan import Plan
from isograd.devices import metal
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.gather.metal import MetalGather
from isograd.ops.softmax import reference

METAL = [entry for entry in registry.kernels() if entry.device == "mps"]
SOFTMAX = next(entry.kernel for entry in METAL if entry.operation == "softmax")


class EmulatedShader:
    """What `compile_shader` returns: functions as attributes, called as torch's binding calls them."""

    def __init__(self, source: str) -> None:
        self.library = library(source)
        self.looked_up: list[str] = []

    def __getattr__(self, name: str) -> Any:
        assert name in self.library.entries
        self.looked_up.append(name)

        def call(*arguments: Any, threads: int, group_size: int) -> None:
            assert all(isinstance(a, torch.Tensor) or (a and all(type(v) is int for v in a)) for a in arguments)
            buffers = [memory(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            self.library.run(name, *buffers, threads=threads, group_size=group_size, flush=FLUSHES)

        return call


@pytest.fixture
def shaders(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedShader]:
    """Every library that the launcher has compiled."""
    compiled: list[EmulatedShader] = []

    def compile_shader(source: str) -> EmulatedShader:
        compiled.append(EmulatedShader(source))
        return compiled[-1]

    monkeypatch.setattr(torch.mps, "compile_shader", compile_shader)
    metal._library.cache_clear()
    metal._function.cache_clear()
    yield compiled
    metal._library.cache_clear()
    metal._function.cache_clear()


@pytest.fixture
def apple(shaders: list[EmulatedShader], monkeypatch: pytest.MonkeyPatch) -> list[EmulatedShader]:
    """A machine whose tensors all say that they are on an Apple GPU."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    describe = arrays._describe_tensor
    monkeypatch.setattr(arrays, "_describe_tensor", lambda *given: ("mps", describe(*given)[1]))
    return shaders


@needs_compiler
def test_plans_run_through_torch(apple: list[EmulatedShader]) -> None:
    """Sources are compiled and functions looked up once."""
    x = np.random.default_rng(1).standard_normal((6, 50)).astype(np.float32)
    plan = isograd.SoftmaxPlan.select(isograd.SoftmaxDescriptor((6, 50), "float32"), device="mps")
    for scale in (1, 2):
        y = torch.empty(6, 50)
        plan.run(x=tensor(x * np.float32(scale)), y=y)
        assert same_bits(array(y), isograd.softmax(x * np.float32(scale)))
    assert [shader.looked_up for shader in apple] == [["softmax_float32"]]
    assert plan.sku.backend == "metal"
    assert plan.sku.arch == "apple"


@needs_compiler
@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        ("moe_router", "float16"),
        ("take_along_axis", "bfloat16"),
        ("take_along_axis_backward", "float32"),
        ("attention_delta", "bfloat16"),
        ("attention_backward", "float32"),
    ],
)
def test_verify(apple: list[EmulatedShader], monkeypatch: pytest.MonkeyPatch, operation: str, dtype: str) -> None:
    """Everything that `isograd verify --device mps` checks holds, and all digests are the published ones."""
    device = Device(lambda: True, DEVICES["mps"].send, DEVICES["mps"].empty, DEVICES["mps"].receive)
    monkeypatch.setitem(DEVICES, "mps", device)
    make = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *given, device, **options: make(*given, **options))
    (entry,) = [e for e in METAL if (e.operation, e.dtype) == (operation, dtype)]
    given = cases(operation, dtype)
    report = verify_kernel(entry, given, published())
    assert report.failures == []
    assert report.worst is not None
    assert report.worst <= 1
    assert report.cases + report.skipped == len(given)
    assert (report.skipped > 0) == (operation == "attention_backward")  # options without a kernel
    known = 0 if operation == "attention_backward" else len(given)
    promised = operation.startswith("take_along_axis")
    assert (report.digests_checked, report.unpromised_checked) == ((known, 0) if promised else (0, known))
    assert report.digests_equal + report.unpromised_equal == known
    json.dumps(as_dict([report], "mps", 1.0, []))


@needs_compiler
def test_isograd_torch_differentiates_through_metal(
    apple: list[EmulatedShader], monkeypatch: pytest.MonkeyPatch
) -> None:
    import isograd.torch as igt

    select = Plan.select.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Plan, "select", classmethod(lambda cls, descriptor, device: select(cls, descriptor, "mps")))
    monkeypatch.setattr(registry, "_generation", 1 << 40)  # plans of the CPU may be in caches
    rng = np.random.default_rng(2)
    x, g = rng.standard_normal((2, 3, 70)).astype(np.float32)
    leaf = tensor(x).requires_grad_()
    y = igt.log_softmax(leaf, dim=-1)
    y.backward(tensor(g))
    expected = reference.log_softmax(x)
    assert same_bits(array(y.detach()), expected)
    assert same_bits(array(leaf.grad), reference.log_softmax_backward(g, expected))
    assert sorted(apple[0].looked_up) == ["log_softmax_backward_float32", "log_softmax_float32"]


def test_every_kernel_says_why_it_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {entry.kernel.reject(None) for entry in METAL if entry.operation == "softmax"}
    assert reasons == {"torch sees no Apple GPU"}
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert metal.unavailable() is None
    monkeypatch.setenv("PYTORCH_MPS_FAST_MATH", "1")
    assert "PYTORCH_MPS_FAST_MATH is set" in str(metal.unavailable())
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert metal.unavailable() == "torch is not installed"


def test_float64_is_unsupported() -> None:
    descriptor = isograd.SoftmaxDescriptor((2, 3), "float64")
    with pytest.raises(UnsupportedError, match="softmax: no kernel for float64 on 'mps'; devices with one:"):
        isograd.SoftmaxPlan.select(descriptor, device="mps")
    assert {entry.dtype for entry in METAL} == set(metal.DTYPES)


def test_a_stream_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match="stream is 1; on mps there is one: None"):
        SOFTMAX.launch(isograd.SoftmaxDescriptor((2, 3), "float32"), {}, None, 1)


def test_equal_bits_on_all_hardware_are_promised_of_integer_arithmetic_alone() -> None:
    """A text in which a float operation takes part in a gather kernel would break the promise."""
    gathered = isograd.TakeAlongAxisBackwardDescriptor((2, 3), (2, 4), "float32")
    assert MetalGather().sku(gathered).precision_guarantee.bit_stable_across_hardware
    softmax = SOFTMAX.sku(isograd.SoftmaxDescriptor((2, 3), "float32")).precision_guarantee
    assert not softmax.bit_stable_across_hardware
    assert softmax.deterministic
    assert softmax.order_invariant
    assert softmax.batch_invariant


def test_launches_cover_rows_with_few_or_many_columns() -> None:
    assert [metal.threads_for(n) for n in (1, 4, 128, 129, 512, 513, 40_000)] == [32, 32, 32, 64, 128, 256, 256]


class OnApple(torch.Tensor):
    """A tensor whose address is the handle of a buffer, close to those of others."""

    handle = 0

    @property
    def device(self) -> torch.device:
        return torch.device("mps:0")

    def data_ptr(self) -> int:
        return self.handle + self.storage_offset() * self.element_size()


def test_buffers_of_apple_gpus_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses of two buffers may be closer than their sizes."""
    a, b = torch.zeros(1000).as_subclass(OnApple), torch.zeros(1000).as_subclass(OnApple)
    a.handle, b.handle = 4096, 4160
    assert not arrays.overlaps(a, b)
    assert not arrays.overlaps_partly(a, b)
    assert arrays.overlaps(a, a)
