"""The operators in torch's machinery: opcheck, meta tensors, autocast, torch.compile."""

import shutil

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd.ops.softmax import torch as family
from isograd.torch import bind

KINDS = ("softmax", "log_softmax")
FORWARD = {"softmax": igt.softmax, "log_softmax": igt.log_softmax}


def operands(dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 4, 5, generator=generator).to(dtype)
    dy = torch.randn(3, 4, 5, generator=generator).to(dtype)
    return [
        (x, dy, -1),
        (x.transpose(0, 2), dy.transpose(0, 2), 0),
        (x[:, ::2], dy[:, :1].expand(3, 2, 5), 1),
        (x[:0], dy[:0], 2),
        (x[0, 0, 0], dy[0, 0, 0], 0),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck(kind, dtype):
    for x, dy, dim in operands(dtype):
        torch.library.opcheck(family.FORWARD[kind].overload, (x.clone().requires_grad_(), dim))
        y = FORWARD[kind](x, dim)
        torch.library.opcheck(
            family.BACKWARD[kind].overload, (dy.clone().requires_grad_(), y.clone().requires_grad_(), dim)
        )
        torch.library.opcheck(family.BACKWARD[kind].overload, (dy, y, dim))


@pytest.mark.parametrize("kind", KINDS)
def test_meta_tensors_have_the_layout_of_real_ones(kind):
    for x, dy, dim in operands(torch.float32):
        real, meta = FORWARD[kind](x, dim), FORWARD[kind](x.to("meta"), dim)
        assert (meta.device.type, meta.shape, meta.stride(), meta.dtype) == ("meta", *_layout(real))
        back = family.BACKWARD[kind](dy.to("meta"), real.to("meta"), dim)
        assert (back.device.type, *_layout(back)) == ("meta", *_layout(family.BACKWARD[kind](dy, real, dim)))
    assert FORWARD[kind](torch.empty(2, 3, device="meta"), 0, dtype=torch.float16).dtype is torch.float16


def _layout(t):
    return t.shape, t.stride(), t.dtype


@pytest.mark.parametrize("kind", KINDS)
def test_cpu_autocast_leaves_types_as_torch_does(kind):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(2, 3, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert FORWARD[kind](x, -1).dtype is getattr(torch, kind)(x, -1).dtype
            asked = FORWARD[kind](x, -1, dtype=torch.float16)
            assert asked.dtype is getattr(torch, kind)(x, -1, dtype=torch.float16).dtype


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_of_cuda_autocast(kind):
    # The kernel that autocast on CUDA calls; tests/gpu compares the real thing with torch's.
    for dtype, expected in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        assert bind._bound[kind].cast(torch.ones(2, 3, dtype=dtype), -1).dtype is expected


def _step(function):
    def step(x, weight):
        y = function(x @ weight, -1)
        return (y * y).sum() + y[:, 0].sum()

    return step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(kind, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_step(FORWARD[kind]), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, columns in ((3, 4), (5, 4), (5, 7)):
        weight = torch.randn(6, columns)
        a = torch.randn(rows, 6, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        got, expected = compiled(a, weight), _step(FORWARD[kind])(b, weight)
        assert torch.equal(got, expected)
        got.backward()
        expected.backward()
        assert torch.equal(a.grad, b.grad)


def test_compile_takes_every_spelling():
    torch._dynamo.reset()
    x = torch.randn(3, 4)

    def spelled(x):
        module = igt.Softmax(-1)(x)
        library = ig.softmax(x, axis=-1)
        converted = igt.log_softmax(x, 0, dtype=torch.float64)
        into = igt.softmax(x, -1, out=torch.empty_like(x))
        back = ig.softmax_backward(x, module, axis=-1)
        return module, library, converted, into, back

    compiled = torch.compile(spelled, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(x), spelled(x), strict=True))


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_compile_with_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(_step(igt.softmax), fullgraph=True)
    x = torch.randn(3, 6, requires_grad=True)
    weight = torch.randn(6, 4)
    compiled(x, weight).backward()
    other = x.detach().clone().requires_grad_()
    _step(igt.softmax)(other, weight).backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_compile_inside_the_switch():
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    with igt.use() as switch:
        compiled = torch.compile(
            lambda t: torch.softmax(t, -1).cumsum(0).log_softmax(0), backend="aot_eager", fullgraph=True
        )
        for _ in range(2):
            assert torch.equal(compiled(x), igt.log_softmax(igt.softmax(x, -1).cumsum(0), 0))
    assert switch.report().replaced == {"torch.softmax (compiled)": 1, "torch.Tensor.log_softmax (compiled)": 1}


def test_compile_around_the_switch():
    def inside(t):
        with igt.use():
            return torch.softmax(t, -1)

    torch._dynamo.reset()
    x = torch.randn(3, 4)
    assert torch.equal(torch.compile(inside, backend="aot_eager", fullgraph=True)(x), igt.softmax(x, -1))


def test_export_keeps_the_operator():
    class Model(torch.nn.Module):
        def forward(self, x):
            return igt.softmax(x, -1)

    x = torch.randn(3, 4)
    program = torch.export.export(Model(), (x,))
    assert "isograd.softmax" in str(program.graph)
    assert torch.equal(program.module()(x), igt.softmax(x, -1))
