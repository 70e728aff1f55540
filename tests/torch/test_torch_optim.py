"""igt.optim: the reference's bits for any values, grouping, layout and number of threads; torch's values and states."""

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import isograd as ig  # noqa: E402
import isograd.torch as igt  # noqa: E402
from isograd.cli import check  # noqa: E402
from isograd.core import arrays  # noqa: E402
from isograd.errors import InvalidProblemError, UnsupportedError  # noqa: E402
from isograd.numerics.reference import narrow, widen  # noqa: E402
from isograd.optimizers import reference  # noqa: E402
from isograd.optimizers.cases import MAX_NORM, OPTIMIZERS, cases  # noqa: E402
from isograd.optimizers.numbers import numbers, power, rates  # noqa: E402
from isograd.runtime import fenv  # noqa: E402

CASES = {
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW-maximize": ("AdamW", {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3, "maximize": True}),
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD-decay": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "SGD-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01}),
    "SGD-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Lion": ("Lion", {"lr": 1e-3, "weight_decay": 0.1}),
}
SHAPES = ((300, 70), (7,), (), (3, 5, 7), (0, 4), (20_001,))
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def flavoured(rng, shape, flavour, dtype):
    x = rng.standard_normal(shape)
    if flavour == "extreme":
        x = x * 2.0 ** rng.integers(-140, 120, shape)
    elif flavour == "subnormal":
        x = np.rint(30 * x) * float(
            np.finfo(dtype).smallest_subnormal if dtype is not ml_dtypes.bfloat16 else 2.0**-133
        )
    elif flavour == "special":
        x = np.where(rng.random(shape) < 0.3, rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape), x)
    with np.errstate(all="ignore"):
        return np.asarray(x if dtype is np.float64 else x.astype(np.float32)).astype(dtype)


def to_torch(x):
    word = {2: np.int16, 4: np.int32, 8: np.int64}[x.itemsize]
    return torch.from_numpy(np.array(x, order="C").view(word)).view(getattr(torch, x.dtype.name))


def bits(t):
    if not isinstance(t, torch.Tensor):
        return np.ascontiguousarray(t).tobytes()
    t = t.detach().cpu().contiguous().reshape(-1)
    return t.view(torch.uint8).numpy().tobytes() if t.numel() else b""


def make(kind, params, options):
    return getattr(igt.optim, kind)(params, **options)


def expected_steps(optimizer, weights, given):
    """The reference's parameters and states after a step for each of the gradients in `given`."""
    group = optimizer.param_groups[0]
    update = optimizer._update(group)
    of, work = rates(update, group), widen(weights).dtype
    states = [np.zeros(weights.shape, work) for _ in update.states]
    for step, g in enumerate(given, 1):
        this = update._replace(first=update.momentum and step == 1)
        w, states = reference.updated(
            this, widen(weights), widen(g), states, numbers(this, of, group["lr"], step, work)
        )
        weights = narrow(w, weights.dtype)
    return weights, states


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_the_reference(name, dtype):
    kind, options = CASES[name]
    for flavour in ("normal", "extreme", "subnormal", "special"):
        rng = np.random.default_rng([len(flavour), len(name)])
        drawn = [[flavoured(rng, shape, flavour, NUMPY[dtype]) for shape in SHAPES] for _ in range(4)]
        params = [torch.nn.Parameter(to_torch(x)) for x in drawn[0]]
        optimizer = make(kind, params, options)
        for given in drawn[1:]:
            for p, g in zip(params, given, strict=True):
                p.grad = to_torch(g)
            optimizer.step()
        for i, p in enumerate(params):
            weights, states = expected_steps(optimizer, drawn[0][i], [given[i] for given in drawn[1:]])
            assert bits(p) == bits(weights), (flavour, SHAPES[i])
            names = optimizer._update(optimizer.param_groups[0]).states
            for key, state in zip(names, states, strict=True):
                assert bits(optimizer.state[p][key]) == bits(state), (flavour, SHAPES[i], key)


def trained(kind, options, shapes=((40, 50), (9,), (17,)), dtype=torch.float32, steps=3, layout=lambda t: t, groups=1):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(layout(torch.randn(shape).to(dtype))) for shape in shapes]
    parts = [{"params": params[i::groups]} for i in range(groups)]
    optimizer = make(kind, parts, options)
    for _ in range(steps):
        for p in params:
            p.grad = layout(torch.randn(p.shape).to(dtype))
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("name", CASES)
def test_neither_threads_nor_groups_nor_layout_change_a_bit(name, restore_threads):
    kind, options = CASES[name]
    shapes = ((300, 400), (9, 4), (17, 3))
    base = [bits(p) for p in trained(kind, options, shapes)[0]]
    ig.set_num_threads(1)
    assert [bits(p) for p in trained(kind, options, shapes)[0]] == base
    ig.set_num_threads(3)
    assert [bits(p) for p in trained(kind, options, shapes, groups=3)[0]] == base
    for layout in (
        lambda t: t.t().contiguous().t(),  # dense in another order
        lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],  # with gaps
    ):
        assert [bits(p) for p in trained(kind, options, shapes, layout=layout)[0]] == base


@pytest.mark.parametrize("name", [name for name in CASES if name != "Lion"])
def test_near_torch_over_twenty_steps(name):
    """Each step rounds a parameter and a change of about lr: 20 steps stay within 200 u of what was moved."""
    kind, options = CASES[name]
    rng = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((30, 40), (9,))]
    theirs = [torch.nn.Parameter(p.detach().double()) for p in params]
    optimizer, other = make(kind, params, options), getattr(torch.optim, kind)(theirs, **options)
    moved = [torch.zeros_like(q) for q in theirs]
    for _ in range(20):
        before = [q.detach().clone() for q in theirs]
        for p, q in zip(params, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=rng)
            q.grad = p.grad.double()
        optimizer.step()
        other.step()
        for m, q, b in zip(moved, theirs, before, strict=True):
            m += (q.detach() - b).abs() + b.abs()
    for p, q, m in zip(params, theirs, moved, strict=True):
        assert ((p.double() - q).abs() <= 10 * 2.0**-24 * m).all()


def test_the_bound_of_a_step_of_adamw():
    """Moments that nearly cancel, large and small gradients, early and late steps."""
    rng = np.random.default_rng(0)
    lr, (b1, b2), eps, decay = 0.01, (0.9, 0.999), 1e-8, 0.1
    for step in (1, 2, 50, 100_000):
        n = 20_000
        w, g = rng.standard_normal((2, n)).astype(np.float32)
        g *= (2.0 ** rng.integers(-20, 20, n)).astype(np.float32)
        m = (-g / 9 * (1 + 2.0 ** -rng.integers(1, 20, n))).astype(np.float32)
        v = (rng.random(n) * g * g).astype(np.float32)
        update = igt.optim.AdamW([torch.nn.Parameter(torch.ones(1))])._update({"maximize": False})
        options = {"betas": (b1, b2), "eps": eps, "weight_decay": decay}
        found, _ = reference.updated(
            update, w, g, [m, v], numbers(update, rates(update, options), lr, step, np.float32)
        )
        w, g, m, v = (x.astype(np.longdouble) for x in (w, g, m, v))
        root = np.sqrt((v * b2 + (1 - b2) * g * g) / (1 - np.longdouble(b2) ** step)) + eps
        scale = lr / (1 - np.longdouble(b1) ** step) / root
        exact = w * (1 - lr * decay) - scale * (m * b1 + (1 - b1) * g)
        bound = (3 * np.abs(w) + 14 * scale * (np.abs(m * b1) + np.abs((1 - b1) * g))) * 2.0**-24
        assert (np.abs(found - exact) <= bound).all()


def test_lion_is_its_formula():
    p = torch.nn.Parameter(torch.tensor([1.0, -0.0, 0.5]))
    optimizer = igt.optim.Lion([p], lr=0.25, betas=(0.5, 0.25))
    p.grad = torch.tensor([3.0, 0.0, float("nan")])
    optimizer.step()
    assert p[0] == 0.75
    assert bits(p[1]) == bits(np.float32(-0.0))
    assert p[2].isnan()
    assert optimizer.state[p]["exp_avg"][0] == 2.25


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_states_go_to_torch_and_back(kind, options):
    given = {"lr": 0.01, **({"momentum": 0.9} if kind == "SGD" else {})}
    params, optimizer = trained(kind, given)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = getattr(torch.optim, kind)(theirs, **given, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(params, theirs, strict=True):
        p.grad = q.grad = torch.ones_like(p)
    optimizer.step()
    other.step()
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q)
    again = make(kind, theirs, {})
    again.load_state_dict(copy.deepcopy(other.state_dict()))
    assert again.param_groups[0]["lr"] == 0.01
    assert again.param_groups[0]["master_weights"] is False
    again.step()
    other.step()
    for q in theirs:
        for key, value in other.state[q].items():
            torch.testing.assert_close(again.state[q][key], value)


@pytest.mark.parametrize("name", CASES)
def test_a_state_goes_on_where_it_was_taken(name):
    kind, options = CASES[name]
    options = {**options, "master_weights": True}
    params, optimizer = trained(kind, options, dtype=torch.bfloat16)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = make(kind, theirs, {"lr": 7.0})
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    copied = pickle.loads(pickle.dumps(optimizer))
    for _ in range(2):
        for p, q, c in zip(params, theirs, copied.param_groups[0]["params"], strict=True):
            p.grad = q.grad = c.grad = torch.randn(p.shape).bfloat16()
        for one in (optimizer, resumed, copied):
            one.step()
    assert [bits(p) for p in theirs] == [bits(p) for p in params]
    assert [bits(p) for p in copied.param_groups[0]["params"]] == [bits(p) for p in params]
    for p, q in zip(params, theirs, strict=True):
        assert {k: bits(v) for k, v in resumed.state[q].items()} == {k: bits(v) for k, v in optimizer.state[p].items()}


def test_master_weights_are_the_parameter():
    """Steps that a bfloat16 has no room for add up."""
    narrow, optimizer = trained("AdamW", {"lr": 1e-4, "master_weights": True}, dtype=torch.bfloat16, steps=8)
    wide, other = trained("AdamW", {"lr": 1e-4, "master_weights": True}, steps=8)  # without an effect
    assert "master" not in other.state[wide[0]]
    for p in narrow:
        assert optimizer.state[p]["master"].dtype is torch.float32
        assert torch.equal(optimizer.state[p]["master"].bfloat16(), p)
    plain, _ = trained("AdamW", {"lr": 1e-4}, dtype=torch.bfloat16, steps=8)
    assert not torch.equal(plain[0], narrow[0])


def test_a_gradient_of_float32_for_a_parameter_of_16_bits():
    p = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    if not hasattr(p, "grad_dtype"):
        pytest.skip("torch has one dtype for both")
    p.grad_dtype = torch.float32
    p.grad = torch.full((5,), 1 + 2.0**-20)
    optimizer = igt.optim.SGD([p], lr=1.0, momentum=0.5)
    optimizer.step()
    assert (optimizer.state[p]["momentum_buffer"] == 1 + 2.0**-20).all()


def test_parameters_without_gradient_keep_their_count_of_steps():
    params, optimizer = trained("AdamW", {"lr": 0.01}, steps=2)
    params[0].grad = None
    before = bits(params[0])
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 3, 3]
    assert bits(params[0]) == before


def test_schedulers_closures_and_tensor_rates():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = igt.optim.SGD([p], lr=torch.tensor(0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    optimizer.step(closure)
    assert p.tolist() == [0.25] * 3


def test_a_cosine_of_fixed_operations():
    optimizer = igt.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, igt.optim.cosine_schedule(110, warmup=10, final=0.1))
    for step in range(130):
        expected = (step + 1) / 10 if step < 10 else 0.1 + 0.45 * (1 + math.cos(math.pi * min((step - 10) / 100, 1)))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * expected, rel=1e-14)
        optimizer.step()
        schedule.step()
    assert schedule.state_dict()["lr_lambdas"] == [{"steps": 110, "warmup": 10, "final": 0.1}]
    with pytest.raises(InvalidProblemError, match="cosine_schedule: steps is 5 and warmup 5; expected integers"):
        igt.optim.cosine_schedule(5, 5)
    with pytest.raises(InvalidProblemError, match="cosine_schedule: final is 2; expected a number from 0 to 1"):
        igt.optim.cosine_schedule(5, final=2)


@pytest.mark.thorough
def test_a_compiled_step_has_the_bits_of_an_eager_one():
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = igt.optim.AdamW(model.parameters(), lr=0.1)

        def step(x, model=model, optimizer=optimizer):
            model(x).sum().backward()
            igt.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(step, backend="eager") if compiled else step
        for _ in range(3):
            run(torch.ones(2, 4))
        found.append([bits(p) for p in model.parameters()])
    assert found[0] == found[1]


def test_powers_by_squaring():
    assert [power(3.0, n) for n in (0, 1, 2, 5, 10)] == [1, 3, 9, 243, 59049]
    assert power(0.999, 1000) == pytest.approx(0.999**1000, rel=1e-14)


def test_a_backward_that_saved_an_old_parameter_is_refused():
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    igt.optim.SGD([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_refused():
    p = torch.nn.Parameter(torch.ones(3))
    optim = igt.optim
    for build, words in (
        (lambda: optim.AdamW([p], lr=-1), "optim.AdamW: lr is -1; expected a number of at least 0"),
        (lambda: optim.AdamW([p], betas=(0.9, 1.0)), r"optim.AdamW: betas is \(0.9, 1.0\); expected numbers below 1"),
        (lambda: optim.Lion([p], betas=0.9), "optim.Lion: betas is 0.9; expected two numbers"),
        (lambda: optim.AdamW([p], eps=float("nan")), "optim.AdamW: eps is nan"),
        (lambda: optim.SGD([p], nesterov=True), "optim.SGD: nesterov is True with momentum 0.0"),
        (lambda: optim.SGD([{"params": [p], "weight_decay": "1"}]), "optim.SGD: weight_decay is '1'"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            build()
    with pytest.raises(UnsupportedError, match=r"optim.AdamW: amsgrad is True; accepted: False"):
        optim.AdamW([p], amsgrad=True)
    with pytest.raises(UnsupportedError, match=r"optim.SGD: differentiable is True; accepted: False"):
        optim.SGD([p], differentiable=True)


def test_nothing_is_written_before_an_error():
    first = torch.nn.Parameter(torch.ones(3))
    first.grad = torch.ones(3)
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    imaginary = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    imaginary.grad = torch.ones(2, dtype=torch.complex64)
    for wrong, words in (
        (table.weight, r"optim.SGD: the gradient of params\[1\] is sparse_coo; accepted: dense tensors"),
        (imaginary, r"optim.SGD: params\[1\] has dtype complex64; accepted: float16, bfloat16, float32, float64"),
    ):
        optimizer = igt.optim.SGD([first, wrong], lr=0.1, momentum=0.9)
        with pytest.raises(UnsupportedError, match=words):
            optimizer.step()
        assert (first == 1).all()
        assert "momentum_buffer" not in optimizer.state[first]


@pytest.mark.skipif(not fenv._X86, reason="sets MXCSR")
@pytest.mark.parametrize("name", CASES)
def test_the_callers_floating_point_environment(name):
    kind, options = CASES[name]

    rng = torch.Generator().manual_seed(0)
    drawn = [torch.randn(40, 50, generator=rng) for _ in range(3)]

    def run():
        p = torch.nn.Parameter(drawn[0].clone())
        optimizer = make(kind, [p], {**options, "weight_decay": 1e-310})
        for g in drawn[1:]:
            p.grad = g.clone()
            norm = igt.clip_grad_norm_(p, 0.1)
            optimizer.step()
        return bits(p), bits(norm)

    expected = run()
    for mode in (0x5F80, 0x9FC0):  # round up; flush subnormals, as torch.set_flush_denormal does
        previous = fenv.enter()
        try:
            fenv.leave(mode)
            found = run()
        finally:
            fenv.leave(previous)
        assert found == expected


def published_runs(device):
    """(name, digest of parameter, states and last norm) of the published trainings on a device."""
    for case in cases():
        kind, options, update = OPTIMIZERS[case.optimizer]
        p = torch.nn.Parameter(to_torch(case.weights).to(device))
        optimizer = make(kind, [p], options)
        norm = None
        for g in case.gradients:
            p.grad = to_torch(g).to(device)
            norm = igt.clip_grad_norm_(p, MAX_NORM)
            optimizer.step()
        tensors = [p, *[optimizer.state[p][name] for name in update.states], norm]
        yield case.name, check.results_digest(tuple(arrays.numpy_view(t.detach().cpu()) for t in tensors))


def test_published_digests():
    assert dict(published_runs("cpu")) == check.published()["optimizers"]
