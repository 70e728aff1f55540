"""Arguments that do not fit: an error of the library that names the operation and the argument, nothing written."""

import numpy as np
import pytest
import torch

import isograd as ig


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q, K, V = zeros(2, 4, 5, 16), zeros(2, 2, 7, 16), zeros(2, 2, 7, 24)
PACKED = [zeros(1, 2, 10, 16)] * 3


def ends(*values, dtype=np.int32):
    return np.array(values, dtype)


GOOD = ends(0, 4, 10)
INVALID, UNSUPPORTED = ig.InvalidProblemError, ig.UnsupportedError
CASES = {
    "three axes": ((Q[0], K, V), {}, INVALID, "q has shape"),
    "heads": ((zeros(2, 3, 5, 16), K, V), {}, INVALID, "q has 3 heads"),
    "heads of k and v": ((Q, K, zeros(2, 4, 7, 24)), {}, INVALID, "v has shape"),
    "batch": ((Q, zeros(1, 2, 7, 16), V), {}, INVALID, "k has shape"),
    "lengths of k and v": ((Q, K, zeros(2, 2, 8, 24)), {}, INVALID, "v has shape"),
    "dimensions of q and k": ((Q, zeros(2, 2, 7, 24), V), {}, INVALID, "k has shape"),
    "head dimension 12": ((Q[..., :12], K[..., :12], V), {}, UNSUPPORTED, "of q and k is 12"),
    "head dimension 257": ((Q, K, zeros(2, 2, 7, 257)), {}, UNSUPPORTED, "of v is 257"),
    "head dimension 264": ((zeros(1, 1, 5, 264),) * 3, {}, UNSUPPORTED, "is 264"),
    "head dimension 20": ((zeros(1, 1, 5, 20),) * 3, {}, UNSUPPORTED, "is 20"),
    "head dimension 0": ((zeros(1, 1, 5, 0),) * 3, {}, UNSUPPORTED, "is 0"),
    "integers": ((Q.astype(np.int32), K, V), {}, UNSUPPORTED, "q has dtype int32"),
    "two dtypes": ((Q, K.astype(np.float16), V), {}, INVALID, "k has dtype float16"),
    "a softcap that rounds to 0": ((Q, K, V), {"softcap": 1e-46}, INVALID, "softcap is 1e-46"),
    "a softcap beyond float32": ((Q, K, V), {"softcap": 1e39}, INVALID, r"softcap is 1e\+39"),
    "a scale beyond float32": ((Q, K, V), {"scale": 1e39}, INVALID, r"scale is 1e\+39"),
    "a scale beyond floats": ((Q, K, V), {"scale": 10**400}, INVALID, "scale is beyond"),
    "half a pair": (
        (Q, K, V),
        {"segment_ids": (zeros(2, 5, dtype=np.int32), None)},
        INVALID,
        "segment_ids of k is None",
    ),
    "layout": ((Q, K, V), {"layout": "HBLD"}, INVALID, "layout is 'HBLD'"),
    "layout of another kind": ((Q, K, V), {"layout": 1}, INVALID, "layout is 1"),
    "causal": ((Q, K, V), {"causal": 1}, INVALID, "causal is 1"),
    "alignment": ((Q, K, V), {"alignment": "left"}, INVALID, "alignment is 'left'"),
    "window": ((Q, K, V), {"window": 3}, INVALID, "window is 3"),
    "negative window": ((Q, K, V), {"window": (-1, 2)}, INVALID, "window is"),
    "window of floats": ((Q, K, V), {"window": (1.0, 2)}, INVALID, "window is"),
    "scale": ((Q, K, V), {"scale": float("nan")}, INVALID, "scale is nan"),
    "softcap": ((Q, K, V), {"softcap": -1.0}, INVALID, "softcap is -1.0"),
    "endless softcap": ((Q, K, V), {"softcap": float("inf")}, INVALID, "softcap is inf"),
    "dropout": ((Q, K, V), {"dropout_p": 1.0}, INVALID, "dropout_p is 1.0"),
    "seed": ((Q, K, V), {"dropout_p": 0.5, "seed": -1}, INVALID, "seed is -1"),
    "mask of another shape": ((Q, K, V), {"mask": np.ones((5, 5), bool)}, INVALID, "mask has shape"),
    "mask of the kv heads": ((Q, K, V), {"mask": np.ones((2, 2, 5, 7), bool)}, INVALID, "mask has shape"),
    "mask of five axes": ((Q, K, V), {"mask": np.ones((1, 1, 1, 5, 7), bool)}, INVALID, "mask has shape"),
    "mask of floats": ((Q, K, V), {"mask": np.ones((5, 7))}, UNSUPPORTED, "mask has dtype float64"),
    "bias of another shape": ((Q, K, V), {"bias": zeros(4, 5, 5)}, INVALID, "bias has shape"),
    "bias of another dtype": ((Q, K, V), {"bias": zeros(5, 7, dtype=np.float64)}, UNSUPPORTED, "bias's dtype"),
    "sinks": ((Q, K, V), {"sinks": zeros(2)}, INVALID, "sinks has shape"),
    "sinks of another dtype": ((Q, K, V), {"sinks": zeros(4, dtype=np.float16)}, UNSUPPORTED, "sinks' dtype"),
    "segment ids": ((Q, K, V), {"segment_ids": (ends(1), ends(1))}, INVALID, "q_segment_ids has shape"),
    "one segment id": ((Q, K, V), {"segment_ids": ends(1, 2, 3)}, INVALID, "segment_ids is ndarray"),
    "segment ids in int64": (
        (Q, K, V),
        {"segment_ids": (zeros(2, 5, dtype=np.int64), zeros(2, 7, dtype=np.int64))},
        INVALID,
        "q_segment_ids has dtype int64",
    ),
    "cu_seqlens that start at 1": (PACKED, {"cu_seqlens": (ends(1, 4, 10), GOOD)}, INVALID, "cu_seqlens_q starts at 1"),
    "cu_seqlens that decrease": (PACKED, {"cu_seqlens": (GOOD, ends(0, 4, 3))}, INVALID, "cu_seqlens_k decreases"),
    "negative cu_seqlens": (PACKED, {"cu_seqlens": (ends(0, -4, 3), GOOD)}, INVALID, "cu_seqlens_q decreases"),
    "cu_seqlens beyond the tokens": (PACKED, {"cu_seqlens": (ends(0, 4, 11), GOOD)}, INVALID, "there are 10 tokens"),
    "cu_seqlens of two lengths": (PACKED, {"cu_seqlens": (ends(0, 10), GOOD)}, INVALID, "cu_seqlens_k has shape"),
    "cu_seqlens without an end": (PACKED, {"cu_seqlens": (ends(), ends())}, INVALID, "cu_seqlens of q is empty"),
    "cu_seqlens in int64": (PACKED, {"cu_seqlens": (ends(0, 10, dtype=np.int64),) * 2}, INVALID, "int64"),
    "cu_seqlens and a batch": ((Q, K, V), {"cu_seqlens": (ends(0, 5), ends(0, 7))}, INVALID, "batch size 2"),
    "cu_seqlens and a mask": (PACKED, {"cu_seqlens": (GOOD, GOOD), "mask": np.ones((10, 10), bool)}, INVALID, "both"),
    "cu_seqlens and a bias": (PACKED, {"cu_seqlens": (GOOD, GOOD), "bias": zeros(10, 10)}, INVALID, "both"),
}


@pytest.mark.parametrize("case", CASES)
def test_forward(case):
    arrays, options, error, message = CASES[case]
    with pytest.raises(error, match=message) as caught:
        ig.attention(*arrays, **options)
    assert str(caught.value).startswith("attention: ")


@pytest.mark.parametrize("case", CASES)
def test_backward(case):
    arrays, options, error, _ = CASES[case]
    q, _, v = arrays
    do = zeros(*q.shape[:-1], v.shape[-1])
    with pytest.raises(error) as caught:
        ig.attention_backward(do, *arrays, do, zeros(*q.shape[:-1]), **options)
    assert str(caught.value).startswith("attention_backward: ")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"do": zeros(2, 4, 5, 16)}, "do has shape"),
        ({"o": zeros(2, 4, 5, 24, dtype=np.float16)}, "o has dtype float16"),
        ({"lse": zeros(2, 5, 4)}, "lse has shape"),
        ({"lse": zeros(2, 4, 5, dtype=np.float64)}, "lse has dtype float64"),
        ({"dlse": zeros(2, 4, 6)}, "dlse has shape"),
    ],
)
def test_arguments_of_the_backward(changed, message):
    given = {"do": zeros(2, 4, 5, 24), "q": Q, "k": K, "v": V, "o": zeros(2, 4, 5, 24), "lse": zeros(2, 4, 5)}
    ig.attention_backward(**given)
    with pytest.raises(INVALID, match=message):
        ig.attention_backward(**{**given, **changed})


def test_delta():
    for o, do, layout, error in (
        (V, V[:1], "BHLD", INVALID),
        (V, V.astype(np.float16), "BHLD", INVALID),
        (V[0], V[0], "BHLD", INVALID),
        (V, V, "LBHD", INVALID),
        (V[..., :12], V[..., :12], "BHLD", UNSUPPORTED),
        (V.astype(np.int64), V, "BHLD", UNSUPPORTED),
    ):
        with pytest.raises(error, match="attention_delta: "):
            ig.attention_delta(o, do, layout=layout)


def test_outputs_are_not_touched():
    """A refused cu_seqlens leaves the output as it was; outputs that overlap are refused."""
    out = np.full((1, 2, 10, 16), 7, np.float32)
    with pytest.raises(INVALID, match="cu_seqlens_q starts"):
        ig.attention(*PACKED, cu_seqlens=(ends(1, 4, 10), GOOD), out=out)
    assert np.all(out == 7)
    with pytest.raises(INVALID, match="attention: out overlaps q"):
        ig.attention(out, out.copy(), out, out=out)
    with pytest.raises(ig.BufferTooSmallError, match="attention: out has shape"):
        ig.attention(*PACKED, out=out[:, :1])
    with pytest.raises(INVALID, match="out is given"):
        ig.attention(ig.Tape().leaf(out), out, out, out=out)


def test_descriptors():
    fields = (1, 2, 2, 8, 8, 16, 16, "float32")
    with pytest.raises(INVALID, match="dbias is wanted without a bias"):
        ig.AttentionBackwardDescriptor(*fields, dbias=True).validated()
    with pytest.raises(INVALID, match="dsinks are wanted without sinks"):
        ig.AttentionBackwardDescriptor(*fields, dsinks=True).validated()
    with pytest.raises(INVALID, match="dlse is 1"):
        ig.AttentionBackwardDescriptor(*fields, dlse=1).validated()
    with pytest.raises(INVALID, match="segments is 1"):
        ig.AttentionDescriptor(*fields, segments=1).validated()
    with pytest.raises(UNSUPPORTED, match="dtype is 'int8'"):
        ig.AttentionDescriptor(1, 2, 2, 8, 8, 16, 16, "int8").validated()
    with pytest.raises(INVALID, match="expected a multiple"):
        ig.AttentionDescriptor(1, 2, 0, 8, 8, 16, 16, "float32").validated()


def test_a_mask_that_is_no_array():
    with pytest.raises(INVALID, match="mask is list"):
        ig.attention(Q, K, V, mask=[[True] * 7] * 5)
    with pytest.raises(INVALID, match="masked array"):
        ig.attention(Q, K, V, mask=np.ma.masked_array(np.ones((5, 7), bool)))
    with pytest.raises(UNSUPPORTED, match="mask has dtype uint8"):
        ig.attention(*(torch.from_numpy(x) for x in (Q, K, V)), mask=torch.ones(5, 7, dtype=torch.uint8))


def test_gradients_are_not_lost():
    tensors = [torch.from_numpy(x.copy()).requires_grad_() for x in (Q, K, V)]
    with pytest.raises(UNSUPPORTED, match="requires a gradient"):
        ig.attention(*tensors)
    with torch.no_grad():
        assert ig.attention(*tensors).shape == (2, 4, 5, 24)


def test_dropout_has_no_default_seed():
    o, lse = ig.attention(Q, K, V, dropout_p=0.5, seed=0, return_lse=True)
    tape = ig.Tape()
    for call in (
        lambda: ig.attention(Q, K, V, dropout_p=0.5),
        lambda: ig.attention(tape.leaf(Q), K, V, dropout_p=0.5),
        lambda: ig.attention_backward(o, Q, K, V, o, lse, dropout_p=0.5),
    ):
        with pytest.raises(ig.InvalidProblemError, match=r"dropout_p is 0.5 and seed is None; expected a seed"):
            call()
