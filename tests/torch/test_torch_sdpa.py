"""scaled_dot_product_attention of isograd.torch against torch's, in torch's own samples, and inside the switch."""

import itertools

import opinfo_samples as opinfo
import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import isograd as ig
import isograd.torch as igt

NAME = "nn.functional.scaled_dot_product_attention"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shapes, dtype=torch.float64, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes
    ]


def compare(query, key, value, *rest, **options):
    """Values and gradients beside torch's, which the same arguments in float64 give."""
    leaves = [query, key, value, *[t for t in (*rest, *options.values()) if getattr(t, "requires_grad", False)]]

    def wide(t):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            return t.detach().double().requires_grad_(t.requires_grad)
        return t

    wider = {id(t): wide(t) for t in (query, key, value, *rest, *options.values())}
    ours = igt.scaled_dot_product_attention(query, key, value, *rest, **options)
    given = [wider[id(t)] for t in (query, key, value, *rest)]
    theirs = F.scaled_dot_product_attention(*given, **{k: wider[id(t)] for k, t in options.items()})
    assert ours.dtype is query.dtype
    eps = torch.finfo(query.dtype).eps
    torch.testing.assert_close(ours.double(), theirs, rtol=4 * eps, atol=8 * eps)
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3)).to(ours.dtype)
    ours = torch.autograd.grad(ours, leaves, dy)
    theirs = torch.autograd.grad(theirs, [wider[id(t)] for t in leaves], dy.double())
    for leaf, a, b in zip(leaves, ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (leaf.dtype, leaf.shape)
        unit = max(eps, torch.finfo(leaf.dtype).eps)
        torch.testing.assert_close(a.double(), b, rtol=4 * unit, atol=16 * unit * max(1.0, float(b.abs().max())))


# --- torch's samples --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_of_torchs_samples(dtype):
    found = opinfo.sample_inputs(NAME, dtype)
    assert len(found) > 20
    for sample in found:
        if sample.kwargs["dropout_p"]:
            torch.manual_seed(0)
            first = opinfo.apply(igt.scaled_dot_product_attention, sample)
            torch.manual_seed(0)
            assert torch.equal(opinfo.apply(igt.scaled_dot_product_attention, sample), first)
            kept = opinfo.apply(igt.scaled_dot_product_attention, sample).detach().abs().sum()
            assert (first.shape, first.dtype) == (opinfo.apply(opinfo.entry(NAME), sample).shape, dtype)
            assert kept > 0
        else:
            for variant in (sample, opinfo.spread(sample)):
                # The samples' scores reach 200: half a unit of their last place is a hundred of a probability's.
                opinfo.check(igt.scaled_dot_product_attention, NAME, sample, variant, 32)


@pytest.mark.thorough
def test_first_and_second_derivatives_of_torchs_samples():
    samples = [s for s in opinfo.sample_inputs(NAME, torch.float64) if not s.kwargs["dropout_p"]]
    for sample in samples[::4]:
        leaves = opinfo.tensors_of(sample)

        def of(*given, sample=sample, leaves=leaves):
            mask = given[3] if len(leaves) > 3 else sample.kwargs.get("attn_mask")
            return igt.scaled_dot_product_attention(*given[:3], mask, is_causal=sample.kwargs["is_causal"])

        assert torch.autograd.gradcheck(of, leaves, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(of, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_there_is_an_error_where_torchs_samples_have_one():
    opinfo.check_error_inputs(igt.scaled_dot_product_attention, NAME)


# --- torch's semantics ------------------------------------------------------------------------------------------------
SHAPES = [
    ((5, 16), (7, 16), (7, 24)),
    ((3, 5, 16), (3, 7, 16), (3, 7, 8)),
    ((3, 5, 16), (2, 3, 7, 16), (1, 7, 16)),
    ((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16)),
    ((2, 3, 5, 16), (2, 1, 7, 16), (3, 7, 16)),
    ((2, 1, 2, 3, 5, 10), (4, 1, 3, 7, 10), (2, 4, 2, 3, 7, 4)),
    ((2, 3, 1, 16), (2, 3, 7, 16), (2, 3, 7, 16)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_rank_with_leading_axes_that_broadcast(shapes, is_causal):
    compare(*random(*shapes, grad=True), is_causal=is_causal)


MASKS = [(7,), (5, 7), (1, 7), (5, 1), (3, 5, 7), (3, 1, 1), (2, 1, 5, 7), (2, 3, 1, 7), (1, 1, 5, 7), (2, 3, 5, 7)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_of_every_shape(shape, dtype):
    given = random((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16), dtype=dtype, grad=True)
    full = (1,) * max(0, 2 - len(shape)) + shape  # torch's masks have two axes at least
    boolean = torch.rand(full, generator=torch.Generator().manual_seed(1)) < 0.7
    boolean[..., 0] = True
    compare(*given, boolean, scale=0.4)
    compare(*given, random(full, dtype=dtype, grad=True)[0])
    compare(*given, random(full, dtype=torch.float32, grad=True)[0])
    if shape != full:
        ours = igt.scaled_dot_product_attention(*given, boolean.reshape(shape))
        assert torch.equal(ours, igt.scaled_dot_product_attention(*given, boolean))


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 3, 5, 7), (4, 1, 1, 5, 7), (2, 1, 2, 3, 5, 7), (1, 4, 1, 1, 1, 7)])
def test_masks_of_more_than_four_axes(shape):
    given = random((2, 1, 2, 3, 5, 16), (4, 1, 3, 7, 16), (4, 1, 3, 7, 16), grad=True)
    compare(*given, random(shape, grad=True)[0])
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., 0] = True
    compare(*given, mask)


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2), (4, 1, 1), (6, 2, 3), (4, 1, 2)])
def test_grouped_heads(heads):
    q, k, v = random((2, heads[0], 5, 16), (2, heads[1], 7, 16), (2, heads[2], 7, 16), grad=True)
    compare(q, k, v, enable_gqa=True, is_causal=True)
    compare(q[0], k[0], v[0], enable_gqa=True)


def test_a_float32_mask_is_widened_for_float64():
    given = random((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16), grad=True)
    compare(*given, random((5, 7), dtype=torch.float32, grad=True)[0])


def test_causal_and_a_mask_are_both_heeded():
    q, k, v = random((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16))
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    both = mask & torch.ones(5, 7, dtype=torch.bool).tril()
    ours = igt.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    assert torch.equal(ours, igt.scaled_dot_product_attention(q, k, v, both))


def test_rows_that_see_nothing_are_zero_without_gradient():
    q, k, v = random((1, 2, 3, 16), (1, 2, 4, 16), (1, 2, 4, 16), grad=True)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    for given in (mask, torch.zeros(3, 4, dtype=torch.float64).masked_fill(~mask, -torch.inf)):
        o = igt.scaled_dot_product_attention(q, k, v, given)
        assert not o[:, :, 1].any()
        dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
        assert not dq[:, :, 1].any()
        assert all(torch.isfinite(g).all() for g in (dq, dk, dv))
    empty = igt.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0])
    assert not empty.any()
    assert igt.scaled_dot_product_attention(q[:, :, :0], k, v).shape == (1, 2, 0, 16)


def test_dropout_drops_that_share_of_the_probabilities_and_scales_the_rest():
    q, k = torch.zeros(1, 64, 64, 16), torch.zeros(1, 64, 64, 16)
    v = torch.eye(64).expand(1, 64, 64, 64)
    torch.manual_seed(0)
    o = igt.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    kept = o != 0
    torch.testing.assert_close(o[kept], torch.full_like(o[kept], 1 / 64 / 0.75))
    share = kept.double().mean()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / kept.numel()) ** 0.5


def test_arguments_that_do_not_fit():
    q, k, v = random((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16), dtype=torch.float32)
    sdpa, problem, unsupported = igt.scaled_dot_product_attention, ig.InvalidProblemError, ig.UnsupportedError
    for call, error, message in (
        (lambda: sdpa(q[0, 0, 0], k, v), problem, "query has shape .* at least 2 axes"),
        (lambda: sdpa(q[0, 0], k[0, 0], v[0, 0], enable_gqa=True), problem, "query has shape .* at least 3 axes"),
        (lambda: sdpa(q, k[:, :2], v), problem, "expected shapes that broadcast"),
        (lambda: sdpa(q, k[:, :2], v[:, :2], enable_gqa=True), problem, "query, key and value have 3, 2, 2 heads"),
        (lambda: sdpa(q, k[:, :, 1:], v), problem, "expected as many rows"),
        (lambda: sdpa(q[..., 1:], k, v), problem, "same head dimension"),
        (lambda: sdpa(q, k, v.double()), problem, "value has dtype torch.float64 and query"),
        (lambda: sdpa(q.int(), k.int(), v.int()), unsupported, "query has dtype"),
        (lambda: sdpa(*[t.repeat(1, 1, 1, 17) for t in (q, k, v)]), unsupported, "head dimension of query is 272"),
        (
            lambda: sdpa(*[t.repeat(1, 1, 1, 17)[..., :257] for t in (q, k, v)]),
            unsupported,
            "query is 257; .* 1 to 256",
        ),
        (lambda: sdpa(q, k, v, torch.zeros(5, 6)), problem, "attn_mask has shape"),
        (lambda: sdpa(q, k, v, torch.zeros(1, 1, 1, 5, 7)), problem, "attn_mask has shape"),
        (lambda: sdpa(q, k, v, torch.zeros(5, 7, dtype=torch.int32)), unsupported, "attn_mask has dtype"),
        (
            lambda: sdpa(q, k, v, torch.zeros(5, 7).double()),
            unsupported,
            "attn_mask has dtype torch.float64; accepted: bool",
        ),
        (lambda: sdpa(q, k, v, [[True]]), problem, "attn_mask is list"),
        (lambda: sdpa(q, k, v, dropout_p=1.0), problem, "dropout_p is 1.0"),
        (lambda: sdpa(q, k, v, is_causal=1), problem, "causal is 1"),
        (lambda: sdpa(q, k, v, scale=float("nan")), problem, "scale is nan"),
        (lambda: sdpa(q, k, v.to("meta")), ig.DeviceMismatchError, "query is on cpu, value is on meta"),
    ):
        with pytest.raises(error, match=message):
            call()


# --- the switch -------------------------------------------------------------------------------------------------------
def test_the_switch_replaces_it_and_what_calls_it():
    q, k, v = random((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16), dtype=torch.float32)
    with igt.use() as switch:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert torch.equal(o, igt.scaled_dot_product_attention(q, k, v, is_causal=True))
        assert torch.equal(torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=2.0),
                           igt.scaled_dot_product_attention(q, k, v, scale=2.0))  # fmt: skip
    assert switch.report().replaced == {"torch.nn.functional.scaled_dot_product_attention": 2}


@pytest.mark.parametrize(("training", "masked"), list(itertools.product([False, True], repeat=2)))
def test_modules_of_torch_inside_the_switch(training, masked):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True).train(training)
    words = torch.randn(2, 6, 32)
    given = {}
    if masked:
        padding = torch.zeros(2, 6, dtype=torch.bool)
        padding[1, 4:] = True
        causal = torch.nn.Transformer.generate_square_subsequent_mask(6)
        given = {"src_mask": causal, "src_key_padding_mask": padding.float().masked_fill(padding, -torch.inf)}
    leaf = words.clone().requires_grad_()
    expected = layer(leaf, **given)
    (theirs,) = torch.autograd.grad(expected.sum(), leaf)
    with igt.use() as switch:
        got = layer(leaf, **given)
        (ours,) = torch.autograd.grad(got.sum(), leaf)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert switch.report().replaced == {
        "torch.nn.functional.scaled_dot_product_attention": 1,
        "torch.nn.functional.layer_norm": 2,
    }
    assert switch.report().not_replaced.keys() == {"torch.nn.functional.linear", "torch.Tensor.sum"}


@pytest.mark.filterwarnings("ignore")
def test_what_the_switch_leaves_to_torch_and_says_so():
    class Subclass(torch.Tensor):
        pass

    q, k, v = random((1, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16), dtype=torch.float32)
    wide = [t.repeat(1, 1, 1, 20) for t in (q, k, v)]
    sdpa = F.scaled_dot_product_attention
    for call, reason in (
        (lambda: sdpa(*wide), "head dimension of query is 320"),
        (lambda: sdpa(q, k, v, dropout_p=1.0), "dropout_p is 1.0"),
        (lambda: sdpa(q.as_subclass(Subclass), k, v), "Subclass"),
        (lambda: torch._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0], "fused"),
    ):
        expected = call()
        with igt.use() as switch:
            got = call()
        (line,) = switch.report().lines
        assert not line.replaced
        assert reason in line.reason
        assert type(got) is type(expected)
        torch.testing.assert_close(got.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor), equal_nan=True)
    with igt.use(), pytest.raises(RuntimeError, match="at least 2 dimensional") as caught:  # torch's own
        sdpa(q[0, 0, 0], k, v)
    assert "isograd" not in str(type(caught.value))


def test_causal_biases_are_causality_of_either_alignment():
    q, k, v = random((1, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16), dtype=torch.float32)
    for bias in (causal_upper_left(5, 7), causal_lower_right(5, 7)):
        torch.testing.assert_close(
            igt.scaled_dot_product_attention(q, k, v, bias), F.scaled_dot_product_attention(q, k, v, bias)
        )
        with pytest.raises(ig.InvalidProblemError, match="attn_mask is a CausalBias and is_causal is True"):
            igt.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
        with pytest.raises(ig.UnsupportedError, match="bias is a CausalBias"):
            igt.attention(q, k, v, bias=bias)


def test_heads_that_do_not_divide_are_refused():
    q, k, v = random((2, 2, 5, 16), (2, 4, 7, 16), (2, 2, 7, 16), dtype=torch.float32)
    with pytest.raises(ig.InvalidProblemError, match="query, key and value have 2, 4, 2 heads"):
        igt.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_dynamic_shapes_and_numbers_compile():
    torch._dynamo.reset()
    q, k = random((2, 3, 5, 16), (2, 3, 7, 16), dtype=torch.float32)
    compiled = torch.compile(
        lambda q, k: igt.scaled_dot_product_attention(q, k, k), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for length in (5, 3, 4):
        part = q[:, :, :length]
        assert torch.equal(compiled(part, k), igt.scaled_dot_product_attention(part, k, k))
    scaled = torch.compile(lambda x: igt.attention(q, k, k, scale=x, softcap=x), fullgraph=True, backend="aot_eager")
    for x in (0.3, 0.5, 0.7):
        assert torch.equal(scaled(x), igt.attention(q, k, k, scale=x, softcap=x))


@pytest.mark.parametrize("head_dim", [8, 20, 24])
@pytest.mark.parametrize("dynamic", [False, True])
def test_head_dimensions_that_are_padded_compile(head_dim, dynamic):
    torch._dynamo.reset()
    (q,) = random((1, 2, 5, head_dim), dtype=torch.float32)
    for function in (igt.attention, igt.scaled_dot_product_attention):
        compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=dynamic)
        assert torch.equal(compiled(q, q, q), function(q, q, q))


def test_wide_windows():
    (q,) = random((1, 2, 5, 16), dtype=torch.float32)
    assert torch.equal(igt.attention(q, q, q, window=(2**63, None)), igt.attention(q, q, q))
