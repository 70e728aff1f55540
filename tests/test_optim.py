"""SGD, Adam and AdamW: the written sequence bit for bit, torch's values, states, and what is refused."""

import functools
import json

import ml_dtypes
import numpy as np
import pytest

import isograd as ig
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.runtime import fenv

CASES = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD with momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.25}),
    "SGD nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": ("Adam", {}),
    "Adam with decay": ("Adam", {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}),
    "AdamW": ("AdamW", {"lr": 0.01}),
}


@functools.cache
def drawn(dtype, seed):
    rng = np.random.default_rng(seed)
    return {"w": rng.standard_normal((3, 4)).astype(dtype), "b": np.asarray(rng.standard_normal()).astype(dtype)}


def arrays(dtype, seed=0):
    """New copies of what was drawn once, under the default rounding."""
    return {name: x.copy() for name, x in drawn(dtype, seed).items()}


def bits(given):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in given.items()}


def trained(name, dtype, steps=5):
    kind, options = CASES[name]
    weights = arrays(dtype)
    optimizer = getattr(ig.optim, kind)(weights, **options)
    for seed in range(1, steps + 1):
        optimizer.step(arrays(dtype, seed))
    return weights, optimizer


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_arrays_of_any_layout_and_shared_memory(name, dtype):
    """Parameters with strides, ones that share memory, and gradients that are parameters: the same bits."""
    kind, options = CASES[name]
    rng = np.random.default_rng(5)
    every = rng.standard_normal((4, 20, 30)).astype(dtype)
    every[0, 0, :3] = np.inf, np.nan, 0
    results = []
    for strided, by_kernel in ((False, False), (False, True), (True, True)):
        memory = np.repeat(every, 2, axis=-1)
        w, g = (memory[i, :, ::2] if strided else every[i].copy() for i in (0, 1))
        weights = {"w": w, "own": every[2].copy(), "long": np.tile(every[3].ravel(), 50)}
        optimizer = getattr(ig.optim, kind)(weights, **options)
        if not by_kernel:
            optimizer._apart = set()
        for _ in range(3):
            optimizer.step({"w": g, "own": weights["own"], "long": weights["long"][::-1]})
        results.append({key: np.ascontiguousarray(x) for key, x in weights.items()})
    assert bits(results[0]) == bits(results[1]) == bits(results[2])
    lapping = every[2].ravel().copy()
    pair = {"a": lapping[:400], "b": lapping[200:]}
    optimizer = getattr(ig.optim, kind)(pair, **options)
    optimizer.step({"a": every[3].ravel()[:400], "b": every[3].ravel()[200:]})
    first, second = every[2].ravel()[:400].copy(), every[2].ravel()[200:].copy()
    alone = getattr(ig.optim, kind)({"a": first}, **options)
    alone.step({"a": every[3].ravel()[:400]})
    second[:200] = first[200:]
    alone = getattr(ig.optim, kind)({"b": second}, **options)
    alone.step({"b": every[3].ravel()[200:]})
    assert bits({"b": second}) == bits({"b": pair["b"]})


@pytest.mark.parametrize("name", CASES)
def test_values_of_torch(name):
    torch = pytest.importorskip("torch")
    kind, options = CASES[name]
    weights, _ = trained(name, np.float64)
    theirs = {key: torch.nn.Parameter(torch.from_numpy(np.array(x))) for key, x in arrays(np.float64).items()}
    optimizer = getattr(torch.optim, kind)(list(theirs.values()), **options)
    for seed in range(1, 6):
        for key, x in arrays(np.float64, seed).items():
            theirs[key].grad = torch.from_numpy(np.array(x))
        optimizer.step()
    for key, x in weights.items():
        np.testing.assert_allclose(x, theirs[key].detach().numpy(), rtol=1e-12)


def test_the_written_sequence():
    f, wide = np.float32, arrays(np.float32)["w"]
    w, m, v = wide.copy(), np.zeros_like(wide), np.zeros_like(wide)
    b, p1, p2 = wide.copy(), 1.0, 1.0
    adam, sgd = {"w": wide.copy()}, {"w": wide.copy()}
    first = ig.optim.AdamW(adam, lr=0.01, weight_decay=0.1)
    second = ig.optim.SGD(sgd, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    s = wide.copy()
    for seed in range(1, 4):
        g = arrays(f, seed)["w"]
        first.step({"w": g})
        second.step({"w": g})
        p1, p2 = p1 * 0.9, p2 * 0.999
        w = w * f(1 - 0.01 * 0.1)
        m = m * f(0.9) + f(1 - 0.9) * g
        v = v * f(0.999) + f(1 - 0.999) * (g * g)
        w = w - (f(0.01) * (m / f(1 - p1))) / (np.sqrt(v / f(1 - p2)) + f(1e-8))
        h = g + f(0.01) * s
        b = h if seed == 1 else b * f(0.9) + h
        s = s - f(0.1) * (h + f(0.9) * b)
    assert bits(adam) == bits({"w": w})
    assert bits(sgd) == bits({"w": s})


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_rounded_once_a_step(dtype):
    weights, given = arrays(dtype), arrays(dtype, 1)
    wide = {key: x.astype(np.float32) for key, x in weights.items()}
    optimizer = ig.optim.Adam(weights, lr=0.1)
    optimizer.step(given)
    ig.optim.Adam(wide, lr=0.1).step({key: x.astype(np.float32) for key, x in given.items()})
    assert bits(weights) == bits({key: x.astype(dtype) for key, x in wide.items()})
    assert optimizer.state_dict()["state"]["w"]["exp_avg"].dtype == np.float32


@pytest.mark.parametrize("name", CASES)
def test_a_state_goes_on_where_it_was_taken(name):
    kind, _ = CASES[name]
    weights, optimizer = trained(name, np.float32)
    state = optimizer.state_dict()
    copy = {key: x.copy() for key, x in weights.items()}
    group = json.loads(json.dumps(state["param_groups"]))  # plain numbers and names
    resumed = getattr(ig.optim, kind)(copy)
    resumed.load_state_dict({"state": state["state"], "param_groups": group})
    for seed in (6, 7):
        optimizer.step(arrays(np.float32, seed))
        resumed.step(arrays(np.float32, seed))
    assert bits(copy) == bits(weights)
    assert resumed.lr == optimizer.lr
    assert state["state"]["w"]["step"] == 5


def test_parameters_in_order_and_a_new_rate():
    first, second = arrays(np.float32), list(arrays(np.float32).values())
    by_name, in_order = ig.optim.SGD(first, lr=0.5), ig.optim.SGD(second, lr=0.1)
    in_order.lr = 0.5
    by_name.step(dict(reversed(arrays(np.float32, 1).items())))
    in_order.step(list(arrays(np.float32, 1).values()))
    assert [x.tobytes() for x in first.values()] == [x.tobytes() for x in second]


def test_with_the_tape():
    weights = {"w": np.zeros((4, 1), np.float32)}
    optimizer = ig.optim.Adam(weights, lr=0.1)
    x = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    losses = []
    for _ in range(80):
        tape = ig.Tape()
        w = tape.leaf(weights["w"])
        loss = ((x @ w - x[:, :1]) ** 2).mean()
        losses.append(loss.item())
        optimizer.step({"w": tape.backward(loss)[w]})
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.skipif(not fenv._X86, reason="sets MXCSR")
def test_the_callers_floating_point_environment():
    expected = {name: bits(trained(name, np.float32)[0]) for name in CASES}
    previous = fenv.enter()
    try:
        fenv.leave(0x5F80)  # round up
        changed = {name: bits(trained(name, np.float32)[0]) for name in CASES}
    finally:
        fenv.leave(previous)
    assert changed == expected


def test_what_is_refused():
    weights = arrays(np.float32)
    before = bits(weights)
    optim = ig.optim
    frozen = np.ones(2)
    frozen.setflags(write=False)
    for make, words in (
        (lambda: optim.SGD(weights["w"]), "SGD: params is a ndarray; expected a mapping or a sequence"),
        (lambda: optim.SGD({}), "SGD: params has no arrays"),
        (lambda: optim.SGD([[1.0]]), r"SGD: params\[0\] is a list; expected a NumPy array"),
        (lambda: optim.Adam([frozen]), r"Adam: params\[0\] is read-only"),
        (lambda: optim.Adam(weights, lr=-1), "Adam: lr is -1; expected a number of at least 0"),
        (lambda: optim.Adam(weights, lr="1"), "Adam: lr is '1'"),
        (lambda: optim.AdamW(weights, betas=(0.9, 1.0)), r"AdamW: betas is \(0.9, 1.0\); expected numbers below 1"),
        (lambda: optim.AdamW(weights, betas=0.9), "AdamW: betas is 0.9; expected two numbers"),
        (lambda: optim.SGD(weights, nesterov=True), "SGD: nesterov is True with momentum 0.0"),
        (lambda: optim.Adam(weights, eps=np.nan), "Adam: eps is nan"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            make()
    with pytest.raises(UnsupportedError, match=r"SGD: params\[0\] has dtype int64"):
        optim.SGD([np.ones(2, int)])
    adam = optim.Adam(weights)
    state = adam.state_dict()
    for step, words in (
        ({"w": weights["w"]}, r"Adam.step: grads has the names \['w'\]; expected \['w', 'b'\]"),
        (
            {"w": weights["w"], "b": weights["w"]},
            r"Adam.step: grads\[b\] is float32 \(3, 4\); expected .* float32 \(\)",
        ),
        ({"w": weights["w"].astype(float), "b": weights["b"]}, r"Adam.step: grads\[w\] is float64"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            adam.step(step)
    adam.lr = np.inf
    with pytest.raises(InvalidProblemError, match="Adam: lr is inf"):
        adam.step(arrays(np.float32, 1))
    for wrong, words in (
        ({}, "Adam.load_state_dict: state_dict is none of Adam"),
        (optim.SGD(weights).state_dict(), "Adam.load_state_dict: the group has the names"),
        (optim.Adam({"w": weights["w"]}).state_dict(), "Adam.load_state_dict: state has the names"),
        (optim.Adam(arrays(np.float64)).state_dict(), r"Adam.load_state_dict: state\[w\]\[exp_avg\] is float64"),
    ):
        with pytest.raises(InvalidProblemError, match=words):
            adam.load_state_dict(wrong)
    assert bits(weights) == before
    assert bits(adam.state_dict()["state"]["w"] | {"step": np.zeros(0)}) == bits(
        state["state"]["w"] | {"step": np.zeros(0)}
    )
