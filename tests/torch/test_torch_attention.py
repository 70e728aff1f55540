"""attention of isograd.torch: bits of the library, derivatives of every option, torch's machinery, bad input."""

import attention_samples as samples
import numpy as np
import pytest
from choices import exhaustive, thorough
from opinfo_samples import numpy, same_bits

pytest.importorskip("torch.library", reason="needs torch")
import torch

import isograd as ig
import isograd.torch as igt
from isograd.torch import ops_attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
pytestmark = pytest.mark.usefixtures("one_thread")


def plain(value):
    """Tensors as NumPy sees them, also in pairs."""
    if isinstance(value, tuple) and isinstance(value[0], torch.Tensor):
        return tuple([numpy(t) for t in value])
    return numpy(value) if isinstance(value, torch.Tensor) else value


def random_like(tensor, seed=9):
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        tensor.dtype
    )


# --- the library's bits -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", samples.NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_the_library(name, dtype):
    inputs, options = samples.problem(name, dtype)
    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
    o, lse = igt.attention(*leaves[:3], bias=leaves[3], sinks=leaves[4], **options, return_lse=True)
    given = {key: plain(value) for key, value in options.items()}
    given |= {key: plain(t) for key, t in (("bias", inputs[3]), ("sinks", inputs[4])) if t is not None}
    arrays = [numpy(t) for t in inputs[:3]]
    expected = ig.attention(*arrays, **given, return_lse=True)
    assert same_bits(o, expected[0])
    assert same_bits(lse, expected[1])
    do, dlse = random_like(o), random_like(lse)
    torch.autograd.backward([o, lse], [do, dlse])
    gradients = ig.attention_backward(numpy(do), *arrays, *expected, dlse=numpy(dlse), **given)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert (leaf is None) == (gradient is None)
        if leaf is not None:
            assert leaf.grad.dtype is leaf.dtype
            assert same_bits(leaf.grad, np.reshape(gradient, leaf.shape))


def test_the_layout_with_heads_inside_and_results_that_lie_as_the_inputs_do():
    q, k, v = samples.tensors(torch.float32)
    turned = [t.transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]
    o = igt.attention(*turned, causal=True, layout="BLHD")
    expected = igt.attention(q, k, v, causal=True)
    assert o.is_contiguous()
    assert torch.equal(o, expected.transpose(1, 2))
    assert expected.is_contiguous()
    o.backward(random_like(o))
    assert all(t.grad.is_contiguous() for t in turned)
    seen = igt.attention(*[t.transpose(1, 2) for t in turned], causal=True)
    assert torch.equal(seen, expected)
    assert seen.transpose(1, 2).is_contiguous()
    assert igt.attention(turned[0].transpose(1, 2), k, v).stride() == seen.stride()


@pytest.mark.parametrize(("head_dim", "v_dim"), [(1, 3), (12, 20), (16, 17), (30, 8)])
def test_head_dimensions_of_any_size(head_dim, v_dim):
    q, k, v = (t.requires_grad_() for t in samples.tensors(torch.float32, dims=(head_dim, v_dim)))
    o = igt.attention(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(o, expected)
    do = random_like(o)
    for ours, theirs in zip(
        torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(expected, (q, k, v), do), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


# --- derivatives ------------------------------------------------------------------------------------------------------
def of_leaves(name):
    """A problem as a function of its tensors, for gradcheck, and these."""
    inputs, options = samples.problem(name)
    leaves = [t.clone().requires_grad_() for t in inputs if t is not None]
    present = [t is not None for t in inputs]

    def function(*given):
        given = iter(given)
        q, k, v, bias, sinks = (next(given) if there else None for there in present)
        if bias is not None:  # a bias of -inf has no finite differences
            bias = bias.where(inputs[3] > -torch.inf, -torch.inf)
        o, lse = igt.attention(q, k, v, bias=bias, sinks=sinks, **options, return_lse=True)
        return o, lse.where(lse > -torch.inf, 0)

    if inputs[3] is not None:
        leaves[3] = inputs[3].clamp(min=0).requires_grad_()
    return function, leaves


@pytest.mark.thorough
@pytest.mark.parametrize("name", samples.NAMES)
def test_first_and_second_derivatives(name):
    function, leaves = of_leaves(name)
    fast = {"fast_mode": True}
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, **fast)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["everything", exhaustive("everything_packed")])
def test_every_element_of_the_first_derivatives(name):
    function, leaves = of_leaves(name)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)


@pytest.mark.thorough
def test_third_derivatives():
    function, leaves = of_leaves("everything")

    def gradient(*given):
        o, lse = function(*given)
        return torch.autograd.grad((o.square().sum() + lse.sin().sum()), given, create_graph=True)

    assert torch.autograd.gradgradcheck(gradient, leaves, fast_mode=True)


def test_rows_of_no_sequence_do_not_move():
    (q, k, v, _, sinks), options = samples.problem("everything_packed", torch.float32)

    def function(sinks):
        return igt.attention(q, k, v, sinks=sinks, **options, return_lse=True)

    (_, lse), (do, dlse) = torch.func.jvp(function, (sinks,), (torch.ones_like(sinks),))
    assert torch.isneginf(lse[..., 5]).all()
    assert (dlse[..., :5] > 0).all()
    assert not dlse[..., 5].any()
    assert not do[..., 5, :].any()


def test_one_gradient_alone():
    inputs, options = samples.problem("everything", torch.float32)
    every = [t.clone().requires_grad_() for t in inputs]
    o, lse = igt.attention(*every[:3], bias=every[3], sinks=every[4], **options, return_lse=True)
    whole = torch.autograd.grad(lse.where(lse > -torch.inf, 0).sum() + o.sum(), every)
    for i, expected in enumerate(whole):
        leaves = [t.clone().requires_grad_(j == i) for j, t in enumerate(inputs)]
        o, lse = igt.attention(*leaves[:3], bias=leaves[3], sinks=leaves[4], **options, return_lse=True)
        o.sum().backward(retain_graph=True)
        lse.where(lse > -torch.inf, 0).sum().backward()
        torch.testing.assert_close(leaves[i].grad, expected)


@pytest.mark.thorough
def test_second_derivatives_of_half_precision_have_its_type():
    q, k, v = (t.requires_grad_() for t in samples.tensors(torch.bfloat16))
    o = igt.attention(q, k, v, causal=True)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    seconds = torch.autograd.grad(dq.sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    (dq,) = torch.autograd.grad(igt.attention(*wide, causal=True).square().sum(), wide[0], create_graph=True)
    for ours, exact in zip(seconds, torch.autograd.grad(dq.sum(), wide), strict=True):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.double(), exact, rtol=0.05, atol=0.02 * float(exact.abs().max()))


# --- dropout ----------------------------------------------------------------------------------------------------------
def test_dropout_is_repeated_by_torchs_seed_and_by_ones_own():
    q, k, v = samples.tensors(torch.float32)

    def drawn(**given):
        return igt.attention(q, k, v, dropout_p=0.5, **given)

    torch.manual_seed(5)
    first, second = drawn(), drawn()
    torch.manual_seed(5)
    assert torch.equal(drawn(), first)
    assert not torch.equal(first, second)
    assert torch.equal(drawn(seed=3), drawn(seed=3))
    state = torch.get_rng_state()
    igt.attention(q, k, v)
    drawn(seed=3)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn where nothing is needed


def test_dropout_through_a_checkpoint():
    q, k, v = (t.requires_grad_() for t in samples.tensors(torch.float32))
    torch.manual_seed(1)
    expected = torch.autograd.grad(igt.attention(q, k, v, dropout_p=0.5).sum(), (q, k, v))
    torch.manual_seed(1)
    o = torch.utils.checkpoint.checkpoint(
        lambda *given: igt.attention(*given, dropout_p=0.5), q, k, v, use_reentrant=False
    )
    for ours, theirs in zip(torch.autograd.grad(o.sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(ours, theirs)


# --- torch's machinery ------------------------------------------------------------------------------------------------
def operators(name, dtype):
    """Both operators with their arguments, those of floating point requiring gradients."""
    inputs, options = samples.problem(name, dtype)
    q, k, v, bias, sinks = (None if t is None else t.clone().requires_grad_() for t in inputs)
    bias = None if bias is None else bias.detach()[(None,) * (4 - bias.dim())].requires_grad_()
    ids = options.get("segment_ids", (None, None))
    ends = options.get("cu_seqlens", (None, None))
    dropout_p = options.get("dropout_p", 0.0)
    seed = torch.tensor(options["seed"] - (1 << 64 if options["seed"] >> 63 else 0)) if dropout_p else None
    window = options.get("window", (None, None))
    rest = (options.get("causal", False), options.get("alignment", "lower_right"), *window, options.get("scale"))
    call = (q, k, v, bias, options.get("mask"), *ids, *ends, sinks, seed, *rest, options.get("softcap", 0.0), dropout_p)
    o, lse = (t.detach() for t in ops_attention.ATTENTION(*call))
    gradients = (random_like(o), random_like(lse), o, lse, bias is not None, sinks is not None)
    return {ops_attention.ATTENTION: call, ops_attention.ATTENTION_BACKWARD: (*gradients, *call)}


@pytest.mark.parametrize("name", ["plain", thorough("everything_packed"), exhaustive("everything")])
def test_opcheck(name):
    for op, arguments in operators(name, torch.float32).items():
        torch.library.opcheck(op.overload, arguments)
    quick = ("test_schema", "test_faketensor")
    for op, arguments in operators(name, torch.bfloat16).items():
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
        torch.library.opcheck(op.overload, tuple(plain), test_utils=quick)


@pytest.mark.parametrize("layout", ["BHLD", "BLHD"])
def test_meta_tensors_have_the_layout_of_real_ones(layout):
    given = [t.requires_grad_() for t in samples.tensors(torch.bfloat16, layout=layout)]
    shadows = [t.detach().to("meta").requires_grad_() for t in given]
    results = [igt.attention(*x, layout=layout, return_lse=True, dropout_p=0.1) for x in (given, shadows)]
    for real, meta in zip(*results, strict=True):
        assert (meta.device.type, meta.dtype, meta.shape) == ("meta", real.dtype, real.shape)
        assert meta.stride() == real.stride()
    gradients = [
        torch.autograd.grad(o.sum() + lse.sum(), x) for (o, lse), x in zip(results, (given, shadows), strict=True)
    ]
    for real, meta in zip(*gradients, strict=True):
        assert (meta.device.type, meta.dtype, meta.stride()) == ("meta", real.dtype, real.stride())


@pytest.mark.parametrize("name", ["bias", "everything", "everything_packed", "dropout"])
def test_vmap_gives_every_member_what_it_would_have_alone(name):
    problems = [samples.problem(name, torch.float32, seed) for seed in (0, 5)]
    options = problems[0][1]
    present = [t is not None for t in problems[0][0]]
    members = [[t for t in inputs if t is not None] for inputs, _ in problems]

    def loss(*given):
        given = iter(given)
        q, k, v, bias, sinks = (next(given) if there else None for there in present)
        o, lse = igt.attention(q, k, v, bias=bias, sinks=sinks, **options, return_lse=True)
        return o.square().sum() + lse.where(lse > -torch.inf, 0).sum()

    slots = tuple(range(len(members[0])))
    gradient = torch.func.grad_and_value(loss, slots)
    stacked = [torch.stack(pair) for pair in zip(*members, strict=True)]
    ours = torch.func.vmap(gradient)(*stacked)
    alone = [gradient(*member) for member in members]
    for i in range(2):
        torch.testing.assert_close(ours[1][i], alone[i][1])
        for slot in slots:
            torch.testing.assert_close(ours[0][slot][i], alone[i][0][slot])
    # One tensor of many members and the others shared.
    for slot in slots:
        dims = tuple([-1 if j == slot else None for j in slots])
        given = [stacked[j].movedim(0, -1) if j == slot else members[0][j] for j in slots]
        ours = torch.func.vmap(gradient, in_dims=dims)(*given)
        for i in range(2):
            alone = gradient(*[members[i][j] if j == slot else members[0][j] for j in slots])
            torch.testing.assert_close(ours[0][slot][i], alone[0][slot])
            torch.testing.assert_close(ours[0][0][i], alone[0][0])


def test_vmap_draws_as_it_is_told():
    q, k, v = (t.repeat(2, 1, 1, 1, 1) for t in samples.tensors(torch.float32))

    def call(q, k, v):
        return igt.attention(q, k, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(q, k, v)
    same = torch.func.vmap(call, randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(call, randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])


@pytest.mark.thorough
def test_hessian_of_torch_func():
    q, k, v = samples.tensors(lengths=(1, 2), heads=(1, 1), batch=1)
    q = q[..., :2]
    k = k[..., :2]

    def loss(x):
        return igt.attention(x, k, v, causal=True).square().sum()

    def theirs(x):
        return ((x @ k.mT / 2**0.5).softmax(-1) @ v).square().sum()

    torch.testing.assert_close(torch.func.hessian(loss)(q), torch.func.hessian(theirs)(q))
    torch.testing.assert_close(
        torch.func.jacrev(torch.func.jacrev(loss))(q), torch.func.jacrev(torch.func.jacrev(theirs))(q)
    )


@pytest.mark.thorough
def test_cpu_autocast_gives_the_types_of_torch():
    for dtype in DTYPES:
        q, k, v = (t.requires_grad_() for t in samples.tensors(dtype))
        bias = torch.randn(3, 5, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = igt.attention(q, k, v.to(torch.float32 if dtype is not torch.float64 else dtype), sinks=None)
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            assert o.dtype is expected.dtype
            torch.testing.assert_close(o, expected, rtol=0.02, atol=0.02)
            if dtype is not torch.float64:
                o = igt.attention(q, k, v, bias=bias, sinks=torch.zeros(2, dtype=torch.float16))
        o.float().sum().backward()
        assert q.grad.dtype is dtype
        assert bias.grad is None if dtype is torch.float64 else bias.grad.dtype is torch.float32


@pytest.mark.parametrize("dynamic", [exhaustive(False), True])
def test_compile_without_graph_breaks(dynamic):
    torch._dynamo.reset()
    bias = torch.randn(2, 1, 1)

    def step(q, k, v):
        o, lse = igt.attention(q, k, v, causal=True, window=(3, None), bias=bias, softcap=5.0, return_lse=True)
        p = igt.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (o * p).sum() + lse.where(lse > -torch.inf, 0).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for lengths, layout in (((3, 5), "BHLD"), ((4, 6), "BHLD"), ((7, 9), "BHLD")):
        given = samples.tensors(torch.float32, lengths=lengths, layout=layout)
        pairs = [[t.clone().requires_grad_() for t in given] for _ in range(2)]
        got, expected = compiled(*pairs[0]), step(*pairs[1])
        torch.testing.assert_close(got, expected)
        got.backward()
        expected.backward()
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_compile_with_dropout_draws_anew():
    torch._dynamo.reset()
    q, k, v = (t.requires_grad_() for t in samples.tensors(torch.float32))

    def step(*given):
        return igt.scaled_dot_product_attention(*given, dropout_p=0.5, enable_gqa=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    eager = step(q, k, v)
    assert torch.equal(first, eager)
    for ours, theirs in zip(
        torch.autograd.grad(first.sum(), (q, k, v)), torch.autograd.grad(eager.sum(), (q, k, v)), strict=True
    ):
        assert torch.equal(ours, theirs)


# --- bad input --------------------------------------------------------------------------------------------------------
def test_arguments_that_do_not_fit():
    q, k, v = samples.tensors(torch.float32)
    ids = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)

    def ends(*values):
        return torch.tensor(values, dtype=torch.int32)

    def packed(q_ends, k_ends):
        return igt.attention(q[:1], k[:1], v[:1], cu_seqlens=(q_ends, k_ends))

    problem, unsupported = ig.InvalidProblemError, ig.UnsupportedError
    for call, error, message in (
        (
            lambda: igt.attention(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)),
            problem,
            "q has 2 heads and k and v have 3",
        ),
        (lambda: igt.attention(q[0], k, v), problem, "q has shape .* four axes"),
        (lambda: igt.attention(q, k[:1], v), problem, "k has shape"),
        (lambda: igt.attention(q, k, v[:, :, 1:]), problem, "v has shape"),
        (lambda: igt.attention(q[..., :8], k, v), problem, "same head dimension"),
        (lambda: igt.attention(q[..., :0], k[..., :0], v), unsupported, "head dimension of q is 0"),
        (lambda: igt.attention(q.repeat(1, 1, 1, 17), k.repeat(1, 1, 1, 17), v), unsupported, "head dimension of q"),
        (lambda: igt.attention(q, k, v.double()), problem, "v has dtype torch.float64"),
        (lambda: igt.attention(q.long(), k, v), unsupported, "q has dtype torch.int64"),
        (lambda: igt.attention(q, k, v.to("meta")), ig.DeviceMismatchError, "v is on meta"),
        (lambda: igt.attention(q, k.tolist(), v), problem, "k is list"),
        (lambda: igt.attention(q, k, v, layout="LBHD"), problem, "layout is 'LBHD'"),
        (lambda: igt.attention(q, k, v, window=(-1, 0)), problem, "window is"),
        (lambda: igt.attention(q, k, v, alignment="left"), problem, "alignment is 'left'"),
        (lambda: igt.attention(q, k, v, softcap=-1), problem, "softcap is -1"),
        (lambda: igt.attention(q, k, v, dropout_p=1), problem, "dropout_p is 1"),
        (lambda: igt.attention(q, k, v, dropout_p=0.5, seed=-1), problem, "seed is -1"),
        (lambda: igt.attention(q, k, v, bias=torch.zeros(4)), problem, "bias has shape"),
        (lambda: igt.attention(q, k, v, bias=torch.zeros(1, 1, 1, 1, 5)), problem, "bias has shape"),
        (lambda: igt.attention(q, k, v, bias=torch.zeros(5).double()), unsupported, "bias has dtype"),
        (lambda: igt.attention(q, k, v, mask=torch.zeros(5)), unsupported, "mask has dtype"),
        (lambda: igt.attention(q, k, v, mask=torch.zeros(3, 3) > 0), problem, "mask has shape"),
        (lambda: igt.attention(q, k, v, sinks=torch.zeros(1)), problem, "sinks has shape"),
        (lambda: igt.attention(q, k, v, segment_ids=ids[0]), problem, "segment_ids is Tensor; expected a pair"),
        (lambda: igt.attention(q, k, v, segment_ids=ids[::-1]), problem, "segment_ids of q has shape"),
        (
            lambda: igt.attention(q, k, v, segment_ids=(ids[0], ids[1].long())),
            unsupported,
            "segment_ids of k has dtype",
        ),
        (lambda: igt.attention(q, k, v, cu_seqlens=(ends(0, 3), ends(0, 5))), problem, "batch size 2"),
        (lambda: packed(ends(1, 3), ends(0, 5)), problem, "cu_seqlens_q starts at 1"),
        (lambda: packed(ends(0, 2, 1), ends(0, 1, 5)), problem, "cu_seqlens_q decreases"),
        (lambda: packed(ends(0, 3), ends(0, 6)), problem, "cu_seqlens_k ends at 6"),
        (lambda: packed(ends(0, 3), ends(0, 3, 5)), problem, "cu_seqlens of k has shape"),
        (lambda: packed(ends(0, 3), torch.tensor([0.0, 5.0])), unsupported, "cu_seqlens of k has dtype"),
    ):
        with pytest.raises(error, match=message):
            call()
