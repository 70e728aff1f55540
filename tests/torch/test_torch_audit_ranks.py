"""`audit()` and `trace()` of models that are spread over ranks: one rank here, with all that several have."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.distributed as dist
from faulty_steps import Model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isograd.torch as igt
from isograd import trace_file
from isograd.torch.audit_classes import Class

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs Gloo", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('ranks')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def spread(kind):
    """(model, step)."""
    torch.manual_seed(0)
    model = Model()
    model.drop.p = 0.0
    total = igt.distributed.GradientSum(model) if kind == "GradientSum" else None
    if kind == "DistributedDataParallel":
        model = DistributedDataParallel(model)
    elif kind == "fully_shard":
        for layer in model.layers:
            fully_shard(layer)
        model = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4)

    def step():
        model(x)["y"].square().sum().backward()
        if total is not None:
            total.finish()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def traced(kind, path):
    model, step = spread(kind)
    with igt.trace(path / (kind or "plain"), model=model):
        step()
    return trace_file.read(path / (kind or "plain"))


def test_traces_have_the_names_of_the_plain_model(tmp_path):
    plain = traced(None, tmp_path)
    for kind in ("DistributedDataParallel", "GradientSum"):
        found = trace_file.compare(plain, traced(kind, tmp_path))
        assert not found.differ, kind
        assert not found.only_a, kind
    sharded = traced("fully_shard", tmp_path)
    found = trace_file.compare(plain, sharded)
    assert not found.only_b
    assert {key.kind for key in found.only_a} == {"gradient"}  # of the whole parameters, which come and go
    assert {key.kind for key in found.differ} == {"start", "step", "parameter"}  # DTensors, and no plain ones
    assert all("DTensor" in sharded.records[key].value for key in found.differ)


def test_collectives_are_named():
    expected = {
        None: set(),
        "DistributedDataParallel": {"c10d::allreduce_"},
        "GradientSum": set(),
        "fully_shard": set(),  # one rank has nothing to reduce
    }
    for kind, operators in expected.items():
        model, step = spread(kind)
        with igt.audit(model) as report:
            step()
        named = {e.operator: e for e in report.entries if not e.operator.startswith("aten::") and e.depends}
        assert set(named) == operators, kind
        assert all(e.kind is Class.FIXED and "the number of GPUs" in e.depends for e in named.values())
        assert {e.module for e in report.entries if e.operator == "aten::addmm"} == {
            f"layers.{i}.{name}" for i in range(3) for name in ("up", "down")
        }
    with igt.audit() as report:
        dist.all_reduce(torch.ones(2, dtype=torch.int64))
        dist.broadcast(torch.ones(2), 0)
    assert not report.findings
