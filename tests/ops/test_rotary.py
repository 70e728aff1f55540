"""What is special about rotary: the bounds under attack, torch's spelling of tables and positions, and derivatives."""

import numpy as np
import pytest

import isograd as ig
from isograd.cli.check import worst_error
from isograd.ops import OPERATIONS


def attacks(dtype):
    """(x, cos, sin): products that cancel, subnormal results, and what overflows."""
    rng = np.random.default_rng(7)
    least, most = {"float16": (-24, 15), "float64": (-1070, 1020)}.get(dtype, (-148, 126))
    angle = rng.uniform(0, 2 * np.pi, (200, 10))
    work = np.float64 if dtype == "float64" else np.float32
    yield rng.standard_normal((200, 20)), np.cos(angle).astype(work), np.sin(angle).astype(work)
    first, cos, sin = rng.standard_normal((200, 10)), np.cos(angle).astype(work), np.sin(angle).astype(work)
    yield np.concatenate([first, first * cos / sin], 1), cos, sin
    x = rng.choice([-1, 1], (200, 20)) * np.exp2(rng.uniform(least, most, (200, 20)))
    yield x, cos, sin


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_bounds_hold_and_are_not_idle(dtype, interleaved):
    worst = {"rotary": 0.0, "rotary_backward": 0.0}
    for wide, cos, sin in attacks(dtype):
        with np.errstate(all="ignore"):
            x = wide.astype(dtype)
        if interleaved:
            x = np.ascontiguousarray(x.reshape(200, 2, 10).swapaxes(1, 2).reshape(200, 20))
        for name in worst:
            op, arrays = OPERATIONS[name], (x, cos, sin)
            got = getattr(ig, name)(*arrays, interleaved)
            right, bounds = op.oracle(*arrays, interleaved), op.bound(dtype, *arrays, interleaved)
            worst[name] = max(worst[name], worst_error(got, right, bounds))
    assert all(0.4 < value <= 1 for value in worst.values()), worst


def test_rotations_undo_one_another_and_only_differences_of_positions_matter():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 64))
    table = [np.repeat(t.astype(np.float64), 1, 0) for t in ig.rotary_table(40, 64)]

    def at(x, position, interleaved):
        return ig.rotary(x, *[t[position : position + 1] for t in table], interleaved)

    for interleaved in (False, True):
        near, far = ((at(q, p, interleaved) * at(k, p + 7, interleaved)).sum() for p in (0, 30))
        assert abs(near - far) < 1e-6
        assert abs(near - (q * k).sum()) > 1e-3
        there = at(q, 9, interleaved)
        back = ig.rotary_backward(there, table[0][9:10], table[1][9:10], interleaved)
        np.testing.assert_allclose(back, q, atol=1e-6)


def test_what_is_not_rotated_is_copied_and_a_head_shares_its_table():
    x = np.random.default_rng(1).standard_normal((2, 3, 5, 20)).astype(np.float32)
    cos, sin = (np.broadcast_to(t, (2, 3, 5, 6)) for t in ig.rotary_table(5, 12))
    y = ig.rotary(x, cos, sin)
    assert y[..., 12:].tobytes() == x[..., 12:].tobytes()
    assert y.tobytes() == ig.rotary(x, cos.copy(), sin.copy()).tobytes()
    assert y[1, 2].tobytes() == ig.rotary(x[1, 2], cos[0, 0], sin[0, 0]).tobytes()
    with pytest.raises(ig.InvalidProblemError, match="rotary: cos has 11 elements a row"):
        ig.rotary(x, np.ones((2, 3, 5, 11), np.float32), np.ones((2, 3, 5, 11), np.float32))


# --- torch -----------------------------------------------------------------------------------------------------------
def test_tables_positions_and_layouts_of_torch():
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = map(torch.from_numpy, ig.rotary_table(9, 16))
    rows = [t[:5].expand(2, 3, 5, 8) for t in (cos, sin)]
    y = igt.rotary(x, cos, sin)
    assert torch.equal(y, ig.rotary(x, *rows))
    assert torch.equal(y, igt.rotary(x, cos, sin, torch.arange(5)))
    assert torch.equal(y, igt.rotary(x, cos, sin, torch.arange(5).repeat(2, 1)))
    assert torch.equal(y, igt.rotary(x.transpose(1, 2), cos, sin, dim=-3).transpose(1, 2))
    assert torch.equal(y, igt.rotary(x.transpose(1, 2).contiguous(), cos, sin, dim=1).transpose(1, 2))
    assert torch.equal(y[:, :, 2:], igt.rotary(x[:, :, 2:], cos, sin, torch.arange(2, 5)))
    each = torch.tensor([[0, 1, 2, 3, 4], [8, 0, 3, 3, 7]])
    second = igt.rotary(x[1:], cos[each[1]], sin[each[1]])
    assert torch.equal(igt.rotary(x, cos, sin, each), torch.cat([y[:1], second]))
    assert torch.equal(igt.rotary(x, cos[each], sin[each]), igt.rotary(x, cos, sin, each))
    assert torch.equal(igt.rotary(x, cos[None, :5], sin[None, :5]), y)
    assert torch.equal(igt.rotary(x.movedim(2, 0), cos[None, :5], sin[None, :5], dim=0), y.movedim(2, 0))
    half = [t.bfloat16() for t in (cos, sin)]
    assert torch.equal(igt.rotary(x, *half), igt.rotary(x, *[t.float() for t in half]))

    turned = torch.cat([-x[..., 8:], x[..., :8]], -1)  # as transformers does
    torch.testing.assert_close(y, x * torch.cat([rows[0]] * 2, -1) + turned * torch.cat([rows[1]] * 2, -1))
    complex_rows = torch.view_as_complex(x.reshape(2, 3, 5, 8, 2)) * torch.complex(*rows)
    torch.testing.assert_close(igt.rotary(x, cos, sin, interleaved=True), torch.view_as_real(complex_rows).flatten(-2))


def test_errors_of_tables_and_positions():
    torch = pytest.importorskip("torch", reason="needs torch")
    import isograd.torch as igt

    x, (cos, sin) = torch.ones(2, 3, 5, 16), map(torch.from_numpy, ig.rotary_table(9, 16))
    for args, options, words in (
        ((x, cos[:4], sin[:4]), {}, "cos has shape .* with P at least 5"),
        ((x, cos, sin[0]), {}, "sin has shape"),
        ((x, cos, sin, torch.arange(4)), {}, "positions has shape"),
        ((x, cos, sin, torch.arange(5) + 6), {}, "9"),
        ((x, *[t[:2].expand(2, 2, 8) for t in (cos, sin)]), {"dim": 0}, "cos has shape"),
        ((x, cos, sin), {"dim": -1}, "dim is -1"),
        ((x, cos, sin), {"dim": 7}, "dim is 7"),
        ((x[0, 0, 0], cos, sin), {}, "input has shape"),
    ):
        with pytest.raises(ig.IsogradError, match=f"{words}"):
            igt.rotary(*args, **options)
    with pytest.raises(ig.UnsupportedError, match="cos requires a gradient"):
        igt.rotary(x, cos.clone().requires_grad_(), sin)
