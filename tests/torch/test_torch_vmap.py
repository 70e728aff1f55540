"""Members of a batch under vmap have the bits that they have alone, also of operators that reduce."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd.torch as igt

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_environment import MODES, environment

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 5, 4, generator=GENERATOR)
TARGETS = torch.randint(0, 4, (6, 5), generator=GENERATOR)
TARGETS[0, 1] = -100
WEIGHT = torch.rand(4, generator=GENERATOR)
ORDER = torch.stack([torch.randperm(10, generator=GENERATOR) for _ in range(6)])
ROWS, SHARES = torch.randn(6, 10, 4, generator=GENERATOR), torch.rand(6, 5, 2, generator=GENERATOR)
CALLS = {
    "mean": (lambda x, t: igt.cross_entropy(x, t, label_smoothing=0.1), (X, TARGETS)),
    "weighted mean": (lambda x, t: igt.cross_entropy(x, t, WEIGHT), (X, TARGETS)),
    "sum": (lambda x, t: igt.cross_entropy(x, t, WEIGHT, reduction="sum"), (X, TARGETS)),
    "count": (lambda x, t: igt.cross_entropy(x, t, count=7), (X, TARGETS)),
    "one row": (lambda x, t: igt.cross_entropy(x, t), (X[:, 0], TARGETS[:, 0])),
    "probabilities": (lambda x, p: igt.cross_entropy(x, p), (X, X.softmax(-1))),
    "moe_permute": (lambda x, order: igt.moe_permute(x, order, 2).square().sum(), (X, ORDER)),
    "moe_combine": (lambda x, w, order: igt.moe_combine(x, w, order).square().sum(), (ROWS, SHARES, ORDER)),
}


@pytest.mark.parametrize("name", CALLS)
def test_members_have_their_own_bits(name):
    function, tensors = CALLS[name]
    for transform in (function, torch.func.grad(function)):
        alone = torch.stack([transform(*member) for member in zip(*tensors, strict=True)])
        assert torch.equal(torch.vmap(transform)(*tensors), alone)


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_of_the_caller_reaches_a_member(mode):
    x = torch.full((3, 7, 4), 1e-3) * torch.arange(84).reshape(3, 7, 4)
    targets = torch.randint(0, 4, (3, 7), generator=torch.Generator().manual_seed(1))

    def loss(x, t):
        return igt.cross_entropy(x, t, z_loss=1e-40)

    transforms = [torch.vmap(loss), torch.vmap(torch.func.grad(loss))]
    expected = [transform(x, targets) for transform in transforms]
    tiny = WEIGHT * 1e-38
    weighted = torch.vmap(lambda x, t: igt.cross_entropy(x, t, tiny))
    expected.append(weighted(x, targets))
    with environment(mode):
        found = [transform(x, targets) for transform in (*transforms, weighted)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_gradient_of_cross_entropy_is_one_call(monkeypatch):
    from isograd.losses import cross_entropy as steps

    calls = []
    backward = steps.backward
    monkeypatch.setattr(steps, "backward", lambda *args: calls.append(1) or backward(*args))
    torch.vmap(torch.func.grad(igt.cross_entropy))(X[:, 0], TARGETS[:, 0])
    assert len(calls) == 1


def test_batched_gradients():
    hidden = X[0].clone().requires_grad_()
    loss = igt.linear_cross_entropy(hidden, ROWS[0], TARGETS[1])
    factors = torch.tensor([1.0, 2.0])
    (found,) = torch.autograd.grad(loss, hidden, factors, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(loss, hidden, factor, retain_graph=True)[0] for factor in factors]
    assert torch.equal(found, torch.stack(alone))
