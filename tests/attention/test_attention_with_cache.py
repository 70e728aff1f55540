"""Attention over a cache: rows have the bits that they have in the forward pass of the whole sequence."""

import numpy as np
import pytest
from cached_sequences import NUMPY, Shape, cached, paged, same, whole
from choices import thinned

import isograd as ig
from isograd.flash_attention import reference

OPTIONS = {
    "plain": {},
    "window": {"window": (37, None)},
    "softcap": {"softcap": 2.0, "scale": 0.3},
    "window, softcap": {"window": (70, None), "softcap": 1.5},
}
KERNELS = [(None, "float32"), (None, "bfloat16"), ("order_free", "bfloat16"), (None, "float64"), (None, "float16")]
SHAPE = Shape((300, 129, 0, 40))


def forward(w, **options):
    """(o, lse) of each sequence by itself."""
    given = {"causal": True, "sinks": w.sinks, "return_lse": True, **options}
    return [ig.attention(q, k, v, **given) for q, k, v in zip(w.q, w.k, w.v, strict=True)]


def with_cache(arrays, **options):
    given = {name: arrays[name] for name in ("block_table", "sinks") if name in arrays}
    found = arrays["q"], arrays["k"], arrays["v"], arrays["cache_seqlens"]
    return ig.attention_with_cache(*found, return_lse=True, **given, **options)


@pytest.mark.parametrize(
    ("kernel", "option", "sinks"), thinned(3, KERNELS, OPTIONS, [False, True]), ids=lambda x: str(x).replace("/", " ")
)
def test_rows_have_the_bits_of_the_forward_pass(kernel, option, sinks):
    preference, dtype = kernel
    w, options = whole(SHAPE, dtype, sinks), OPTIONS[option] | {"preference": preference}
    expected = forward(w, **options)
    for rows, lengths in ((1, [300, 128, 0, 1]), (4, [257, 129, 0, 3]), (70, [192, 65, 0, 40])):
        arrays = cached(w, lengths, rows, 330)
        assert same(expected, with_cache(arrays, **options), arrays), (rows, lengths)
        for page_size in (1, 16, 48):
            arrays = paged(w, lengths, rows, page_size)
            assert same(expected, with_cache(arrays, **options), arrays), (rows, lengths, page_size)


@pytest.mark.parametrize(("preference", "dtype"), KERNELS[:3])
def test_a_sequence_that_grows_by_a_token_at_a_time(preference, dtype):
    w = whole(Shape((270,), 2, 1, 16, 16), dtype)
    expected = forward(w, preference=preference)
    found = []
    for length in range(1, 271):
        arrays = cached(w, [length], 1, 270) if length % 2 else paged(w, [length], 1, 8, seed=length)
        found.append(with_cache(arrays, preference=preference))
    for x, y in zip(expected[0], zip(*found, strict=True), strict=True):
        assert np.concatenate(y, 2).tobytes() == x.tobytes()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("preference", "dtype"), KERNELS[:3])
def test_any_number_of_threads_and_heads(preference, dtype, groups):
    w = whole(Shape((200, 65), 2 * groups, 2, 64, 64), dtype)
    expected = forward(w, preference=preference)
    before = ig.get_num_threads()
    try:
        for threads in (1, 2):
            ig.set_num_threads(threads)
            arrays = paged(w, [200, 65], 3, 16)
            assert same(expected, with_cache(arrays, preference=preference), arrays)
    finally:
        ig.set_num_threads(before)


@pytest.mark.parametrize(("preference", "dtype"), KERNELS[:3])
def test_permuted_pages_and_strides_leave_no_trace(preference, dtype):
    w = whole(Shape((90, 33)), dtype)
    arrays = paged(w, [90, 33], 2, 16, seed=0)
    expected = with_cache(arrays, preference=preference)
    other = with_cache(paged(w, [90, 33], 2, 16, seed=1), preference=preference)
    turned = arrays | {name: arrays[name].swapaxes(1, 2) for name in "qkv"}
    layout = with_cache(turned, preference=preference, layout="BLHD")
    inner = arrays | {name: np.repeat(arrays[name], 2, -1)[..., ::2] for name in "qkv"}
    strides = with_cache(inner, preference=preference)
    for x, y in ((other, expected), (strides, expected), ((layout[0].swapaxes(1, 2), layout[1]), expected)):
        assert all(np.ascontiguousarray(a).tobytes() == b.tobytes() for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_that_vanish_leave_no_sign(dtype):
    """A result that fades to -0 and the products of 0 with later values, which are added in the whole pass alone."""
    q, k, v = (np.zeros((1, 1, 200, 16), NUMPY[dtype]) for _ in range(3))
    q[..., 0], k[0, 0, 130, 0], v[0, 0, :128] = 16, 20, -1e-39
    expected = ig.attention(q, k, v, causal=True)
    assert not expected[0, 0, 130].any()
    for length in (128, 130, 131, 132):
        o = ig.attention_with_cache(q[:, :, length - 1 : length], k, v, np.array([length], np.int32))
        assert o.tobytes() == expected[:, :, length - 1 : length].tobytes()


def test_values_are_those_of_the_definition():
    w = whole(Shape((150, 33)), "float64", sinks=True)
    arrays = paged(w, [150, 33], 5, 16)
    options = ig.AttentionOptions(True, window=(40, None), softcap=2.0)
    found = [arrays[name] for name in ("q", "k", "v", "cache_seqlens")]

    def oracle(q, k, v, options, **rest):
        return reference.oracle_attention(q, k, v, options, reference.inputs_of(rest))

    expected = reference.over_cache(oracle, *found, options, arrays["block_table"], sinks=w.sinks)
    for x, y in zip(with_cache(arrays, window=(40, None), softcap=2.0), expected, strict=True):
        np.testing.assert_allclose(x, y, 1e-12, 1e-12)


def test_out_is_filled_and_nothing_is_written_before_a_check():
    w = whole(Shape((40, 20)), "float32")
    arrays = paged(w, [40, 20], 1, 16)
    expected, _ = with_cache(arrays)
    q, k, v, lengths, table = (arrays[name] for name in ("q", "k", "v", "cache_seqlens", "block_table"))
    out = np.full(expected.shape, 7, np.float32)
    assert ig.attention_with_cache(q, k, v, lengths, block_table=table, out=out) is out
    assert out.tobytes() == expected.tobytes()
    out[...] = 7
    for wrong in (-1, len(k), 1 << 30):
        bad = table.copy()
        bad[1, 1] = wrong
        with pytest.raises(
            ig.IndexOutOfRangeError, match=rf"attention_with_cache: block_table has {wrong} at \(1, 1\)"
        ):
            ig.attention_with_cache(q, k, v, lengths, block_table=bad, out=out)
    for wrong in (-1, table.shape[1] * 16 + 1):
        bad = np.array([40, wrong], np.int32)
        with pytest.raises(ig.InvalidProblemError, match=f"attention_with_cache: cache_seqlens has {wrong} at 1"):
            ig.attention_with_cache(q, k, v, bad, block_table=table, out=out)
    assert (out == 7).all()
    with pytest.raises(ig.IndexOutOfRangeError, match="block_table"):
        ig.attention_with_cache(q, k[:0], v[:0], lengths, block_table=table)


@pytest.mark.parametrize("preference", [None, "order_free"])
def test_empty_problems(preference):
    def empty(batch, rows, capacity, pages=None):
        q, k = (np.zeros((batch, 2, n, 16), NUMPY["bfloat16"]) for n in (rows, capacity))
        lengths = np.zeros(batch, np.int32)
        if pages is None:
            return ig.attention_with_cache(q, k, k, lengths, return_lse=True, preference=preference)
        k, table = np.zeros((pages, 2, 16, 16), k.dtype), np.zeros((batch, capacity), np.int32)
        given = {"block_table": table, "return_lse": True, "preference": preference}
        return ig.attention_with_cache(q, k, k, lengths, **given)

    for batch, rows in ((0, 1), (2, 0)):
        assert empty(batch, rows, 4)[0].shape == (batch, 2, rows, 16)
    for sizes in ((2, 1, 0), (2, 1, 4), (2, 1, 0, 0), (2, 1, 3, 0), (2, 3, 3, 5)):
        o, lse = empty(*sizes)
        assert not o.any()
        assert (lse == -np.inf).all()


def test_a_kernel_without_a_cache_is_not_replaced_by_one_with_other_bits():
    class Other(ig.Kernel):
        name = backend = "other"

        def sku(self, descriptor):
            return ig.AttentionPlan.select(descriptor, preference="numba").sku

        def launch(self, descriptor, arguments, workspace, stream):
            raise AssertionError

    x, lengths = np.zeros((1, 1, 4, 16), np.float32), np.array([4], np.int32)
    ig.register_kernel("attention", "cpu", "float32", Other(), priority=5)
    try:
        with pytest.raises(ig.UnsupportedError, match=r"takes the kernel 'other' here, which has no cache.*'numba'"):
            ig.attention_with_cache(x[:, :, 3:], x, x, lengths)
        ig.attention_with_cache(x[:, :, 3:], x, x, lengths, preference="numba")
        with ig.prefer("numba"):
            ig.attention_with_cache(x[:, :, 3:], x, x, lengths)
    finally:
        ig.unregister_kernel("attention", "cpu", "float32", "other")


def test_there_is_no_gradient():
    x, lengths = np.zeros((1, 1, 4, 16), np.float32), np.array([4], np.int32)
    leaf = ig.Tape().leaf(x)
    with pytest.raises(ig.UnsupportedError, match="attention_with_cache: there is a tape variable"):
        ig.attention_with_cache(leaf, x, x, lengths)
