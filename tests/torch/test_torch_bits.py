"""Tensors on the CPU: the bits of the NumPy path for every dtype and stride, without a copy, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from softmax_kernel import sku

import isograd as ig
import isograd.torch as igt
from isograd.core import arrays
from isograd.devices import cuda
from isograd.errors import (
    BufferTooSmallError,
    DeviceMismatchError,
    InvalidProblemError,
    IsogradError,
    MisalignedOperandError,
    UnsupportedError,
    WorkspaceTooSmallError,
)

KINDS = ("softmax", "log_softmax")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def same_bits(tensor, array):
    return np.array_equal(_bits(arrays.numpy_view(tensor)), _bits(array))


def _bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def views(t):
    """Views of a [4, 6, 10] tensor: as it is, transposed, with gaps, expanded, with a size of 1 and of 0."""
    yield t, 2
    yield t, 0
    yield t.permute(2, 0, 1), 1
    yield t[::2, 1:4, ::3], 2
    yield t[:, :1].expand(4, 5, 10), 1
    yield t[:, 2], -1
    yield t[:, :, :1], 2
    yield t[:0], 1
    yield t[1:2, 3:4, :], 0
    yield t.reshape(2, 2, 1, 3, 2, 1, 5, 2), 3
    yield t[0, 0], 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_the_numpy_path(kind, dtype):
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(4, 6, 10, generator=generator) * 3).to(dtype)
    x[0, 0, 3], x[1, 1, 4], x[2, 2] = float("inf"), float("nan"), -float("inf")
    dy = torch.randn(4, 6, 10, generator=generator).to(dtype)
    for (a, dim), (b, _) in zip(views(x), views(dy), strict=True):
        y = getattr(igt, kind)(a, dim)
        expected = getattr(ig, kind)(arrays.numpy_view(a), dim)
        assert y.shape == a.shape
        assert same_bits(y, expected)
        dx = getattr(igt, f"{kind}_backward")(b, y, dim)
        assert same_bits(dx, getattr(ig, f"{kind}_backward")(arrays.numpy_view(b), expected, dim))
        assert same_bits(getattr(ig, kind)(a, axis=dim), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plans_run_on_tensors_without_a_copy(dtype):
    name = str(dtype).removeprefix("torch.")
    x = torch.randn(6, 5).to(dtype).T
    y, dx = torch.zeros(5, 12, dtype=dtype)[:, ::2], torch.empty(5, 6, dtype=dtype)
    ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((5, 6), name, 0)).run(x=x, y=y)
    assert torch.equal(y, igt.softmax(x, 0))
    plan = ig.SoftmaxBackwardPlan.select(ig.SoftmaxBackwardDescriptor((5, 6), name, 0))
    plan.run(dy=x, y=y, dx=dx)
    assert torch.equal(dx, igt.softmax_backward(x, y, 0))
    plan.run(dy=arrays.numpy_view(x), y=y, dx=dx)  # arrays and tensors side by side
    assert torch.equal(dx, igt.softmax_backward(x, y, 0))
    x = x.clone()
    plan.run(dy=x, y=y, dx=x)
    assert torch.equal(dx, x)


def test_results_in_place_and_into_other_memory():
    x = torch.randn(4, 5)
    expected = igt.softmax(x, 0)
    out = torch.empty(5, 4).T
    assert igt.softmax(x, 0, out=out) is out
    assert torch.equal(out, expected)
    assert ig.softmax(x, axis=0, out=x) is x
    assert torch.equal(x, expected)
    scalar = torch.tensor(3.0)
    assert igt.softmax(scalar, -1, out=scalar) is scalar
    assert scalar == 1


def test_zero_dimensions():
    assert torch.equal(igt.softmax(torch.tensor(-2.0), 0), torch.tensor(1.0))
    assert torch.equal(igt.log_softmax(torch.tensor(-2.0), -1), torch.tensor(0.0))
    with pytest.raises(InvalidProblemError, match=r"dim is 1; shape \(\) accepts -1 to 0"):
        igt.softmax(torch.tensor(-2.0), 1)


def test_flushing_subnormals_does_not_leak_in():
    x = torch.tensor([[0.0, -100.0]])
    expected = igt.softmax(x, -1)
    assert 0 < expected[0, 1] < 1.2e-38
    if torch.set_flush_denormal(True):
        try:
            flushed = igt.softmax(x, -1)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(flushed.view(torch.int32), expected.view(torch.int32))


def test_overlap_is_decided_exactly():
    buffer = torch.randn(4, 20)
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((4, 10), "float32", -1))
    even, odd = buffer[:, ::2], buffer[:, 1::2]
    expected = igt.softmax(even.clone(), -1)
    plan.run(x=even, y=odd)
    assert torch.equal(odd, expected)
    for start in range(11):
        x, out = buffer[1:3, 5:10], buffer[1:3, start : start + 5]
        assert bool(arrays.overlaps_partly(out, x)) is (0 < abs(start - 5) < 5)
        assert bool(arrays.overlaps_partly(out, arrays.numpy_view(x))) is (0 < abs(start - 5) < 5)
    with pytest.raises(InvalidProblemError, match="y overlaps x in part"):
        plan.run(x=buffer[:, 2:12], y=buffer[:, 4:14])
    with pytest.raises(InvalidProblemError, match="share memory"):
        plan.run(x=even, y=torch.empty(10).expand(4, 10))
    assert not plan.can_implement(x=buffer[:, 2:12], y=buffer[:, 4:14])


def test_calls_leave_the_storage_as_it_was():
    x, y = torch.randn(2, 3), torch.empty(2, 3)
    ig.softmax(x, out=y)
    igt.softmax(x, -1)
    for tensor in (x, y):
        tensor.untyped_storage().resize_(0)  # what Tensor.numpy forbids from then on


def test_misaligned_memory():
    raw = torch.zeros(4 * 8 + 1, dtype=torch.uint8)
    x = torch.frombuffer(raw.numpy()[1:], dtype=torch.float32)
    assert x.data_ptr() % 4
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((8,), "float32", 0))
    with pytest.raises(MisalignedOperandError, match="softmax: x has an address"):
        plan.run(x=x, y=torch.empty(8))
    assert torch.equal(igt.softmax(x, 0), torch.full((8,), 0.125))


# --- what is refused --------------------------------------------------------------------------------------------------
def unsuitable():
    ones = torch.ones(2, 3)
    yield torch.ones(2, 3, dtype=torch.int64), "has dtype torch.int64"
    yield torch.ones(2, 3, dtype=torch.bool), "has dtype torch.bool"
    yield torch.ones(2, 3, dtype=torch.complex64), "has dtype torch.complex64"
    yield ones.to(torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn"
    yield ones.to_sparse(), "layout torch.sparse_coo"
    yield ones.to_sparse_csr(), "layout torch.sparse_csr"
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested tensor"
    yield torch.quantize_per_tensor(ones, 0.1, 0, torch.quint8), "has dtype torch.quint8"


@pytest.mark.filterwarnings("ignore")
def test_unsuitable_tensors_are_named():
    for tensor, message in unsuitable():
        with pytest.raises(UnsupportedError, match=f"^softmax: input .*{message}"):
            igt.softmax(tensor, -1)
        with pytest.raises(UnsupportedError, match=f"^log_softmax: x .*{message}"):
            ig.log_softmax(tensor)
        with pytest.raises(UnsupportedError, match=f"^softmax_backward: dy .*{message}"):
            igt.softmax_backward(tensor, tensor, -1)
        plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((2, 3), "float32", -1))
        with pytest.raises(UnsupportedError, match=f"^softmax: x .*{message}"):
            plan.run(x=tensor, y=torch.empty(2, 3))


def test_a_dtype_that_no_kernel_has():
    with pytest.raises(UnsupportedError, match=r"dtype is torch.int32; accepted: float16"):
        igt.softmax(torch.ones(2, 3), -1, dtype=torch.int32)
    for nonsense in (0, -0.0, False, ""):  # none of which is None
        with pytest.raises(UnsupportedError, match="dtype is"):
            igt.softmax(torch.ones(2, 3), -1, dtype=nonsense)


@pytest.mark.parametrize("dim", [2, -3, None, 1.0, "C"])
def test_dim_out_of_range_or_no_integer(dim):
    for call in (igt.softmax, igt.log_softmax):
        with pytest.raises(InvalidProblemError, match="dim is"):
            call(torch.ones(2, 3), dim)
    with pytest.raises(InvalidProblemError, match="dim is"):
        igt.softmax_backward(torch.ones(2, 3), torch.ones(2, 3), dim)
    with pytest.raises(InvalidProblemError, match="axis is"):
        ig.softmax(torch.ones(2, 3), axis=dim)
    with pytest.raises(TypeError):
        igt.softmax(torch.ones(2, 3))


def test_mixed_devices_name_both():
    cpu, other = torch.ones(2, 3), torch.ones(2, 3, device="meta")
    with pytest.raises(DeviceMismatchError, match="softmax_backward: dy is on cpu, y is on meta"):
        igt.softmax_backward(cpu, other, -1)
    with pytest.raises(DeviceMismatchError, match="dy is on meta, y is on cpu"):
        ig.softmax_backward(other, cpu)
    plan = ig.SoftmaxBackwardPlan.select(ig.SoftmaxBackwardDescriptor((2, 3), "float32", -1))
    with pytest.raises(DeviceMismatchError, match="dy is on cpu, y is on meta, dx is on cpu; expected all on cpu"):
        plan.run(dy=cpu, y=other, dx=cpu.clone())
    with pytest.raises(InvalidProblemError, match="y is ndarray; expected a torch tensor"):
        ig.softmax_backward(cpu, cpu.numpy())
    with pytest.raises(InvalidProblemError, match="dy is ndarray; expected a torch tensor"):
        ig.softmax_backward(cpu.numpy(), cpu)
    with pytest.raises(UnsupportedError, match="cuda"):
        ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((2, 3), "float32", -1), device="nowhere")


def test_mismatched_operands():
    with pytest.raises(InvalidProblemError, match=r"dy has shape \(2, 3\) and y \(3, 2\)"):
        igt.softmax_backward(torch.ones(2, 3), torch.ones(3, 2), -1)
    with pytest.raises(InvalidProblemError, match=r"dy has dtype torch.float32 and y torch.float64"):
        igt.softmax_backward(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64), -1)
    with pytest.raises(InvalidProblemError, match="input is list; expected a torch tensor"):
        igt.softmax([1.0], 0)
    with pytest.raises(InvalidProblemError, match="rank 9"):
        igt.softmax(torch.ones([1] * 9), 0)


def test_outputs_that_do_not_fit():
    x = torch.ones(2, 3)
    with pytest.raises(BufferTooSmallError, match=r"softmax: out has shape \(2, 2\)"):
        igt.softmax(x, -1, out=torch.empty(2, 2))
    with pytest.raises(InvalidProblemError, match=r"softmax: out has shape \(3, 3\)"):
        ig.softmax(x, out=torch.empty(3, 3))
    with pytest.raises(InvalidProblemError, match="softmax: out has dtype float64; expected float32"):
        igt.softmax(x, -1, out=torch.empty(2, 3, dtype=torch.float64))
    with pytest.raises(DeviceMismatchError, match="input is on cpu, out is on meta; expected all on cpu"):
        igt.softmax(x, -1, out=torch.empty(2, 3, device="meta"))
    with pytest.raises(InvalidProblemError, match="out is ndarray"):
        igt.softmax(x, -1, out=np.empty((2, 3), np.float32))


def test_tensors_without_plain_memory():
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((2,), "float32", 0))
    negated = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    assert negated.is_neg()
    with pytest.raises(InvalidProblemError, match="resolve_neg"):
        plan.run(x=negated, y=torch.empty(2))
    assert torch.equal(igt.softmax(negated, 0), igt.softmax(negated.resolve_neg(), 0))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(2, device="meta")
    with pytest.raises(IsogradError, match="is on meta"):
        plan.run(x=fake, y=torch.empty(2))


def test_workspaces_and_streams_of_a_cpu_plan():
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((2, 3), "float32", -1))
    x, y = torch.ones(2, 3), torch.empty(2, 3)
    plan.run(x=x, y=y, workspace=torch.empty(0, dtype=torch.uint8))
    with pytest.raises(DeviceMismatchError, match="workspace is on meta"):
        plan.run(x=x, y=y, workspace=torch.empty(64, dtype=torch.uint8, device="meta"))
    plan.workspace_size = 1 << 20
    with pytest.raises(WorkspaceTooSmallError):
        plan.run(x=x, y=y, workspace=torch.empty(64, dtype=torch.uint8))
    with pytest.raises(InvalidProblemError, match="no streams"):
        plan.run(x=x, y=y, stream=object())


def test_nothing_is_written_before_the_arguments_were_checked():
    out = torch.full((2, 3), 7.0)
    version = out._version
    for call in (lambda: igt.softmax(torch.ones(2, 4), -1, out=out), lambda: igt.softmax(torch.ones(2, 3), 5, out=out)):
        with pytest.raises(IsogradError):
            call()
    assert torch.equal(out, torch.full((2, 3), 7.0))
    assert out._version == version


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so():
    for select in (
        lambda: ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((2, 3), "float32", -1), device="cuda"),
        lambda: ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((2, 3), "float32", -1), "cuda", "triton"),
    ):
        with pytest.raises(UnsupportedError, match="triton: torch sees no CUDA device"):
            select()


def test_why_triton_cannot_serve(monkeypatch):
    import importlib.util

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((7, 5), (7, 0))[index])
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    assert cuda.unavailable() == "triton is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("numpy"))
    assert cuda.unavailable() == "compute capability 7.5, 7.0 is below 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (8, 0))[index])
    assert cuda.unavailable() is None
    plan = ig.SoftmaxPlan.select(ig.SoftmaxDescriptor((2, 3), "bfloat16", -1), device="cuda")
    assert (plan.sku.arch, plan.sku.backend, plan.device) == ("sm_80/sm_90", "triton", "cuda")
    cpu = torch.ones(2, 3, dtype=torch.bfloat16)
    with pytest.raises(DeviceMismatchError, match="x is on cpu, y is on cpu; expected all on cuda"):
        plan.run(x=cpu, y=cpu.clone())
    with pytest.raises(DeviceMismatchError, match="x is on cpu, y is on cpu; expected all on cuda"):
        plan.run(x=arrays.numpy_view(cpu), y=cpu)
    monkeypatch.setitem(sys.modules, "torch.cuda", None)
    assert cuda.unavailable() == "torch is not installed"


def test_operators_run_registered_kernels():
    class Halves(ig.Kernel):
        name = backend = "halves"

        def sku(self, descriptor):
            return sku(descriptor, self.backend, "cpu")

        def launch(self, descriptor, arguments, workspace, stream):
            assert all(isinstance(a, np.ndarray) for a in arguments.values())  # also where a tensor was given
            arguments["y"][...] = 0.5

    x = torch.randn(2, 3)
    ig.register_kernel("softmax", "cpu", "float32", Halves(), priority=1)
    try:
        assert torch.equal(igt.softmax(x, -1), torch.full((2, 3), 0.5))
        assert torch.equal(ig.softmax(x, out=torch.empty(2, 3)), torch.full((2, 3), 0.5))
    finally:
        ig.unregister_kernel("softmax", "cpu", "float32", "halves")
    assert not torch.equal(igt.softmax(x, -1), torch.full((2, 3), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_an_empty_tensor_has_an_address_that_any_numpy_takes(dtype):
    """NumPy before 2.2 makes no array of memory at address 0."""
    empty = torch.empty(0, 3, dtype=dtype)
    assert arrays._Memory(empty).__array_interface__["data"][0] != 0
    assert arrays.numpy_view(empty).shape == (0, 3)


def test_the_core_does_not_import_torch():
    code = "import sys, isograd, numpy as np; isograd.softmax(np.ones((2, 3))); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
