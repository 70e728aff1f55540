"""The torch operators of `isograd.ops`: the bits of the functions of arrays, and all that torch does with operators."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from operations import NAMES, ROOTS, arrays_of, expected, inputs, options, raw, settings_of, spelled, wrong_of  # noqa: E402
from torch._dynamo.backends.registry import lookup_backend  # noqa: E402

import isograd as ig  # noqa: E402
import isograd.torch  # noqa: E402
from isograd.core import call  # noqa: E402
from isograd.core.operands import Chosen, Like  # noqa: E402
from isograd.ops import OPERATIONS  # noqa: E402
from isograd.torch import sharding  # noqa: E402

DIFFERENTIABLE = [name for name in NAMES if OPERATIONS[name].vjp]


def operator(name):
    return getattr(torch.ops.isograd, name)


def problem(name, i=0, shape=(4, 3), dtype="float32"):
    """(inputs by name, settings, flags of the optional outputs) with what is optional."""
    op = OPERATIONS[name]
    settings, given = settings_of(op, i % len(shape), i), options(op, i)
    made = inputs(op, np.random.default_rng(i), "normal", shape, dtype, settings, given)
    return made, settings, given


def arguments(name, made, settings, given):
    op = OPERATIONS[name]
    tensors = [None if key not in made else torch.from_numpy(np.array(made[key])) for key in op.inputs]
    return (*tensors, *spelled(op, settings), *[key in given for key, a in op.outputs.items() if a.optional])


def with_leaves(name, args):
    """The inputs, of which those that have a gradient require it."""
    op = OPERATIONS[name]
    differentiable = op.gradients(OPERATIONS[op.vjp]) if op.vjp else op.inputs
    differentiable = [key for key in differentiable if not op.inputs[key].dtype.startswith("index")]
    pairs = zip(op.inputs, args, strict=False)
    return [a.clone().requires_grad_() if a is not None and key in differentiable else a for key, a in pairs]


def has_chosen(op):
    return any(isinstance(a, Chosen) for a in op.inputs.values())


def leaves_of(inputs):
    return [a for a in inputs if a is not None and a.requires_grad]


def several(result):
    return result if isinstance(result, tuple) else (result,)


def asked(name, results, given):
    outputs = OPERATIONS[name].outputs
    return [r for (key, a), r in zip(outputs.items(), several(results), strict=True) if not a.optional or key in given]


@pytest.mark.parametrize("name", NAMES)
def test_bits_of_the_reference(name):
    for i, shape in enumerate([(4, 3), (2, 3, 4), (5,), (0, 3), (3, 1)]):
        if shape[-1] < OPERATIONS[name].least_size:
            continue
        made, settings, given = problem(name, i, shape)
        found = asked(name, operator(name)(*arguments(name, made, settings, given)), given)
        assert [raw(r.numpy()) for r in found] == list(map(raw, expected(OPERATIONS[name], made, settings, given)))


def of_arrays(name, made, settings, tensors, out=None):
    """The call of the function of arrays on tensors."""
    return call.function(OPERATIONS[name])(tuple(tensors), tuple(settings.values()), (), out)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_function_of_arrays_records_gradients_of_tensors(name):
    op = OPERATIONS[name]
    made, settings, _ = problem(name, 1)
    args = arguments(name, made, settings, [])
    leaves = with_leaves(name, args)
    results = several(of_arrays(name, made, settings, leaves))
    assert [raw(r.detach().numpy()) for r in results] == list(map(raw, expected(op, made, settings, [])))
    results[0].sum().backward()
    again = with_leaves(name, args)
    several(operator(name)(*again, *args[len(op.inputs) :]))[0].sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves_of(leaves), leaves_of(again), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_of_tensors_runs_again_on_new_contents(name):
    op = OPERATIONS[name]
    made, settings, _ = problem(name, 1)
    first = arguments(name, made, settings, [])[: len(op.inputs)]
    other = inputs(op, np.random.default_rng(3), "normal", (4, 3), "float32", settings, [])
    second = arguments(name, other, settings, [])[: len(op.inputs)]
    with ig.Encoder() as encoder:
        found = several(of_arrays(name, made, settings, first))
    for arrays in (first, second):
        for into, values in zip(first, arrays, strict=True):
            if into is not None:
                into.copy_(values)
        encoder.replay()
        right = several(of_arrays(name, made, settings, [None if a is None else a.clone() for a in first]))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("name", [name for name in NAMES if len(OPERATIONS[name].outputs) == 1])
def test_the_function_of_arrays_writes_into_tensors(name):
    op = OPERATIONS[name]
    for shape in ((4, 3), ()):
        if not shape and has_chosen(op):
            continue  # which has rows of more than one element
        made, settings, _ = problem(name, 1, shape or (1,))
        args = arguments(name, made, settings, [])[: len(op.inputs)]
        kinds = zip(args, op.inputs.values(), strict=True)
        tensors = [a.view(shape) if a is not None and a.dim() and isinstance(kind, Like) else a for a, kind in kinds]
        (right,) = expected(op, made, settings, [])
        out = torch.empty(shape if right.ndim else ())
        assert of_arrays(name, made, settings, tensors, out) is out
        assert raw(out.view(right.shape).numpy()) == raw(right)
        with pytest.raises(ig.UnsupportedError, match=f"^{name}: .* requires a gradient"):
            of_arrays(name, made, settings, with_leaves(name, tensors), out)
        with pytest.raises(ig.IsogradError, match=f"^{name}: out has shape"):
            of_arrays(name, made, settings, tensors, torch.empty(2, 7))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    args = arguments(name, *problem(name))
    args = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    torch.library.opcheck(operator(name).default, tuple(args))


@pytest.mark.parametrize("name", NAMES)
def test_vmap_has_the_bits_of_a_loop(name):
    for i in range(4):
        members = [arguments(name, *problem(name, i, (4, 3))) for _ in range(3)]
        stacked = [torch.stack(a, -1) if isinstance(a[0], torch.Tensor) else a[0] for a in zip(*members, strict=True)]
        in_dims = tuple([-1 if isinstance(a, torch.Tensor) else None for a in stacked])
        found = several(torch.func.vmap(operator(name), in_dims=in_dims)(*stacked))
        loop = [several(operator(name)(*m)) for m in members]
        for results, right in zip(found, zip(*loop, strict=True), strict=True):
            assert torch.equal(results, torch.stack(right))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vmap_over_no_members(name):
    made, settings, _ = problem(name, 1)
    args = arguments(name, made, settings, [])
    batches = [a.new_empty(0, *a.shape) if isinstance(a, torch.Tensor) else a for a in args]
    in_dims = tuple([0 if isinstance(a, torch.Tensor) else None for a in batches])
    found = several(torch.func.vmap(operator(name), in_dims=in_dims)(*batches))
    assert [t.shape for t in found] == [(0, *t.shape) for t in several(operator(name)(*args))]


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_all_members_is_shared(name):
    op = OPERATIONS[name]
    if "weight" not in op.inputs:
        pytest.skip("it has no weight")
    made, settings, _ = problem(name, 0)
    args = list(arguments(name, made, settings, ["weight"]))
    place = list(op.inputs).index("weight")
    mapped = [isinstance(t, torch.Tensor) and i != place for i, t in enumerate(args)]
    tensors = [torch.stack([t, t.flip(0)]) if m else t for t, m in zip(args, mapped, strict=True)]
    in_dims = tuple([0 if m else None for m in mapped])
    found = several(torch.func.vmap(operator(name), in_dims=in_dims)(*tensors))
    for member in (0, 1):
        one = [t[member] if d == 0 else t for t, d in zip(tensors, in_dims, strict=True)]
        for results, right in zip(found, several(operator(name)(*one)), strict=True):
            assert torch.equal(results[member], right)


@pytest.mark.thorough
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_derivatives(name):
    op = OPERATIONS[name]
    made, settings, given = problem(name, 0, (3, 4), "float64")
    args = arguments(name, made, settings, given)
    args = (*with_leaves(name, args), *args[len(op.inputs) :])
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]

    def function(*tensors):
        values = list(args)
        for i, t in zip(places, tensors, strict=True):
            values[i] = t
        return several(operator(name)(*values))[0]

    tensors = tuple([args[i] for i in places])
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True)
    assert op.vjp in ROOTS


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_compiled_has_the_bits_of_eager(name):
    torch._dynamo.reset()  # which counts what one piece of code is compiled for
    args = arguments(name, *problem(name, 0))
    args = (*with_leaves(name, args), *args[len(OPERATIONS[name].inputs) :])
    tensors = leaves_of(args[: len(OPERATIONS[name].inputs)])

    def step(*args):
        return several(operator(name)(*args))[0].square().sum()

    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        run(*args).backward()
        results.append([t.grad.clone() for t in tensors])
        for t in tensors:
            t.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_two_graphs_serve_any_number_of_rows(name):
    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)

    made, settings, given = problem(name, 1, (12, 6))
    args = arguments(name, made, settings, given)
    cut = [i for i, a in enumerate(OPERATIONS[name].inputs.values()) if isinstance(a, Like | Chosen)]
    torch._dynamo.reset()

    def step(rows):
        return several(operator(name)(*[a[:rows] if i in cut and a is not None else a for i, a in enumerate(args)]))[0]

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for rows in range(2, 10):
        assert torch.equal(compiled(rows), step(rows))
    assert graphs <= 2


@pytest.mark.parametrize("name", NAMES)
def test_meta_tensors_have_the_layout_of_real_ones(name):
    for i in range(3):
        args = arguments(name, *problem(name, i))
        meta = operator(name)(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args])
        for real, fake in zip(several(operator(name)(*args)), several(meta), strict=True):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_without_dimensions_are_rows_of_one(name):
    op = OPERATIONS[name]
    if has_chosen(op):
        pytest.skip("its rows have a dimension")
    made, settings, given = problem(name, 0, (1,))
    args = arguments(name, made, settings, given)
    rows = [isinstance(a, Like) for a in op.inputs.values()]
    scalars = [a.view(()) if row and a is not None else a for a, row in zip(args, rows, strict=False)]
    scalars += args[len(rows) :]
    for one, row in zip(several(operator(name)(*scalars)), several(operator(name)(*args)), strict=True):
        assert torch.equal(one.reshape(row.shape), row)


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_in_torch_words(name):
    op = OPERATIONS[name]
    good, wrong = arrays_of(op), wrong_of(op)
    defaults = [*settings_of(op, -1).values()]
    for i, key in enumerate(op.inputs):
        for value in wrong.get(key, ()):
            if isinstance(value, np.ndarray) and not (key == op.problem and value.ndim == 9):
                tensors = [None if a is None else torch.from_numpy(np.array(a)) for a in good]
                tensors[i] = torch.from_numpy(np.array(value))
                with pytest.raises(ig.IsogradError, match=f"^{name}: "):
                    operator(name)(*tensors, *defaults)


# --- DTensors --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mesh():
    pytest.importorskip("torch.distributed.tensor", reason="needs torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_shards_of_rows_are_computed_alone(mesh, name):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    op = OPERATIONS[name]
    if op.ordered:
        pytest.skip("what a part is depends on where it is")
    reduction = {"reduction": "none"} if "reduction" in op.attributes else {}
    settings, weighted = settings_of(op, 1) | reduction, options(op, 2)
    if not op.has_parts(settings):
        pytest.skip("it is a sum over rows")
    made = inputs(op, np.random.default_rng(0), "normal", (4, 6), "float32", settings, weighted)
    whole = arguments(name, made, settings, [])
    given = list(whole)
    for i, (array, t) in enumerate(zip(op.inputs.values(), whole, strict=False)):
        if t is not None:
            place = array.place(1, 0, settings)
            local = t if place is None else t.chunk(2, place)[0].contiguous()
            placements = [Replicate() if place is None else Shard(place)]
            given[i] = DTensor.from_local(local, mesh, placements, run_check=False)
    sharding.register()
    for found, right in zip(several(operator(name)(*given)), several(operator(name)(*whole)), strict=True):
        if right.numel():
            assert list(found.placements) == [Shard(0)]
            assert torch.equal(found.to_local(), right.chunk(2, 0)[0])
