"""Order-free products where torch's are called: `use(products=...)`, `convert(..., products=...)`, attention."""

import math

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
import torch.nn.functional as F  # noqa: N812
from test_torch_convert import distance, model_of, step, words_of
from torch import nn

import isograd as ig
import isograd.torch as igt
from isograd.errors import UnsupportedError
from isograd.torch.broadcasting import add

pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shape, dtype=torch.float32, seed=0, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


def same(found, expected):
    """Whether results and tuples of gradients have the same bits."""
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def with_gradients(call, *leaves):
    y = call(*leaves)
    dy = random(*y.shape, dtype=y.dtype, seed=9, grad=False)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def product(a, b):
    return igt.matmul(a, b, precision="int16")


# --- the switch ------------------------------------------------------------------------------------------------------
SPELLINGS = {
    "torch.matmul": (torch.matmul, product, (2, 3, 5), (5, 4)),
    "torch.Tensor.matmul": (lambda a, b: a @ b, product, (3, 5), (5, 4)),
    "torch.Tensor.__rmatmul__": (lambda a, b: a.__rmatmul__(b), lambda a, b: product(b, a), (5, 4), (3, 5)),
    "torch.linalg.matmul": (torch.linalg.matmul, product, (3, 5), (5,)),
    "torch.mm": (torch.mm, product, (3, 5), (5, 4)),
    "torch.Tensor.mv": (lambda a, b: a.mv(b), product, (3, 5), (5,)),
    "torch.dot": (torch.dot, product, (5,), (5,)),
    "torch.bmm": (torch.bmm, product, (2, 3, 5), (2, 5, 4)),
    "torch.einsum": (
        lambda a, b: torch.einsum("bqhd, bkhd -> bhqk", a, b),
        lambda a, b: product(a.permute(0, 2, 1, 3), b.permute(0, 2, 3, 1)), (2, 3, 4, 5), (2, 6, 4, 5),
    ),
    "torch.nn.functional.linear": (
        F.linear, lambda a, b: igt.linear(a, b, precision="int16"), (2, 3, 5), (4, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_spelling_has_the_bits_of_the_product(name, dtype):
    call, definition, *shapes = SPELLINGS[name]
    leaves = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    with igt.use(products="int16") as switch:
        found = with_gradients(call, *leaves)
    assert switch.report().replaced[name] == 1
    assert not switch.report().not_replaced
    assert same(found, with_gradients(definition, *leaves))
    assert not torch.equal(found[0], call(*leaves)) or dtype is torch.bfloat16


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 1), (1, 4), ()], ids=str)
def test_additions_to_a_product_and_their_gradients(shape):
    c, a, b = random(*shape), random(3, 5, seed=1), random(5, 4, seed=2)
    with igt.use(products="int16"):
        found = with_gradients(torch.addmm, c, a, b)
    assert same(found, with_gradients(lambda c, a, b: add(product(a, b), c), c, a, b))
    torch.testing.assert_close(found, with_gradients(torch.addmm, c, a, b), rtol=1e-3, atol=1e-3)
    # The sum of a broadcast operand's gradient has no order.
    y = random(300, 7, grad=False) * torch.logspace(-9, 9, 300)[:, None]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    bias = random(7)
    (first,), (second,) = (torch.autograd.grad(add(y, bias), bias, g) for g in (y, y[order]))
    assert torch.equal(first, second)
    assert not torch.equal(y.sum(0), y[order].sum(0))


def test_factors_and_batches():
    c, a, b = random(2, 3, 4), random(2, 3, 5, seed=1), random(2, 5, 4, seed=2)
    with igt.use(products="int16") as switch:
        found = [
            torch.baddbmm(c, a, b, beta=0.5, alpha=2),
            torch.addmm(c[0], a[0], b[0], beta=0),
            torch.addmv(c[0, :, 0], a[0], b[0, :, 0]),
        ]
    assert len(switch.report().replaced) == 3
    exact = [0.5 * c + 2 * (a @ b), a[0] @ b[0], c[0, :, 0] + a[0] @ b[0, :, 0]]
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


def test_what_products_do_not_serve_is_left_and_listed():
    x = random(3, 3)
    with igt.use(products="int16") as switch:
        assert torch.equal(x.double() @ x.double(), torch.linalg.multi_dot([x.double(), x.double()]))
        torch.einsum("ij->i", x)
        torch.einsum("...ij,jk->...ik", x, x)
        torch.einsum("ii,jk->ijk", x, x)
        torch.matmul(x.detach(), x.detach(), out=torch.empty(3, 3))
        x.long() @ x.long()
        with pytest.raises(RuntimeError):
            torch.mm(x, x[:2])
    report = switch.report()
    assert report.not_replaced == {
        "torch.Tensor.matmul": 1, "torch.linalg.multi_dot": 1, "torch.einsum": 3, "torch.matmul": 1, "torch.mm": 1,
    }  # fmt: skip
    assert not report.replaced
    with igt.use() as switch:
        x @ x
    assert switch.report().not_replaced == {"torch.Tensor.matmul": 1}
    for call in (igt.use, lambda products: igt.convert(nn.Linear(2, 2), products=products)):
        with pytest.raises(ig.errors.InvalidProblemError, match="products is 'int8'; accepted: int16, None"):
            call(products="int8")


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.13")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cross_entropy_of_a_linear_layer(dtype):
    given = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(7, 5), (9, 5), (9,)])]
    targets, class_weight = torch.tensor([0, 8, -100, 3, 3, 5, 1]), torch.rand(9).to(dtype)
    more = {"label_smoothing": 0.1, "reduction": "mean"}

    def call(x, w, b):
        return F.linear_cross_entropy(x, w, targets, linear_bias=b, weight=class_weight, **more)

    def definition(x, w, b):
        if dtype is torch.float32:
            return igt.cross_entropy(igt.linear(x, w, b, precision="int16"), targets, class_weight, **more)
        more_still = {"class_weight": class_weight, "preference": "order_free", **more}
        return igt.linear_cross_entropy(x, w, targets, b, **more_still).to(dtype)

    with igt.use(products="int16") as switch:
        found = with_gradients(call, *given)
        refused = [
            F.linear_cross_entropy(x.detach(), given[1].detach(), t)
            for x, t in ((given[0].double(), targets), (given[0], torch.full((7, 9), 1 / 9, dtype=dtype)))
            if x.dtype == given[1].dtype
        ]
    name = "torch.nn.functional.linear_cross_entropy"
    assert switch.report().replaced[name] == 1
    assert switch.report().not_replaced[name] == len(refused) == 1
    assert found[0].dtype is dtype
    assert same(found, with_gradients(definition, *given))
    torch.testing.assert_close(found, with_gradients(call, *given), rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", torch.bfloat16), igt.use(products="int16"):
        loss = call(*given)
    narrow = [t.bfloat16() for t in given]
    kept = {"class_weight": class_weight.float(), "preference": "order_free"}
    assert loss.dtype is torch.float32
    assert torch.equal(loss, igt.linear_cross_entropy(*narrow[:2], targets, narrow[2], **kept, **more))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.13")
def test_cross_entropy_of_what_torch_refuses_is_refused():
    x, w, targets = random(2, 3, 5, dtype=torch.bfloat16), random(9, 5, dtype=torch.bfloat16), torch.zeros(2, 3).long()
    with igt.use(products="int16"), pytest.raises(RuntimeError, match="dimensionality 1 or 2"):
        F.linear_cross_entropy(x, w, targets)


def test_autocast_multiplies_in_its_dtype():
    x, w = random(3, 5), random(4, 5, seed=1)
    with torch.autocast("cpu", torch.bfloat16), igt.use(products="int16"):
        y = F.linear(x, w)
        o = F.scaled_dot_product_attention(x[None], x[None], x[None])
    assert torch.equal(y, igt.linear(x.bfloat16(), w.bfloat16()))
    assert o.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_under_autocast_are_those_of_torch(dtype):
    a, b = random(3, 4, grad=False), random(4, 5, seed=1, grad=False)
    calls = (
        lambda: torch.dot(a[0], b[:, 0]), lambda: torch.mv(a, b[:, 0]), lambda: torch.mm(a, b), lambda: a[0] @ b[:, 0],
        lambda: torch.addmv(a[:, 0], a, b[:, 0]), lambda: torch.addmm(b[0], a, b), lambda: torch.einsum("ij,jk", a, b),
        lambda: torch.einsum("i,j->ij", a[0], b[0]), lambda: torch.einsum("ij,ij->ij", a, a),
    )  # fmt: skip
    with torch.autocast("cpu", dtype=dtype):
        expected = [call().dtype for call in calls]
        with igt.use(products="int16") as switch:
            assert [call().dtype for call in calls] == expected
    assert not switch.report().not_replaced


def test_products_of_one_term_are_rounded_once_and_their_gradients_have_no_order():
    a, b = random(300, 1), random(1, 4, seed=1)
    dy = random(300, 4, seed=2, grad=False) * torch.logspace(-3, 3, 300)[:, None]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    moved = a.detach()[order]
    calls = {
        "matmul": lambda a, b: a @ b,
        "einsum": lambda a, b: torch.einsum("i,j->ji", a[:, 0], b[0]).t(),
        "elements": lambda a, b: torch.einsum("bi,bj->ijb", a.t(), b).squeeze(-1),
        "baddbmm": lambda a, b: torch.baddbmm(b.new_zeros(1, 1, 1), a[None], b[None])[0],
    }
    for name, call in calls.items():
        with igt.use(products="int16") as switch:
            y, shuffled = call(a, b), call(moved, b)
        assert torch.equal(y, a * b), name
        assert not switch.report().not_replaced
        (db,), (again,) = torch.autograd.grad(y, b, dy), torch.autograd.grad(shuffled, b, dy[order])
        assert torch.equal(db, again), name
        assert torch.allclose(db.double(), (dy.double() * a.double()).sum(0), rtol=1e-5), name
    with igt.use(products="int16"):
        assert not torch.signbit(torch.zeros(1, 1) @ -torch.ones(1, 1))


def test_what_does_not_broadcast_is_an_error_of_torchs():
    a, b, c = random(3, 4, grad=False), random(4, 5, grad=False), torch.ones(2, 2)
    with pytest.raises(RuntimeError) as expected:
        torch.addmm(c, a, b)
    with igt.use(products="int16"), pytest.raises(RuntimeError) as found:
        torch.addmm(c, a, b)
    assert str(found.value) == str(expected.value)


def test_an_unmodified_layer_of_torch_has_no_order():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    x = random(3, 5, 16)
    theirs = with_gradients(layer, x)
    with igt.use(products="int16"), igt.audit(layer) as audit:
        ours = with_gradients(layer, x)
    assert [entry.operator for entry in audit.findings] == ["aten::randn"]  # of the gradient
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.thorough
def test_compiled_products():
    layer = nn.Linear(5, 4)
    x = random(3, 5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x):
        return layer(x) @ layer.weight

    with igt.use(products="int16") as switch:
        found = call(x)
    assert torch.equal(found, product(igt.linear(x, layer.weight, layer.bias, precision="int16"), layer.weight))
    assert sum(switch.report().replaced.values()) == 2


@pytest.mark.thorough
def test_products_whose_operands_are_broadcast_are_compiled_whole():
    calls = (
        (lambda a, b: a @ b, (9, 1), (1, 5)),
        (lambda a, b: torch.einsum("bij,jk->bik", a, b), (2, 3, 4), (4, 5)),
        (lambda a, b: torch.baddbmm(b[:, :1, :1], a, b.mT), (2, 3, 4), (2, 5, 4)),
        (lambda a, b: F.scaled_dot_product_attention(a, b, b), (2, 2, 4, 16), (1, 2, 5, 16)),
    )
    for call, *shapes in calls:
        leaves = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
        torch._dynamo.reset()
        with igt.use(products="int16") as switch:
            compiled = with_gradients(torch.compile(call, backend="aot_eager", fullgraph=True), *leaves)
            assert same(compiled, with_gradients(call, *leaves))
        assert not switch.report().not_replaced


# --- attention -------------------------------------------------------------------------------------------------------
def operands(dtype, grad=True):
    return (
        random(2, 4, 9, 16, dtype=dtype, seed=1, grad=grad), random(2, 2, 11, 16, dtype=dtype, seed=2, grad=grad),
        random(2, 2, 11, 24, dtype=dtype, seed=3, grad=grad),
    )  # fmt: skip


CASES = {
    "full": dict,
    "causal window": lambda: {"causal": True, "window": (3, None)},
    "softcap": lambda: {"softcap": 2.0, "scale": 0.7},
    "sinks": lambda: {"sinks": random(4, seed=4)},
    "bias": lambda: {"bias": random(1, 4, 1, 11, seed=5)},
    "dropout": lambda: {"dropout_p": 0.3, "seed": 5},
    "rows that see nothing": lambda: {
        "mask": torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(6)) > 0.9
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_by_products_is_near_the_exact_one(case, dtype):
    options = CASES[case]()
    extra = [t for t in options.values() if torch.is_tensor(t) and t.requires_grad]
    leaves = [*operands(dtype), *extra]

    def call(precision, leaves):
        named = {key: t for key, t in options.items() if t is not extra[0]} if extra else dict(options)
        if extra:
            (key,) = set(options) - set(named)
            named[key] = leaves[3]
        o = igt.attention(*leaves[:3], **named, precision=precision)
        dy = random(*o.shape, seed=9, grad=False).to(o.dtype)
        return [o, *torch.autograd.grad(o, leaves, dy)]

    found = call("int16", leaves)
    exact = call(None, [t.detach().double().requires_grad_() for t in leaves])
    most = 2e-2 if dtype is torch.bfloat16 else 3e-4
    assert max(distance(found, exact)) < most
    assert all(a.dtype is (dtype if i < 4 else torch.float32) for i, a in enumerate(found))


def test_attention_by_products_has_no_order():
    q, k, v = operands(torch.bfloat16)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))

    def call(order):
        shuffled = [q, k[:, :, order], v[:, :, order]]
        return with_gradients(lambda *leaves: igt.attention(*leaves, precision="int16"), *shuffled)

    o, dq, dk, dv = call(torch.arange(11))
    assert same(call(order), [o, dq, dk[:, :, order], dv[:, :, order]])
    # A sequence alone, and heads of k that are written out: the same values.
    alone = igt.attention(q[1:], k[1:], v[1:], precision="int16")
    assert torch.equal(alone, o[1:])
    repeated = [t.repeat_interleave(2, 1) for t in (k, v)]
    assert torch.equal(igt.attention(q, *repeated, precision="int16"), o)


def test_attention_by_products_packed_and_in_torchs_spelling():
    q, k, v = (random(1, 2, 12, 16, seed=i) for i in range(3))
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = igt.attention(q, k, v, cu_seqlens=(ends, ends), causal=True, precision="int16")
    exact = igt.attention(q, k, v, cu_seqlens=(ends, ends), causal=True)
    assert max(distance([packed], [exact])) < 3e-4
    o = igt.scaled_dot_product_attention(q, k, v, is_causal=True, precision="int16")
    with igt.use(products="int16"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), o)
    assert torch.equal(igt.attention(q, k, v, causal=True, precision="int16"), o)
    assert igt.attention(q[:, :0], k[:, :0], v[:, :0], precision="int16").shape == (1, 0, 12, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_16_bits_is_the_kernel_of_any_order(dtype):
    q, k, v = (
        random(2, heads, 140, 16, seed=i).to(dtype).detach().requires_grad_() for i, heads in enumerate((4, 2, 2))
    )
    sinks = random(4, seed=3).detach().requires_grad_()
    dy, dlse = random(2, 4, 140, 16, seed=9, grad=False).to(dtype), random(2, 4, 140, seed=10, grad=False)
    options = {"causal": True, "window": (130, 0), "softcap": 5.0, "dropout_p": 0.2, "seed": 3}
    o, lse = igt.attention(q, k, v, sinks=sinks, return_lse=True, precision="int16", **options)
    found = [o, lse, *torch.autograd.grad((o, lse), (q, k, v, sinks), (dy, dlse))]
    arrays = [t.detach() for t in (q, k, v)]
    right = ig.attention(*arrays, sinks=sinks.detach(), return_lse=True, preference="order_free", **options)
    gradients = ig.attention_backward(
        dy, *arrays, *right, sinks=sinks.detach(), dlse=dlse, preference="order_free", **options
    )
    right = [*right, *(getattr(gradients, name) for name in ("dq", "dk", "dv", "dsinks"))]
    assert same(found, right)


def test_attention_in_16_bits_everywhere_it_is_taken():
    q, k, v = (random(1, 2, 12, 16, seed=i).bfloat16() for i in range(3))
    o = igt.attention(q, k, v, causal=True, precision="int16")
    assert torch.equal(ig.attention(*(t.detach() for t in (q, k, v)), causal=True, preference="order_free"), o)
    with igt.use(products="int16"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), o)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(igt.attention(q.float(), k.float(), v.float(), causal=True, precision="int16"), o)
    mapped = torch.vmap(lambda *rows: igt.attention(*rows, causal=True, precision="int16"))
    assert torch.equal(mapped(*(t[None] for t in (q, k, v)))[0], o)
    compiled = torch.compile(lambda *rows: igt.attention(*rows, causal=True, precision="int16"), backend="aot_eager")
    assert torch.equal(compiled(q, k, v), o)
    # With a bias, whose gradient the kernel has not, all scores at once.
    bias = torch.zeros(12, 12)
    dense = igt.attention(q, k, v, bias=bias, causal=True, precision="int16")
    wide = igt.attention(q.float(), k.float(), v.float(), bias=bias, causal=True, precision="int16")
    assert torch.equal(dense, wide.bfloat16())
    with pytest.raises(UnsupportedError, match="return_lse is True"):
        igt.attention(q, k, v, bias=bias, precision="int16", return_lse=True)


@pytest.mark.parametrize("precision", ["int16", None])
@pytest.mark.parametrize("kind", ["batch", "heads"])
def test_what_torchs_attention_broadcasts_has_no_order(kind, precision):
    many = 33
    q, dy = (random(many, 2, 3, 16, seed=i, grad=False) for i in (1, 2))
    dy = dy * torch.logspace(-3, 3, many)[:, None, None, None]  # sums whose last bits depend on an order
    order = torch.randperm(many, generator=torch.Generator().manual_seed(0))
    if kind == "heads":
        q, dy = (t.transpose(0, 1) for t in (q, dy))
    leaves = [random(1, 1, 5, 16, seed=3), random(1, 1 if kind == "batch" else 3, 5, 16, seed=4)]
    leaves += [random(*(1, 1, 1, 1, 5) if kind == "batch" else (3, 5), seed=5)]
    if kind == "heads":
        order = torch.cat([order[order // 11 == group] for group in range(3)])

    def call(order):
        axis = 0 if kind == "batch" else 1
        rows = q.index_select(axis, order)[None]
        key, value, bias = leaves
        o = igt.scaled_dot_product_attention(
            rows, key, value, bias, enable_gqa=kind == "heads", precision=precision
        )  # fmt: skip
        return torch.autograd.grad(o, leaves, dy.index_select(axis, order)[None])

    own = 3 if precision else 2  # a kernel adds the gradient of its bias up in the order of the batch
    assert same(call(torch.arange(many))[:own], call(order)[:own])


def packed(arguments, q_ends, k_ends, rows=1):
    arguments.update({n: arguments[n][:rows] for n in "qkv"})
    arguments["cu_seqlens"] = tuple(torch.tensor(ends, dtype=torch.int32) for ends in (q_ends, k_ends))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(precision="int8"), "precision is 'int8'; accepted: int16, None"),
        (lambda a: a.update({n: a[n].double() for n in "qkv"}), "precision is 'int16' for float64"),
        (lambda a: a.update(return_lse=True), "return_lse is True with precision 'int16'"),
        (lambda a: a.update(k=a["k"].bfloat16()), "k has dtype torch.bfloat16 and q torch.float32"),
        (lambda a: a.update(k=a["k"][:, :, 1:]), "v has shape"),
        (lambda a: a.update(q=a["q"][:, :3]), "expected a multiple of the heads"),
        (lambda a: a.update(bias=torch.ones(1, 3, 9, 11)), "bias has shape"),
        (lambda a: a.update(mask=torch.ones(9, 11)), "mask has dtype torch.float32"),
        (lambda a: a.update(sinks=torch.ones(3)), "sinks has shape"),
        (lambda a: a.update(sinks=torch.ones(4).double()), "sinks has dtype torch.float64"),
        (lambda a: a.update(bias=torch.ones(9, 11).half()), "bias has dtype torch.float16"),
        (lambda a: a.update(segment_ids=(torch.ones(2, 3).int(), torch.ones(2, 11).int())), "segment_ids of q has"),
        (lambda a: a.update(segment_ids=(torch.ones(2, 9), torch.ones(2, 11))), "segment_ids of q has dtype"),
        (lambda a: packed(a, [0, 9], [0, 11], rows=2), "packed sequences, batch 1"),
        (lambda a: packed(a, [0, 4, 9], [0, 11]), "cu_seqlens of k has shape"),
        (lambda a: packed(a, [0, 4, 19], [0, 4, 11]), "cu_seqlens_q ends at 19; there are 9 tokens"),
        (lambda a: packed(a, [0, 4, 9], [0, 5, 4]), "cu_seqlens_k decreases from 5 to 4"),
        (lambda a: packed(a, [1, 9], [0, 11]), "cu_seqlens_q starts at 1"),
        (lambda a: packed(a, [], []), "cu_seqlens of q has shape"),
    ],
)
def test_errors_of_attention_by_products(change, words):
    arguments = dict(zip("qkv", operands(torch.float32), strict=True)) | {"precision": "int16"}
    change(arguments)
    others = {key: value for key, value in arguments.items() if len(key) > 1 and key != "precision"}
    if not words.startswith(("precision", "return_lse", "k has")):  # the other attention refuses them as well
        with pytest.raises(ig.errors.IsogradError, match=words):
            igt.attention(*[arguments[n] for n in "qkv"], **others)
    with pytest.raises(ig.errors.IsogradError, match=words):
        igt.attention(*[arguments.pop(n) for n in "qkv"], **arguments)


# --- convert ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind",
    [
        "Llama",
        "Olmoe",
        *[pytest.param(kind, marks=pytest.mark.thorough) for kind in ("Qwen2", "Qwen3", "Mixtral", "Gemma")],
    ],
)
def test_nothing_in_a_step_of_a_converted_model_depends_on_an_order(kind):
    model, words = model_of(kind), words_of(2, 9)
    before = step(model, words)
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    handle = igt.convert(model, products="int16")
    with igt.use(), igt.audit(model) as audit:  # for the loss, which is a function
        found = step(model, words)
    assert audit.findings == ()  # nor on the machine
    assert max(distance(found, before)) < 2e-3
    report = handle.report()
    assert report.replaced["Linear"] > 8
    assert not [module for module in report.modules if module.passed]
    assert "isograd.torch.attention in int16 instead of eager" in str(report)
    assert igt.convert(model).report().replaced == {}
    # The order of the sequences, and with it that of all sums over tokens, leaves no trace.
    with igt.use():
        turned = step(model, words.flip(0))
    assert same([turned[0].flip(0), *turned[1:]], found)
    handle.restore()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert all(map(torch.equal, step(model, words), before))


def test_layers_of_torch_are_converted():
    torch.manual_seed(0)
    inner = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, activation=nn.GELU(), batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), inner, nn.GELU("tanh"))
    x = random(3, 5, 8)
    theirs = with_gradients(model, x)
    with igt.convert(model, products="int16") as handle, igt.audit(model) as audit:
        ours = with_gradients(model, x)
    replaced = handle.report().replaced
    assert (replaced["Linear"], replaced["SiLU"], replaced["GELU"]) == (3, 1, 2)
    assert [entry.operator for entry in audit.findings] == ["aten::randn"]  # of the gradient
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
    wide = nn.Linear(8, 4).double()
    with igt.convert(wide, products="int16") as handle:
        wide(x.double())
        assert "1 calls of Linear went to torch: linear: precision is 'int16' for float64" in str(handle.report())


def test_a_model_of_float64_keeps_its_products_and_one_step_in_its_cache(monkeypatch):
    model, words = model_of("Llama").double(), words_of(1, 5)
    expected = model(words).logits
    with igt.convert(model, products="int16") as handle:
        found = model(words, use_cache=True)
        assert found.past_key_values.get_seq_length() == 5
        assert max(distance([found.logits], [expected])) < 1e-5  # positions are of float32
        passed = {module.kind for module in handle.report().modules if module.passed}
        assert passed == {"Linear"}

        def refusing(*args, **kwargs):
            raise ig.errors.UnsupportedError("attention: not served")

        monkeypatch.setattr("isograd.torch.huggingface.attention", refusing)
        cache = found.past_key_values
        with pytest.raises(ig.errors.UnsupportedError, match="not served"):
            model(words[:, :1], past_key_values=cache)
        assert cache.layers[0].keys.shape[2] == 6


def test_rotary_positions_are_those_of_the_table():
    model = model_of("Llama").model
    theirs = model.rotary_emb(torch.ones(1, 1, 1), torch.tensor([[0, 3, 31]]))
    with igt.convert(model, products="int16"):
        ours = model.rotary_emb(torch.ones(1, 1, 1), torch.tensor([[0, 3, 31]]))
        beyond = model.rotary_emb(torch.ones(1, 1, 1), torch.tensor([[32]]))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    cos, sin = (torch.from_numpy(t)[[0, 3, 31]].repeat(1, 2)[None] for t in ig.rotary_table(32, 8))
    assert same(ours, (cos, sin))
    assert math.isclose(float(beyond[0][0, 0, 0]), math.cos(32), abs_tol=1e-5)
