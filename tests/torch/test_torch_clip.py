"""igt.clip_grad_norm_ and get_total_norm: the reference's bits, any order and number of ranks, torch's values."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from test_torch_optim import NUMPY, bits, flavoured, to_torch  # noqa: E402

import isograd as ig  # noqa: E402
import isograd.torch as igt  # noqa: E402
from isograd.errors import InvalidProblemError, NonFiniteGradientError, UnsupportedError  # noqa: E402
from isograd.optimizers import norm_reference as ref  # noqa: E402

SHAPES = ((300, 70), (7,), (), (0, 4), (40_001,))
FLAVOURS = ("normal", "extreme", "subnormal", "special")


def drawn(flavour, dtype, shapes=SHAPES, seed=0):
    rng = np.random.default_rng([seed, len(flavour)])
    return [flavoured(rng, shape, flavour, NUMPY[dtype]) for shape in shapes]


def parameters(gradients):
    params = [torch.nn.Parameter(torch.zeros_like(to_torch(g))) for g in gradients]
    for p, g in zip(params, gradients, strict=True):
        p.grad = to_torch(g)
    return params


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_the_bits_of_the_reference(dtype, kind):
    for flavour in FLAVOURS:
        arrays = drawn(flavour, dtype)
        params = parameters(arrays)
        norm = ref.total_norm(arrays, kind == 2.0)
        assert bits(igt.get_total_norm([p.grad for p in params], kind)) == bits(norm), flavour
        assert bits(igt.clip_grad_norm_(params, 0.5, kind)) == bits(norm), flavour
        factor = ref.clip_factor(norm, 0.5)
        for p, g in zip(params, arrays, strict=True):
            right = g if factor == 1 else ref.clipped(g, factor)
            assert bits(p.grad) == bits(right), (flavour, g.shape)


def test_neither_order_nor_threads_nor_layout_change_a_bit(restore_threads):
    arrays = drawn("normal", "float32")
    base = bits(igt.get_total_norm([to_torch(g) for g in arrays]))
    rng = np.random.default_rng(0)
    for threads in (1, 3):
        ig.set_num_threads(threads)
        moved = [to_torch(rng.permutation(g.reshape(-1))) for g in arrays]
        assert bits(igt.get_total_norm(moved[::-1])) == base
    strided = [torch.stack([t, t], -1)[..., 0] if t.dim() else t for t in map(to_torch, arrays)]
    assert bits(igt.get_total_norm(strided)) == base
    params = parameters(arrays)
    for p, t in zip(params, strided, strict=True):
        p.grad = t
    igt.clip_grad_norm_(params, 0.1)
    other = parameters(arrays)
    igt.clip_grad_norm_(other, 0.1)
    assert [bits(p.grad) for p in params] == [bits(p.grad) for p in other]


def test_near_the_exact_norm_and_torch():
    """At most 1.5 ulp for sums of so many squares: half an ulp of each square, sum and root at half weight."""
    for seed in range(5):
        arrays = drawn("normal", "float32", seed=seed)
        exact = np.sqrt(sum(np.sum(g.astype(np.longdouble) ** 2) for g in arrays))
        norm = igt.get_total_norm(map(to_torch, arrays))
        assert abs(norm.item() - exact) <= 1.5 * np.spacing(np.float32(exact))
    ours, theirs = parameters(arrays), parameters(arrays)
    torch.testing.assert_close(
        igt.clip_grad_norm_(ours, 1.0), torch.nn.utils.clip_grad_norm_(theirs, 1.0), rtol=1e-6, atol=0
    )
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=0)


def test_types_may_differ():
    arrays = [drawn("normal", dtype, ((50,),))[0] for dtype in NUMPY]
    norm = igt.get_total_norm([to_torch(g) for g in arrays])
    assert norm.dtype is torch.float64
    assert bits(norm) == bits(ref.total_norm(arrays))
    params = parameters(arrays)
    igt.clip_grad_norm_(params, 1e-3)
    for p, g in zip(params, arrays, strict=True):
        assert bits(p.grad) == bits(ref.clipped(g, ref.clip_factor(ref.total_norm(arrays), 1e-3)))


def test_what_does_not_exceed_the_norm_stays():
    p = parameters([np.array([3.0, -0.0, 4.0], np.float32)])[0]
    before = p.grad.clone()
    assert igt.clip_grad_norm_(p, 10.0).item() == 5
    assert bits(p.grad) == bits(before)
    assert igt.clip_grad_norm_([p], float("inf"), "inf").item() == 4
    assert igt.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0).item() == 0
    assert igt.clip_grad_norm_([], 1.0).item() == 0


def test_what_is_refused():
    p = parameters([np.array([np.inf, 1.0], np.float32)])[0]
    before = bits(p.grad)
    with pytest.raises(NonFiniteGradientError, match="clip_grad_norm_: the total norm is inf"):
        igt.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    with pytest.raises(UnsupportedError, match=r"clip_grad_norm_: norm_type is 1.0; accepted: 2 and inf"):
        igt.clip_grad_norm_([p], 1.0, 1.0)
    with pytest.raises(InvalidProblemError, match="clip_grad_norm_: max_norm is -1; expected a number of at least 0"):
        igt.clip_grad_norm_([p], -1)
    with pytest.raises(UnsupportedError, match=r"get_total_norm: tensors\[0\] is sparse_coo; accepted: dense"):
        igt.get_total_norm(torch.ones(2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"get_total_norm: tensors\[1\] has dtype int64"):
        igt.get_total_norm([torch.ones(2), torch.ones(2, dtype=torch.int64)])
    with pytest.raises(InvalidProblemError, match="get_total_norm: tensors is int"):
        igt.get_total_norm(3)
    assert bits(p.grad) == before


def digest(tmp_path, ranks):
    environment = os.environ | {
        "PYTHONPATH": str(Path(ig.__file__).parents[1]), "OMP_NUM_THREADS": "1", "ISOGRAD_NUM_THREADS": "1"
    }  # fmt: skip
    script, store = Path(__file__).parent / "clip_ranks.py", tmp_path / f"store-{ranks}"
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(ranks), str(store)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        found = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * ranks, found
    return found[0][0].strip()


@pytest.mark.thorough
@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="Gloo")
def test_sharded_parameters_have_the_same_bits_on_any_number_of_ranks(tmp_path):
    """Norms, clipped gradients, parameters, moments and master weights after three steps."""
    assert len({digest(tmp_path, ranks) for ranks in (1, 2, 4)}) == 1
