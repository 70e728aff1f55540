"""The bits of a row: the same on every run, with any number of threads, in any batch, layout and packing."""

import numba
import numpy as np
import pytest
from attention_problems import FLAVOURS, HEADS, make, run, stored

import isograd as ig
from isograd.flash_attention import numba_product
from isograd.numerics.numba_memory import pointer


def raw(results):
    o, lse, gradients = results
    return [np.ascontiguousarray(x).tobytes() for x in (o, lse, *gradients) if x is not None]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_threads_and_repetitions(flavour, restore_threads):
    p = make(np.random.default_rng(0), flavour, "float32", q_length=200, k_length=300)
    ig.set_num_threads(1)
    first = raw(run(p, dlse=True))
    for threads in (2, 3, 7, 2):
        ig.set_num_threads(threads)
        assert raw(run(p, dlse=True)) == first


def test_both_ways_of_the_backward_have_the_same_bits(restore_threads):
    """One head on one thread takes all gradients from one pass, on several threads dq from a pass of its own."""
    for heads in HEADS:
        p = make(np.random.default_rng(1), "causal", "float32", 1, heads, 300, 400, 64, 72)
        ig.set_num_threads(1)
        one = raw(run(p))
        ig.set_num_threads(64)
        assert raw(run(p)) == one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 7), "softcap": 2.0}])
def test_alone_in_a_batch_and_packed(dtype, options):
    """Eight sequences of their own lengths: alone, packed one after the other, and one of them in a batch of eight."""
    rng = np.random.default_rng(2)
    q_lengths, k_lengths = [1, 64, 0, 113, 200, 65, 128, 30], [70, 64, 50, 255, 0, 129, 128, 300]
    heads, d, e = (4, 2), 40, 64
    starts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (q_lengths, k_lengths)]
    q, do = (stored(rng.standard_normal((1, heads[0], sum(q_lengths), n)), dtype) for n in (d, e))
    k, v = (stored(rng.standard_normal((1, heads[1], sum(k_lengths), n)), dtype) for n in (d, e))
    packing = {"cu_seqlens": tuple(starts), **options}
    o, lse = ig.attention(q, k, v, return_lse=True, **packing)
    packed = ig.attention_backward(do, q, k, v, o, lse, **packing)
    for n in range(8):
        i, j = slice(*starts[0][n : n + 2]), slice(*starts[1][n : n + 2])
        mine = [x[:, :, part] for x, part in ((do, i), (q, i), (k, j), (v, j))]
        alone_o, alone_lse = ig.attention(*mine[1:], return_lse=True, **options)
        alone = ig.attention_backward(*mine, alone_o, alone_lse, **options)
        expected = [alone_o, alone_lse, *alone[:3]]
        found = [o[:, :, i], lse[:, :, i], packed.dq[:, :, i], packed.dk[:, :, j], packed.dv[:, :, j]]
        assert [x.tobytes() for x in found] == [x.tobytes() for x in expected], n
        batch = [np.concatenate([stored(rng.standard_normal((7, *x.shape[1:])), dtype), x]) for x in mine]
        batch_o, batch_lse = ig.attention(*batch[1:], return_lse=True, **options)
        gradients = ig.attention_backward(*batch, batch_o, batch_lse, **options)
        found = [x[7:] for x in (batch_o, batch_lse, *gradients[:3])]
        assert [x.tobytes() for x in found] == [x.tobytes() for x in expected], n


def test_longer_causal_sequences_keep_the_rows_before():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 2, 300, 64)).astype(np.float32) for _ in range(3))
    whole = ig.attention(q, k, v, causal=True)
    for length in (1, 63, 64, 65, 128, 129, 200):
        part = ig.attention(*(x[:, :, :length] for x in (q, k, v)), causal=True)
        assert part.tobytes() == whole[:, :, :length].tobytes()


def test_dropout_depends_on_sequence_head_and_positions_alone(restore_threads):
    """A packed sequence drops what the same sequence of a batch drops."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((3, 2, 100, 16)).astype(np.float32) for _ in range(3))
    options = {"dropout_p": 0.4, "seed": 2**64 - 1, "causal": True}
    batch = ig.attention(q, k, v, **options)
    ends = np.array([0, 100, 200, 300], np.int32)
    flat = [x.transpose(1, 0, 2, 3).reshape(1, 2, 300, 16) for x in (q, k, v)]
    packed = ig.attention(*flat, cu_seqlens=(ends, ends), **options)
    assert packed.reshape(2, 3, 100, 16).transpose(1, 0, 2, 3).tobytes() == batch.tobytes()
    assert not np.array_equal(batch, ig.attention(q, k, v, **{**options, "seed": 2**64 - 2}))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_layouts_and_strides(dtype):
    p = make(np.random.default_rng(5), "bias and mask", dtype)
    expected = raw(run(p))
    order = (0, 2, 1, 3)
    rows = [np.ascontiguousarray(x.transpose(order)) for x in (p.do, p.q, p.k, p.v)]
    o, lse = ig.attention(*rows[1:], return_lse=True, layout="BLHD", **p.arguments)
    g = ig.attention_backward(*rows, o, lse, layout="BLHD", **p.arguments)
    assert o.flags.c_contiguous
    assert g.dq.flags.c_contiguous
    back = [o.transpose(order), lse, *(x.transpose(order) for x in g[:3]), g.dbias]
    assert [np.ascontiguousarray(x).tobytes() for x in back] == expected

    def spread(x):
        """The same values with gaps, backwards, and with the last axis apart."""
        base = np.zeros((x.shape[0], x.shape[1] * 2, x.shape[2] + 3, x.shape[3] * 2), x.dtype)
        view = base[:, ::2, ::-1, ::2][:, :, : x.shape[2]]
        view[...] = x
        return view

    arguments = {**p.arguments, "bias": spread(p.inputs.bias), "mask": spread(p.inputs.mask)}
    do, q, k, v = (spread(x) for x in (p.do, p.q, p.k, p.v))
    out = spread(np.zeros_like(p.do))
    o, lse = ig.attention(q, k, v, return_lse=True, out=out, **arguments)
    assert o is out
    g = ig.attention_backward(do, q, k, v, spread(o), lse, **arguments)
    assert [np.ascontiguousarray(x).tobytes() for x in (o, lse, *g[:4])] == expected
    zero = np.broadcast_to(p.do[:, :, :1, :1], p.do.shape)  # what a sum hands back
    g = ig.attention_backward(zero, p.q, p.k, p.v, o, lse, **p.arguments)
    right = ig.attention_backward(np.ascontiguousarray(zero), p.q, p.k, p.v, o, lse, **p.arguments)
    assert raw((o, lse, g)) == raw((o, lse, right))


def test_broadcast_operands_are_those_of_the_full_size():
    p = make(np.random.default_rng(6), "bias of heads and keys", "float32")
    full = p._replace(inputs=p.inputs._replace(bias=np.broadcast_to(p.inputs.bias, (2, 4, 70, 150))))
    assert raw(run(p))[:5] == raw(run(full))[:5]


# --- the product -----------------------------------------------------------------------------------------------------
def test_products_do_not_depend_on_registers():
    """The chains of a product are the same for every shape of the registers, and those of its definition."""
    rng, dtype = np.random.default_rng(7), np.float32
    rows, n, columns, width = 16, 150, 80, 16
    a, b = rng.standard_normal((rows, n)).astype(dtype), rng.standard_normal((n, columns)).astype(dtype)
    start, factors = rng.standard_normal((rows, columns)).astype(dtype), rng.standard_normal(rows).astype(dtype)
    like = dtype(0)
    found = []
    for shape in ((8, 2), (4, 1)):
        outputs = [start.copy() for _ in range(3)]
        for function, out in zip(numba_product.products(shape), outputs, strict=True):

            @numba.njit
            def run_product(a, b, c, factors, function=function):
                function(
                    *(pointer(a, like), n, 1, rows, pointer(b, like), width, columns, columns, n),
                    *(pointer(c, like), columns, pointer(factors, like)),
                )

            run_product(*(x.ctypes.data for x in (a, b, out, factors)))
        found.append([x.tobytes() for x in outputs])
        for out, right in zip(outputs, (a @ b, start + a @ b, start * factors[:, None] + a @ b), strict=True):
            assert np.allclose(out, right, rtol=1e-3, atol=1e-3)
    assert found[0] == found[1]


@pytest.mark.thorough
def test_bits_do_not_depend_on_vector_instructions(run_python, tmp_path):
    code = """
        import hashlib, numpy as np, isograd as ig
        q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 150, 40)).astype(np.float32)
        results = ig.attention(q, k, v, causal=True, softcap=3.0, dropout_p=0.1, seed=1, return_lse=True)
        print(hashlib.sha256(b"".join(x.tobytes() for x in results)).hexdigest())
    """
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    assert run_python(code, **generic) == run_python(code)
    assert list(tmp_path.rglob("*.nbc")), "nothing was compiled anew"
