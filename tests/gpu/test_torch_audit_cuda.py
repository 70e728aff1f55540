"""`isograd.torch.audit()` and `trace()` on a GPU, where a gradient is computed on a thread of autograd's."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import triton
import triton.language as tl
from faulty_steps import Scaled, made
from torch import nn
from torch.utils.checkpoint import checkpoint

import isograd.torch as igt
from isograd import trace_file
from isograd.devices import cuda as cuda_kernels
from isograd.torch.audit_classes import Class

if (_missing := cuda_kernels.unavailable()) is not None:
    pytest.skip(f"needs a GPU: {_missing}", allow_module_level=True)


@triton.jit
def _twice(x, y, n, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(y + i, 2 * tl.load(x + i, i < n), i < n)


def twice(x):
    y = torch.empty_like(x)
    _twice[(triton.cdiv(x.numel(), 128),)](x, y, x.numel(), 128)
    return y


def audited(step, **options):
    with igt.audit(**options) as report:
        step()
    torch.cuda.synchronize()
    assert torch._C._len_torch_dispatch_stack() == 0
    return report


def found(report, operator):
    return {(e.module, e.phase): e for e in report.entries if e.operator == operator}


def test_what_adds_by_atomics_is_named():
    rows = torch.arange(6, device="cuda")
    model, _, step = made(lambda x: torch.zeros_like(x).index_add(0, rows, x), 1, device="cuda")
    (entry,) = found(audited(step, model=model), "aten::index_add").values()
    assert (entry.module, entry.phase, entry.kind) == ("layers.1", "forward", Class.UNKNOWN)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        (entry,) = found(audited(step, model=model), "aten::index_add").values()
    finally:
        torch.use_deterministic_algorithms(False)
    assert entry.kind is Class.FIXED


def test_operators_that_are_replayed_have_their_guarantee():
    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    targets = torch.arange(64, device="cuda") % 32

    def step():
        x.grad = None
        igt.cross_entropy(igt.softmax(x, -1), targets).backward()

    for _ in range(4):
        step()
    report = audited(step)
    operators = {e.operator: e.kind for e in report.entries if e.operator.startswith("isograd")}
    names = [f"isograd::{name}{end}" for name in ("softmax", "cross_entropy") for end in ("", "_backward")]
    assert operators == dict.fromkeys(names, Class.ORDER_FREE)
    assert report.verdict == "order-free"


def test_backward_and_recomputation_are_in_their_modules():
    model, _, step = made(device="cuda")
    report = audited(step, model=model)
    linears = {f"layers.{i}.{name}" for i in range(3) for name in ("up", "down")}
    assert {module for module, phase in found(report, "aten::mm") if phase == "backward"} == linears
    for reentrant in (True, False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).cuda()
        x = torch.randn(2, 4, device="cuda", requires_grad=True)

        def run(model=model, x=x, reentrant=reentrant):
            for part in (model[:2], model[2:]):
                x = checkpoint(part, x, use_reentrant=reentrant)
            x.sum().backward()

        for _ in range(2):
            report = audited(run, model=model)
            assert {module for module, phase in found(report, "aten::tanh_backward")} == {"1", "3"}
            assert set(found(report, "aten::addmm")) == {(m, p) for m in "02" for p in ("forward", "recompute")}
            assert {module for module, phase in found(report, "aten::mm")} == {"0", "2"}


def test_a_triton_kernel_that_nobody_dispatches_is_listed():
    model, _, step = made(lambda x: x + twice(x.detach()), 2, device="cuda")
    (entry,) = found(audited(step, model=model), "triton::_twice").values()
    assert (entry.module, entry.phase, entry.kind) == ("layers.2", "forward", Class.UNKNOWN)
    assert not found(audited(lambda: twice(torch.ones(3, device="cuda"))[:0]), "aten::sum")
    assert not [e for e in audited(lambda: igt.softmax(torch.ones(2, 3, device="cuda"), -1)).entries if e.depends]


def test_what_inductor_compiled_is_counted():
    torch._dynamo.reset()
    model, _, step = made(device="cuda")
    model.layers[1].compile()
    step()
    report = audited(step, model=model)
    assert report.graphs == {("layers.1", "forward"): 1, ("layers.1", "backward"): 1}
    assert report.verdict == "unknown"


def test_traces(tmp_path):
    found = []
    for name, fault in (("a", None), ("b", None), ("c", lambda x: x + 1e-6), ("d", Scaled.apply)):
        model, optimizer, step = made(fault, 1, device="cuda")
        with igt.trace(tmp_path / name, model=model, optimizer=optimizer):
            step()
        found.append(trace_file.read(tmp_path / name))
    a, b, c, d = found
    assert trace_file.compare(a, b).same
    assert not trace_file.compare(a, b).header
    assert a.header["device"] == torch.cuda.get_device_name()
    keys = list(a.records)
    assert keys[trace_file.compare(a, c).first][:3] == ("forward", "layers.1.down", "input[0]")
    assert keys[trace_file.compare(a, d).first][:3] == ("backward", "layers.1.up", "gradient of output")


def test_a_captured_graph_is_not_disturbed(tmp_path):
    layer = nn.Linear(4, 4).cuda().requires_grad_(False)
    x = torch.ones(2, 4, device="cuda")
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with igt.trace(tmp_path / "a", model=layer), torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert torch.equal(y, layer(x))
    unseen = [r.digest for key, r in trace_file.read(tmp_path / "a").records.items() if key.kind == "forward"]
    assert unseen == ["a CUDA graph is being captured"] * 2
