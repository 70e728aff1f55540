"""`isograd.torch.use()` on a GPU with activation checkpoints; default devices; the names in faults."""

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import isograd as ig
import isograd.torch as igt
from isograd.devices import cuda as cuda_kernels

if (_missing := cuda_kernels.unavailable()) is not None:
    pytest.skip(f"needs a GPU: {_missing}", allow_module_level=True)


def sample(*shape, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_the_switch(reentrant):
    """Autograd's own thread recomputes under the block of forward, with the dropout of forward, also outside of it."""

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4).softmax(-1).square().sum()

    def gradient(run, inside):
        torch.manual_seed(3)
        x = sample(2, 2, 33, 32, device="cuda").requires_grad_()
        with igt.use():
            loss = run(x)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return x.grad

    expected = gradient(attend, True)
    for inside in (False, True):
        found = gradient(lambda x: checkpoint(attend, x, use_reentrant=reentrant), inside)
        assert torch.equal(found, expected)


def test_a_default_device_changes_nothing():
    x = sample(1, 2, 8, 16)
    expected = igt.attention(x, x, x, dropout_p=0.5, seed=3)
    torch.manual_seed(0)
    drawn = igt.attention(x, x, x, dropout_p=0.5)
    with torch.device("cuda"):
        assert torch.equal(igt.attention(x, x, x, dropout_p=0.5, seed=3), expected)
        torch.manual_seed(0)
        assert torch.equal(igt.attention(x, x, x, dropout_p=0.5), drawn)


def test_faults_name_the_function_that_was_called():
    x, index = sample(3, 4, device="cuda"), torch.tensor([[0, 9]], device="cuda")
    for message, call in (
        ("gather: index has 9", lambda: igt.gather(x, 1, index)),
        ("take_along_dim: indices has 9", lambda: igt.take_along_dim(x, index.expand(3, 2), 1)),
        ("scatter_add: index has 9", lambda: igt.scatter_add(x, 1, index, x)),
        ("index_select: index has 9", lambda: igt.index_select(x, 0, index[0])),
        ("index_add: index has 9", lambda: igt.index_add(x, 0, index[0], x[:2])),
        ("embedding: input has 9", lambda: igt.embedding(index, x)),
    ):
        call()
        with pytest.raises(ig.IndexOutOfRangeError, match=f"^{message} at flat position"):
            ig.check()
