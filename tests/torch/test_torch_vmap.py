"""Members of a batch under vmap have the bits that they have alone, also of operators that reduce."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd.torch as igt
from isograd.elementwise import api as elementwise

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_environment import MODES, environment

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 5, 4, generator=GENERATOR)
TARGETS = torch.randint(0, 4, (6, 5), generator=GENERATOR)
TARGETS[0, 1] = -100
WEIGHT = torch.rand(4, generator=GENERATOR)
ORDER = torch.stack([torch.randperm(10, generator=GENERATOR) for _ in range(6)])
ROWS, SHARES = torch.randn(6, 10, 4, generator=GENERATOR), torch.rand(6, 5, 2, generator=GENERATOR)
COUNTS, MATRIX = torch.rand(6, generator=GENERATOR) + 1, torch.randn(4, 4, generator=GENERATOR)
PLACES = torch.randint(0, 4, (6, 5), generator=GENERATOR)
EXPERTS = X.argsort(-1)[..., :2]
CALLS = {
    "mean": (lambda x, t: igt.cross_entropy(x, t, label_smoothing=0.1), (X, TARGETS)),
    "weighted mean": (lambda x, t: igt.cross_entropy(x, t, WEIGHT), (X, TARGETS)),
    "sum": (lambda x, t: igt.cross_entropy(x, t, WEIGHT, reduction="sum"), (X, TARGETS)),
    "count": (lambda x, t: igt.cross_entropy(x, t, count=7), (X, TARGETS)),
    "one row": (lambda x, t: igt.cross_entropy(x, t), (X[:, 0], TARGETS[:, 0])),
    "probabilities": (lambda x, p: igt.cross_entropy(x, p), (X, X.softmax(-1))),
    "count of each": (lambda x, t, n: igt.cross_entropy(x, t, count=n), (X, TARGETS, COUNTS)),
    "kl_div": (lambda x, p: igt.kl_div(x, p, reduction="batchmean"), (X.log_softmax(-1), X.softmax(-1))),
    "distillation": (lambda x, p: igt.distillation_loss(x, p, 2.0), (X, X.flip(0))),
    "embedding": (lambda w, t: igt.embedding(t, w, 1).square().sum(), (X, PLACES)),
    "index_add": (lambda x, t: igt.index_add(x, 1, t, x[:, :3]).contiguous().square().sum(), (X, PLACES[:, :3])),
    "load_balancing": (lambda x, e: igt.load_balancing_loss(x, e).square(), (X.softmax(-1), EXPERTS)),
    "router_z_loss": (lambda x: igt.router_z_loss(x).square(), (X,)),
    "router": (lambda x, b: igt.moe_router(x, 2, bias=b).weights[:, 0].sum(), (X, X[:, 0])),
    "linear": (lambda h, t: igt.linear_cross_entropy(h, MATRIX, t, label_smoothing=0.1), (X, TARGETS)),
    "linear sum": (lambda h, t: igt.linear_cross_entropy(h, MATRIX, t, reduction="sum") * 3, (X, TARGETS)),
    "matrices": (lambda w, t: igt.linear_cross_entropy(MATRIX, w, t), (X[:, :4], TARGETS[:, :4].clamp(0))),
    "moe_permute": (lambda x, order: igt.moe_permute(x, order, 2).square().sum(), (X, ORDER)),
    "moe_combine": (lambda x, w, order: igt.moe_combine(x, w, order).square().sum(), (ROWS, SHARES, ORDER)),
}


@pytest.mark.parametrize("name", CALLS)
def test_members_have_their_own_bits(name):
    function, tensors = CALLS[name]
    for transform in (function, torch.func.grad(function)):
        alone = torch.stack([transform(*member) for member in zip(*tensors, strict=True)])
        assert torch.equal(torch.vmap(transform)(*tensors), alone)


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_is_differentiated_as_its_members_are(name):
    function, tensors = CALLS[name]
    batches = [torch.stack([t, t.flip(0)]) for t in tensors]
    for outer, inner in ((torch.vmap(function), tensors), (torch.vmap(torch.vmap(function)), batches)):
        alone = torch.vmap(torch.func.grad(function))
        expected = alone(*inner) if inner is tensors else torch.vmap(alone)(*inner)
        found = torch.func.grad(lambda *args, outer=outer: outer(*args).sum())(*inner)
        torch.testing.assert_close(found, expected)


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


def test_batched_gradients(monkeypatch):
    hidden = X[0].clone().requires_grad_()
    loss = igt.linear_cross_entropy(hidden, ROWS[0], TARGETS[1])
    factors = torch.tensor([1.0, 2.0, 3.0])
    calls, scale = [], elementwise.scale
    monkeypatch.setattr(elementwise, "scale", lambda *args: calls.append(1) or scale(*args))
    (found,) = torch.autograd.grad(loss, hidden, factors, is_grads_batched=True, retain_graph=True)
    assert len(calls) == 1
    alone = [torch.autograd.grad(loss, hidden, factor, retain_graph=True)[0] for factor in factors]
    assert torch.equal(found, torch.stack(alone))
