"""`isograd.torch.audit()`: the class of every operator that a step runs, and where it ran."""

import contextlib
import io
import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.distributed
import torch.nn.functional as F  # noqa: N812
from faulty_steps import made
from rich.console import Console
from steps import at_step, interrupt
from test_torch_trace import hooks
from torch import nn
from torch.utils.checkpoint import checkpoint

import isograd as ig
import isograd.torch as igt
from isograd.runtime import blocks, launches, modes
from isograd.torch import audit_table, auditing, module_calls, unseen
from isograd.torch.audit_classes import BATCH, MACHINE, RANKS, RUN, Class

pytestmark = pytest.mark.usefixtures("one_thread")
library = torch.library.Library("isograd_audit_test", "FRAGMENT")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "isograd_audit_test::twice", lambda ctx, g: torch.ops.isograd_audit_test.twice(g), lib=library
)


def audited(step, **options):
    with igt.audit(**options) as report:
        step()
    assert torch._C._len_torch_dispatch_stack() == 0
    return report


def found(report, operator):
    return {(e.module, e.phase): e for e in report.entries if e.operator == operator}


def test_a_step_without_findings_is_order_free():
    w = torch.randn(6, 4, requires_grad=True)
    x, targets = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])

    def step():
        igt.cross_entropy(igt.softmax(F.relu(w * x), -1), targets).backward()
        with torch.no_grad():
            w.sub_(w.grad)
        w.grad = None

    report = audited(step)
    assert not report.findings
    assert report.verdict == "order-free"
    assert report.depends == ()
    text = str(report)
    assert text.startswith(
        "order-free: the bits depend on none of the run, the batch split, the machine and the number"
    )
    assert "isograd::softmax 1" in text
    console = Console(width=80, force_terminal=True, file=io.StringIO())
    console.print(report)
    assert "\x1b[1morder-free: " in console.file.getvalue()
    assert {e.kind for e in report.entries} == {Class.ORDER_FREE, Class.EXACT}


@pytest.mark.parametrize("layer", range(3))
def test_a_fault_is_named_with_its_module(layer):
    torchs, rows = torch.ops.isograd_audit_test.twice, torch.arange(6)
    model, _, step = made(torchs, layer)
    report = audited(step, model=model)
    places = found(report, "isograd_audit_test::twice")
    assert set(places) == {(f"layers.{layer}", "forward"), (f"layers.{layer}", "backward")}
    assert {e.kind for e in places.values()} == {Class.UNKNOWN}
    assert report.verdict == "unknown"
    assert "isograd_audit_test::twice" in str(report)

    _, _, step = made(lambda x: torch.zeros_like(x).index_add(0, rows, x), layer)
    report = audited(step)  # the model is found by its calls
    (entry,) = found(report, "aten::index_add").values()
    assert (entry.module, entry.phase, entry.depends) == (f"layers.{layer}", "forward", (BATCH, MACHINE))
    assert "igt.index_add" in entry.hint
    assert f"layers.{layer}" in str(report)

    model, _, step = made(lambda x: x[rows], layer)
    report = audited(step, model=model)
    places = found(report, "aten::_index_put_impl_") or found(report, "aten::index_put")
    ((place, entry),) = places.items()
    assert place == (f"layers.{layer}", "backward")
    assert entry.kind is Class.UNKNOWN


def test_modules_phases_and_counts():
    model, _, step = made()
    report = audited(step, model=model)
    counts = {(e.module, e.phase): report.counts[e] for e in report.entries if e.operator == "aten::addmm"}
    assert counts == {(f"layers.{i}.{name}", "forward"): 1 for i in range(3) for name in ("up", "down")}
    backward = {(e.module, e.phase): report.counts[e] for e in report.entries if e.operator == "aten::mm"}
    assert backward.pop(("layers.0.up", "backward")) == 1  # the input has no gradient
    assert backward == {
        (f"layers.{i}.{name}", "backward"): 2 for i in range(3) for name in ("up", "down") if (i, name) != (0, "up")
    }
    (random,) = [e for e in report.entries if e.kind is Class.UNKNOWN]
    assert (random.operator, random.module, random.depends) == (
        "aten::bernoulli_",
        "drop",
        (RUN, BATCH, MACHINE, RANKS),
    )
    assert {e.module for e in report.entries if e.phase == "optimizer"} == {"AdamW"}
    assert report.depends == (RUN, BATCH, MACHINE, RANKS)
    entries = json.loads(json.dumps(report.to_dict()))["entries"]
    assert [e["count"] for e in entries if e["operator"] == "aten::bernoulli_"] == [1]


def test_recomputation_and_accumulation():
    layer, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    for reentrant in (True, False):
        layer.zero_grad()

        def step(reentrant=reentrant):
            checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()

        report = audited(step, model=layer)
        assert set(found(report, "aten::addmm")) == {("0", "forward"), ("0", "recompute")}
        assert set(found(report, "aten::mm")) == {("0", "backward")}
        assert not [e for e in report.entries if RANKS in e.depends]
        x.grad = None
        again = audited(step, model=layer)
        (entry,) = [e for e in again.entries if RANKS in e.depends]
        assert (entry.operator, entry.module, entry.phase) == ("aten::add_", "0", "backward")
        assert entry.depends == (BATCH, RANKS)
        x.grad = None


def classes(call):
    report = audited(call)
    return {e.operator.partition("::")[2]: e.kind for e in report.entries}


def test_classes():
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    rows = torch.tensor([0, 1, 1, 3])
    cases = {
        Class.EXACT: {
            "add": lambda: x + y,
            "sub": lambda: torch.sub(x, y, alpha=-1),
            "_foreach_mul": lambda: torch._foreach_mul([x], 2.0),
            "div_": lambda: x.clone().div_(3),
            "sqrt": lambda: x.sqrt(),
            "pow": lambda: x**2,
            "view": lambda: x.view(16),
            "sum": lambda: rows.sum(),
            "scatter_add": lambda: torch.zeros(4, dtype=torch.int64).scatter_add(0, rows, rows),
            "index": lambda: x[rows],
            "index_put_": lambda: x.clone().index_put_((rows,), y),
            "amax": lambda: x.amax(0),
            "sort": lambda: torch.sort(x, stable=True),
            "_to_copy": lambda: x.bfloat16(),
            "embedding": lambda: F.embedding(rows, x),
        },
        Class.FIXED: {
            "add": lambda: torch.add(x, y, alpha=0.3),
            "exp": lambda: x.exp(),
            "special_i0e": lambda: torch.special.i0e(x),  # by its tag
            "pow": lambda: x**2.5,
            "mul": lambda: torch.complex(x, y) * 2j,
            "sum": lambda: x.sum(),
            "mm": lambda: x @ y,
            "convolution": lambda: F.conv1d(x[None], y[:, :, None]),
            "scatter_add": lambda: torch.zeros(4).scatter_add(0, rows, x[0]),
            "topk": lambda: x.topk(2),
            "_scaled_dot_product_flash_attention_for_cpu": lambda: F.scaled_dot_product_attention(*[x[None, None]] * 3),
        },
        Class.UNKNOWN: {
            "index_put_": lambda: x.clone().index_put_((rows,), y, accumulate=True),
            "bernoulli_": lambda: F.dropout(x),
            "randn": lambda: torch.randn(3),
            "_linalg_svd": lambda: torch.linalg.svd(x),
        },
    }
    for kind, calls in cases.items():
        for name, call in calls.items():
            assert classes(call)[name] is kind, name
    torch.use_deterministic_algorithms(True)
    try:
        assert classes(cases[Class.UNKNOWN]["index_put_"])["index_put_"] is Class.FIXED
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_class_of_the_librarys_operators_is_that_of_their_kernels(monkeypatch):
    x = torch.randn(2, 3)
    assert classes(lambda: igt.softmax(x, -1)) == {"softmax": Class.ORDER_FREE}
    assert classes(lambda: igt.softmax(x[:0], -1))["softmax"] is Class.ORDER_FREE  # no kernel
    with launches.planning() as plans:
        igt.softmax(x, -1)
    (plan,) = plans
    guarantee = plan.precision_guarantee
    for change, kind, depends in (
        ({"bit_stable_across_hardware": False}, Class.FIXED, (MACHINE,)),
        ({"deterministic": False, "batch_invariant": False}, Class.UNKNOWN, (RUN, BATCH)),
    ):
        monkeypatch.setattr(type(plan), "precision_guarantee", replace(guarantee, **change))
        (entry,) = audited(lambda: igt.softmax(x, -1)).entries
        assert (entry.kind, entry.depends) == (kind, depends)
        assert "isograd kernels --operation softmax" in entry.hint


def test_every_operator_of_the_table_exists():
    names = [name for row in audit_table.TABLE for name in row.names.split()]
    assert len(names) == len(set(names))
    if torch.__version__ >= "2.13":
        aten = torch.ops.aten
        assert not [
            n for n in names if not any(hasattr(aten, f"{a}{n}{b}") for a in ("", "_foreach_") for b in ("", "_"))
        ]
    for namespace, operators in audit_table.COLLECTIVES.items():
        assert all(hasattr(getattr(torch.ops, namespace), name) for name in operators.split())


def test_every_function_that_a_hint_names_exists():
    texts = [row.hint for row in audit_table.TABLE] + [v for v in vars(audit_table).values() if isinstance(v, str)]
    named = {name for text in texts for name in re.findall(r"`(igt|torch)\.([\w.]+)", text)}
    assert ("igt", "use") in named
    for module, name in named:
        value = igt if module == "igt" else torch
        for step in name.split("."):
            value = getattr(value, step)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_restores_every_hook_and_mode(error):
    def fault(x):
        raise error

    model, _, step = made(fault, 1)
    before, call = hooks(), unseen.CompiledFxGraph.__call__
    with pytest.raises(error), igt.audit(model) as report:
        step()
    assert hooks() == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch._C._len_torch_dispatch_stack() == 0
    assert unseen.CompiledFxGraph.__call__ is call
    assert not unseen._watchers
    assert found(report, "aten::addmm")
    audit = igt.audit()
    with audit:
        pass
    with pytest.raises(ig.InvalidProblemError, match="a new audit"), audit:
        pass
    with pytest.raises(ig.InvalidProblemError, match="model is a int"):
        igt.audit(3)


def test_an_interrupt_at_any_step_leaves_no_mode():
    files = [module.__file__ for module in (auditing, blocks, modes, module_calls, unseen)]
    before, layer = hooks(), nn.Linear(1, 1)

    def block():
        with igt.audit(layer):
            pass

    number, done = 1, False
    while not done:
        with contextlib.suppress(KeyboardInterrupt):
            done = not at_step(number, block, interrupt, __file__, *files)
        assert torch._C._len_torch_dispatch_stack() == 0, number
        assert not unseen._watchers
        number += 7
    assert number > 200
    assert hooks()[0] == before[0]


def test_audits_and_traces_in_one_another(tmp_path):
    _, _, step = made()
    alone = audited(step)
    model, _, step = made()
    with igt.audit(model) as outer, igt.trace(tmp_path / "a", model=model), igt.audit(model) as inner:
        step()
    assert inner.counts == outer.counts == alone.counts
    first, second = igt.audit(), igt.audit()
    with contextlib.ExitStack() as stack:
        stack.enter_context(second)
        with first as report:
            torch.ones(2).exp()
        torch.ones(2).sin()
    assert "aten::sin" not in {e.operator for e in report.entries}
    assert "aten::sin" in {e.operator for e in second.report.entries}


def test_a_switch_in_an_audit():
    x = torch.randn(2, 3, requires_grad=True)
    with igt.audit() as report, igt.use():
        F.log_softmax(x, -1).backward(torch.ones(2, 3))
    assert {e.operator for e in report.entries if e.operator.startswith("isograd")} == {
        "isograd::log_softmax",
        "isograd::log_softmax_backward",
    }


def test_compiled_code_is_seen_where_it_calls_operators():
    torch._dynamo.reset()
    model, _, step = made()
    model.layers[1].compile(backend="eager")
    step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    report = audited(step, model=model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert report.compiled == ("layers.1",)
    assert ("layers.1", "forward") in found(report, "aten::addmm")
    assert ("layers.1", "backward") in found(report, "aten::mm")
    assert not report.graphs


def test_graphs_of_inductor_are_counted(monkeypatch):
    """Without a compiler: what stands for a graph here runs as one does."""
    graph = object.__new__(unseen.CompiledFxGraph)
    graph.compiled_fn_runner = None
    monkeypatch.setattr(unseen, "_call", lambda graph, inputs: inputs)
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, args, output: unseen.CompiledFxGraph.__call__(graph, [output])[0])
    original = unseen.CompiledFxGraph.__call__
    report = audited(lambda: layer(torch.ones(1, 2)), model=layer)
    unseen.CompiledFxGraph.__call__ = original
    assert report.graphs == {("Linear", "forward"): 1}
    assert report.verdict == "unknown"
    assert "Not seen: 1 runs of graphs" in str(report)


@pytest.mark.thorough
def test_what_inductor_compiled_is_reported():
    torch._dynamo.reset()
    model, _, step = made()
    model.layers[1].compile()
    step()
    report = audited(step, model=model)
    assert report.graphs == {("layers.1", "forward"): 1, ("layers.1", "backward"): 1}
    assert report.verdict == "unknown"
    assert ("layers.1", "forward") in found(report, "aten::addmm")  # a library's product, called by its name


@pytest.mark.thorough
def test_a_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model, ids = transformers.LlamaForCausalLM(config), torch.arange(16).view(2, 8)
    report = audited(lambda: model(ids, labels=ids).loss.backward(), model=model)
    assert report.verdict == "fixed on this kind of machine"
    assert {module for module, _ in found(report, "aten::silu")} == {f"model.layers.{i}.mlp.act_fn" for i in (0, 1)}
    assert set(found(report, "aten::embedding_dense_backward")) == {("model.embed_tokens", "backward")}
    model.zero_grad()
    with igt.use():
        report = audited(lambda: model(ids, labels=ids).loss.backward(), model=model)
    assert found(report, "isograd::cross_entropy_backward")
    assert not found(report, "aten::embedding_dense_backward")
