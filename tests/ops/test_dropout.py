"""What is special about dropout: whose mask it is, and gradients without a mask that is kept."""

import ml_dtypes
import numpy as np
import pytest

import isograd as ig

X = np.random.default_rng(0).standard_normal((12, 37)).astype(np.float32) + 4  # nothing that is 0 by itself


def test_a_part_of_a_batch_has_the_mask_of_the_whole():
    whole = ig.dropout(X, 0.3, seed=2**40 + 7, offset=5)
    for size in (1, 3, 4):
        parts = [
            ig.dropout(X[i : i + size], 0.3, seed=2**40 + 7, offset=5 + 37 * i) for i in range(0, X.shape[0], size)
        ]
        assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert not np.array_equal(ig.dropout(X, 0.3, seed=2**40 + 8, offset=5) == 0, whole == 0)
    assert not np.array_equal(ig.dropout(X, 0.3, seed=2**40 + 7) == 0, whole == 0)


def test_dtypes_and_layouts_have_one_mask():
    mask = ig.dropout(X, seed=3) == 0
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        assert np.array_equal(ig.dropout(X.astype(dtype), seed=3) == 0, mask)
    assert np.array_equal(ig.dropout(np.asfortranarray(X)[::-1], seed=3) == 0, mask)


def test_numbers_count_modulo_two_to_the_64():
    start = 2**64 - 9
    crossing, after = ig.dropout(X, seed=3, offset=start), ig.dropout(X, seed=3)
    assert np.array_equal(crossing.reshape(-1)[9:] == 0, after.reshape(-1)[:-9] == 0)


def test_how_many_are_dropped_and_what_is_left():
    ones = np.ones(200_000, np.float32)
    for p in (0.1, 0.5, 0.93):
        y = ig.dropout(ones, p, seed=11)
        assert abs((y == 0).mean() - p) < 5 * (p * (1 - p) / ones.size) ** 0.5
        assert set(np.unique(y)) == {np.float32(0), np.float32(1 / (1 - p))}
    neighbours = ig.dropout(ones, 0.5, seed=11).reshape(-1, 4) == 0  # the words of one block
    assert np.abs(np.corrcoef(neighbours.T) - np.eye(4)).max() < 0.03
    assert ig.dropout(X, 0.0, seed=1).tobytes() == X.tobytes()
    special = np.array([np.nan, np.inf, -1.0, -0.0] * 8, np.float32)
    assert ig.dropout(special, 1.0, seed=1).tobytes() == bytes(4 * 32)
    half = ig.dropout(special, 0.5, seed=1)
    gone = ig.dropout(np.ones(32, np.float32), 0.5, seed=1) == 0
    assert 0 < gone.sum() < 32
    assert half[gone].tobytes() == bytes(4 * gone.sum())
    assert np.array_equal(half[~gone], 2 * special[~gone], equal_nan=True)


# --- torch -----------------------------------------------------------------------------------------------------------
def test_gradients_go_through_the_same_mask():
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    x = torch.from_numpy(X).requires_grad_()
    y = igt.dropout(x, 0.3, seed=5, offset=2)
    assert y.detach().numpy().tobytes() == ig.dropout(X, 0.3, seed=5, offset=2).tobytes()
    dy = torch.randn(X.shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert torch.equal(dx, igt.dropout(dy, 0.3, seed=5, offset=2))
    (again,) = torch.autograd.grad(dx, dy, torch.ones_like(dx))
    assert torch.equal(again, igt.dropout(torch.ones_like(dx), 0.3, seed=5, offset=2))
    assert igt.dropout(x, 0.3, False, seed=5) is x
    assert igt.dropout(torch.tensor(2.0), 0.0, seed=5).item() == 2.0


def test_members_of_a_batch_have_the_mask_that_they_have_alone():
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    x = torch.from_numpy(X)
    alone = torch.stack([igt.dropout(row, 0.3, seed=5, offset=2) for row in x])
    assert torch.equal(torch.func.vmap(lambda row: igt.dropout(row, 0.3, seed=5, offset=2))(x), alone)


def test_the_tape_drops_alike():
    tape = ig.Tape()
    x = tape.leaf(X)
    y = ig.dropout(x, 0.3, seed=5)
    dy = np.arange(X.size, dtype=np.float32).reshape(X.shape) + 1
    assert tape.backward(y, dy)[x].tobytes() == ig.dropout(dy, 0.3, seed=5).tobytes()
