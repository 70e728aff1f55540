"""`isograd.torch.trace()` and `isograd diff`: where two runs part, whatever the fault, and nothing is left behind."""

import json

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812
from faulty_steps import Scaled, made
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import isograd as ig
import isograd.torch as igt
from isograd import trace_file
from isograd.torch import digests

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def traced(tmp_path):
    """Run a step in a trace; what was read of the file."""

    def run(step, name="a", **options):
        path = tmp_path / f"{name}.trace"
        with igt.trace(path, **options) as trace:
            step()
        found = trace_file.read(path)
        assert len(found.records) == trace.records == found.end["records"]
        return found

    return run


def keys(trace, *kinds):
    return [(key.kind, key.name, key.part) for key in trace.records if not kinds or key.kind in kinds]


def parted(a, b):
    """The key of the first record that differs between two traces of one sequence."""
    found = trace_file.compare(a, b)
    assert found.order is None
    return None if found.same else list(a.records)[found.first]


def test_two_runs_of_one_program_are_the_same(traced):
    traces = []
    for name in ("a", "b"):
        model, optimizer, step = made()
        traces.append(traced(step, name, model=model, optimizer=optimizer))
    a, b = traces
    assert parted(a, b) is None
    assert not trace_file.compare(a, b).header
    assert {key.kind for key in a.records} == {"start", "forward", "backward", "gradient", "step", "parameter"}
    _, _, step = made()
    assert list(traced(step, "c").records) == list(a.records)  # the model is found by its calls
    forward = keys(a, "forward")
    assert forward[:2] == [("forward", "Model", "input[0]"), ("forward", "layers.0", "input[0]")]
    assert ("forward", "layers.1", "input['scale']") in forward
    assert forward[-2:] == [("forward", "Model", "output['y']"), ("forward", "Model", "output['layers']")]
    assert ("parameter", "layers.2.up.bias", "state['exp_avg']") in keys(a)


@pytest.mark.parametrize("layer", range(3))
def test_a_fault_is_found_at_its_place(traced, layer):
    model, _, step = made()
    sound = traced(step, model=model)

    model, _, step = made(lambda x: x + 1e-6, layer)
    place = parted(sound, traced(step, "b", model=model))
    assert place[:3] == ("forward", f"layers.{layer}.down", "input[0]")

    model, _, step = made(Scaled.apply, layer)
    place = parted(sound, traced(step, "b", model=model))
    assert place[:3] == ("backward", f"layers.{layer}.up", "gradient of output")

    model, _, step = made(None, layer)
    with torch.no_grad():
        model.layers[layer].down.bias[1] += 1e-7
    place = parted(sound, traced(step, "b", model=model))
    assert place[:3] == ("start", f"layers.{layer}.down.bias", "parameter")

    model, _, step = made()
    handle = model.layers[layer].up.weight.register_hook(lambda gradient: gradient * 1.01)
    place = parted(sound, traced(step, "b", model=model))
    assert place[:3] == ("gradient", f"layers.{layer}.up.weight", "gradient")
    handle.remove()


def test_a_changed_seed_and_a_changed_optimizer(traced):
    model, _, step = made()
    sound = traced(step, model=model)
    model, _, step = made()
    torch.manual_seed(7)
    other = traced(step, "b", model=model)
    assert parted(sound, other)[:3] == ("forward", "drop", "output")
    assert [name for name, *_ in trace_file.compare(sound, other).header] == ["random.cpu"]
    model, optimizer, step = made()
    optimizer.param_groups[0]["lr"] *= 2
    assert parted(sound, traced(step, "b", model=model))[:3] == ("parameter", "layers.0.up.weight", "parameter")


def test_another_sequence_is_found(traced):
    model, _, step = made()
    sound = traced(step, model=model)
    model, _, step = made()
    model.layers[1].fault = lambda x: model.drop(x)
    found = trace_file.compare(sound, traced(step, "b", model=model))
    place, a, b = found.order
    assert found.first == place
    assert (a[:3], b[:3]) == (("forward", "layers.1.down", "input[0]"), ("forward", "drop", "input[0]"))
    assert [key.call for key in found.only_b if key[:3] == ("forward", "drop", "output")] == [1]


def test_without_an_optimizer_gradients_and_parameters_are_recorded_at_the_end(traced):
    layer = nn.Linear(2, 2)
    found = traced(lambda: layer(torch.ones(1, 2)).sum().backward(), model=layer)
    assert keys(found, "end") == [
        ("end", name, part) for part in ("gradient", "parameter") for name in ("weight", "bias")
    ]


def test_the_digest_covers_type_shape_and_bytes():
    x = torch.arange(6.0)
    different = [x, x.double(), x.view(2, 3), x.flip(0), -x, x[:0], torch.tensor(0.0), x.bfloat16(), x.to(torch.int8)]
    different += [x > 2, torch.complex(x, x).conj(), x.to_sparse(), x.to_sparse_csr() if x.dim() > 1 else x[1:]]
    found = [digests.tensor(value).sha256 for value in different]
    assert None not in found
    assert len(set(found)) == len(found)
    assert digests.tensor(x.view(2, 3).T.contiguous().T) == digests.tensor(x.view(2, 3))
    assert digests.tensor(torch.empty(2, device="meta")).unseen
    hidden = {"a": (1, 2.5, None, "text"), "b": [x, object()], "c": torch.Size([2])}
    leaves = list(digests.leaves(hidden))
    assert [leaf.path for leaf in leaves] == [
        "['a'][0]",
        "['a'][1]",
        "['a'][2]",
        "['a'][3]",
        "['b'][0]",
        "['b'][1]",
        "['c']",
    ]
    assert [leaf.path for leaf in leaves if leaf.sha256 is None] == ["['b'][1]"]
    assert digests.tensor(x).sha256 != digests.tensor(-x).sha256
    hidden["self"] = hidden
    assert list(digests.leaves(hidden))  # ends


def test_tied_parameters_repeated_calls_and_checkpoints(traced):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.block = nn.Linear(4, 4)

        def forward(self, ids):
            x = self.block(self.block(self.embed(ids)))
            for reentrant in (False, True):
                x = checkpoint(self.block, x, use_reentrant=reentrant)
            return self.head(x)

    def run(name):
        torch.manual_seed(0)
        model = Tied()
        return traced(lambda: model(torch.tensor([1, 3])).sum().backward(), name, model=model)

    a, b = run("a"), run("b")
    assert parted(a, b) is None
    assert [key.call for key in a.records if key[:3] == ("forward", "block", "output")] == [0, 1, 2, 3]
    assert [key.call for key in a.records if key[:3] == ("recompute", "block", "input[0]")] == [0, 1]
    assert keys(a, "start").count(("start", "embed.weight", "parameter")) == 1
    assert not any("head.weight" in key.name for key in a.records)


def test_transforms_and_fake_tensors(traced):
    from torch._subclasses.fake_tensor import FakeTensorMode

    layer = nn.Linear(3, 3)
    x = torch.randn(4, 3)

    def step():
        parameters = dict(layer.named_parameters())

        def loss(parameters, row):
            return torch.func.functional_call(layer, parameters, (row,)).square().sum()

        torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            layer(mode.from_tensor(x))

    a, b = traced(step, "a", model=layer), traced(step, "b", model=layer)
    assert parted(a, b) is None
    assert len(keys(a, "forward")) == 4


def hooks():
    """How many hooks torch knows that belong to no module."""
    found = [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    from torch.optim import optimizer

    found += [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
    return [len(each) for each in found]


@pytest.mark.parametrize("given", [True, False])
def test_an_exception_leaves_no_hook_and_a_readable_file(tmp_path, given):
    model, _, step = made(lambda x: 1 / 0, 1)
    before = hooks()
    with pytest.raises(ZeroDivisionError), igt.trace(tmp_path / "a", model=model if given else None):
        step()
    assert hooks() == before
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    assert all(not p._backward_hooks for p in model.parameters())
    found = trace_file.read(tmp_path / "a")
    assert found.end["error"] == "ZeroDivisionError"
    assert keys(found)[-1] == ("forward", "layers.1.up", "output")
    text = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(text[: len(text) // 2])
    cut = trace_file.read(tmp_path / "a")
    assert cut.end is None
    assert list(cut.records) == list(found.records)[: len(cut.records)]


def test_a_trace_in_a_trace(tmp_path):
    model, _, step = made()
    with igt.trace(tmp_path / "outer", model=model), igt.trace(tmp_path / "inner", model=model):
        loss = step()
    a, b = (trace_file.read(tmp_path / name) for name in ("outer", "inner"))
    assert parted(a, b) is None
    model, _, step = made()
    assert torch.equal(step(), loss)


def test_compiled_modules_are_seen_from_outside(traced):
    for compiled in ("whole", "layer"):
        torch._dynamo.reset()
        model, _, step = made()
        sound = traced(step, model=model)
        model, _, _ = made()
        if compiled == "whole":
            called, inside = torch.compile(model, backend="eager"), ("layers.", "drop")
        else:
            model.layers[1].compile(backend="eager")
            called, inside = model, "layers.1."
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            found = traced(lambda: called(x)["y"].square().sum().backward(), "b", model=called)  # noqa: B023
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
        assert found.end["compiled"] == ["Model" if compiled == "whole" else "layers.1"]
        forward = [key for key in keys(sound, "forward") if not key[1].startswith(inside)]
        assert keys(found, "forward") == forward
        assert keys(found, "gradient")


def test_bad_arguments(tmp_path):
    for arguments, message in (
        ((3,), "path is 3"),
        (("a", "b"), "model is a str"),
        (("a", None, nn.Linear(1, 1)), "optimizer is a Linear"),
    ):
        with pytest.raises(ig.InvalidProblemError, match=message):
            igt.trace(*arguments)
    with pytest.raises(ig.TraceFileError, match="No such file"), igt.trace(tmp_path / "missing" / "a"):
        pass
    trace = igt.trace(tmp_path / "a.{rank}")
    with trace:
        pass
    assert (tmp_path / "a.0").exists()
    with pytest.raises(ig.InvalidProblemError, match="a new trace"), trace:
        pass
    header, end = map(json.loads, (tmp_path / "a.0").read_text().splitlines())
    assert header["torch"] == torch.__version__
    assert end["end"] == {"records": 0, "compiled": [], "error": None}


def test_an_unmodified_forward_is_what_is_traced(tmp_path):
    """Bits of a traced step are those of a step without a trace, also in place and with views."""
    x = torch.randn(3, 4, requires_grad=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, 2))

    def step():
        return torch.autograd.grad(F.softmax(model(x), -1)[0].square().sum(), [x, *model.parameters()])

    plain = step()
    with igt.trace(tmp_path / "a", model=model):
        got = step()
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
