"""How many kernels are compiled where only the number of rows or tokens changes."""

import pytest

import isograd as ig

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs triton")

import triton_variants  # noqa: E402

from isograd.core import registry  # noqa: E402
from isograd.devices import triton_launcher  # noqa: E402
from isograd.ops.softmax import triton as softmax_kernels  # noqa: E402
from isograd.reduction import cuda as reduction  # noqa: E402
from isograd.rows import triton_totals  # noqa: E402

SIZES = (
    *(1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 48),
    *(64, 100, 128, 200, 256, 300, 512, 777, 1000, 1024, 1500, 2048, 3000, 4096),
)
CAUSAL = ig.AttentionOptions(causal=True)


def cross_entropy(n):
    fields = ((n, 256), "float32", "int64", 1, False, -100, 0.0, 0.0)
    return ig.CrossEntropyDescriptor(*fields), ig.CrossEntropyBackwardDescriptor(*fields)


def attention(n):
    fields = (1, 4, 4, n, n, 64, 64, "float32", CAUSAL)
    return ig.AttentionDescriptor(*fields), ig.AttentionBackwardDescriptor(*fields)


def attention_with_cache(n):
    sizes, pages = (64, 64, "float32", CAUSAL), {"page_size": 16, "pages": 64}
    return (
        ig.AttentionWithCacheDescriptor(n, 4, 2, 1, 32, *sizes),
        ig.AttentionWithCacheDescriptor(8, 4, 2, 1, 16 * n, *sizes, **pages),
    )


def gather(n):
    fields = ((n, 256), (n, 16), "float32", "int64", 1)
    return ig.TakeAlongAxisDescriptor(*fields), ig.TakeAlongAxisBackwardDescriptor(*fields)


def softmax(n):
    fields = ((n, 256), "float32", 1)
    return ig.SoftmaxDescriptor(*fields), ig.SoftmaxBackwardDescriptor(*fields)


def kl_div(n):
    fields = ((n, 256), "float32", "mean", True)
    return ig.KlDivDescriptor(*fields), ig.KlDivBackwardDescriptor(*fields)


def moe_router(n):
    fields = ((n, 64), 4, "float32")
    return ig.MoeRouterDescriptor(*fields), ig.MoeRouterBackwardDescriptor(*fields)


# name: (descriptors of n rows or tokens, forward and backward; kernels at most). A sum over indices is five kernels, in
# two variants for few sources and for so many that an index may be hot.
OPERATIONS = {
    "softmax": (softmax, 4),
    "cross_entropy": (cross_entropy, 2),
    "attention": (attention, 4),
    "attention_with_cache": (attention_with_cache, 4),
    "gather": (gather, 2),
    "index_add": (lambda n: [ig.IndexSumDescriptor((512, 256), (n,), "float32")], 9),
    "embedding": (lambda n: [ig.IndexSelectDescriptor((512, 64), (n,), "float32")], 1),
    "kl_div": (kl_div, 6),
    "moe_router": (moe_router, 4),
}


def variants_of(describe):
    registry.kernels()
    with triton_variants.watched() as variants:
        for n in SIZES:
            for descriptor in describe(n):
                kernel = registry._entries[descriptor.operation, "cuda", "float32", "triton"][1].kernel
                triton_variants.launch(kernel, descriptor)
    return variants


@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_of_rows_compile_few_kernels(name):
    describe, most = OPERATIONS[name]
    variants = variants_of(describe)
    assert sum(map(len, variants.values())) <= most, {k: triton_variants.differing(v) for k, v in variants.items()}


def test_means_over_tokens_compile_few_kernels():
    with triton_variants.watched() as variants:
        for n in SIZES:
            triton_totals.target_total(torch.zeros(n, dtype=torch.int64), None, 256, -100, torch.float32)
            triton_totals.divided(torch.zeros(()), torch.zeros(()))
            reduction.sum(torch.zeros(n))
    assert sum(map(len, variants.values())) <= 4


def test_a_kernel_that_is_specialized_for_rows_is_noticed(monkeypatch):
    # The same count fails where the number of rows reaches the compiler.
    monkeypatch.setattr(triton_launcher, "unspecialized", lambda kernel, free: kernel)
    monkeypatch.setattr(softmax_kernels, "_launcher", softmax_kernels._launcher.__wrapped__)
    assert sum(map(len, variants_of(softmax).values())) > 4
