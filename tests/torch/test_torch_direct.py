"""Calls that go straight to an implementation or its node do what the dispatcher does with them."""

import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

pytest.importorskip("torch.library", reason="needs torch")
import torch
from torch.overrides import BaseTorchFunctionMode

import isograd.torch as igt
from isograd.torch import define

INDEX = torch.arange(30).reshape(6, 5) % 5
ROWS = torch.tensor([0, 2, 2, 5, 1, 0])
# Results of two tensors [6, 5].
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "softmax": lambda x, y: igt.softmax(x, -1),
    "log_softmax": lambda x, y: igt.log_softmax(x, 0, dtype=torch.float64),
    "gather": lambda x, y: igt.gather(x, 1, INDEX),
    "scatter_add": lambda x, y: igt.scatter_add(x, 1, INDEX, y),
    "index_select": lambda x, y: igt.index_select(x, 0, ROWS),
    "index_add": lambda x, y: igt.index_add(x, 0, ROWS, y, alpha=0.5),
    "embedding": lambda x, y: igt.embedding(ROWS, x),
    "topk": lambda x, y: igt.topk(x, 2),
    "cross_entropy": lambda x, y: igt.cross_entropy(x, ROWS.clamp(max=4), label_smoothing=0.1),
    "cross_entropy of probabilities": lambda x, y: igt.cross_entropy(x, y),
    "linear_cross_entropy": lambda x, y: igt.linear_cross_entropy(x, y, ROWS),
    "kl_div": lambda x, y: igt.kl_div(x, y, reduction="batchmean", log_target=True),
    "distillation_loss": lambda x, y: igt.distillation_loss(x, y.detach(), 2.0),
    "gumbel_softmax": lambda x, y: igt.gumbel_softmax(x, 0.5, True, seed=7, offset=3),
    "sparsemax": lambda x, y: igt.sparsemax(x, 0),
    "moe_router": lambda x, y: igt.moe_router(x, 2),
    "load_balancing_loss": lambda x, y: igt.load_balancing_loss(x, INDEX[:, :2]),
    "router_z_loss": lambda x, y: igt.router_z_loss(x),
    "attention": lambda x, y: igt.attention(x[None, None], y[None, None], y[None, None]),
    "sdpa": lambda x, y: igt.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None], is_causal=True),
}


class Subclass(torch.Tensor):
    """A tensor that is no plain one."""


def of_inference(t: Any) -> Any:
    with torch.inference_mode():
        return t.clone()


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda t: t,
    "with a gradient": lambda t: t.requires_grad_(),
    "parameter": torch.nn.Parameter,
    "subclass": lambda t: t.as_subclass(Subclass),
    "bfloat16": lambda t: t.bfloat16(),
    "integers": lambda t: t.int(),
    "complex": lambda t: torch.complex(t, t).conj(),
    "negative": lambda t: torch._neg_view(t),
    "imaginary": lambda t: torch.complex(t, t).conj().imag,
    "zeros": lambda t: torch._efficientzerotensor(t.shape),
    "sparse": lambda t: t.to_sparse(),
    "rows": lambda t: t.to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t[0], t[1]]),
    "jagged": lambda t: torch.nested.nested_tensor([t[0], t[1]], layout=torch.jagged),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "meta": lambda t: t.to("meta"),
    "inference": of_inference,
    "expanded": lambda t: t[:1].expand(6, 5),
    "transposed": lambda t: t.t().contiguous().t(),
    "empty": lambda t: t[:0],
    "array": lambda t: t.numpy(),
    "none": lambda t: None,
}
BLOCKS: dict[str, Callable[[], Any]] = {
    "usual": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def described(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(described, value))
    if not isinstance(value, torch.Tensor):
        return repr(value)
    about = (type(value), value.dtype, tuple(value.shape), value.requires_grad, value.is_leaf, value.is_inference())
    return (*about, type(value.grad_fn).__name__, None if value.is_meta else repr(value.tolist()))


def outcome(call: Callable[[Any, Any], Any], kinds: tuple[str, str], block: Callable[[], Any]) -> Any:
    """What a call returns, its gradients and their gradients, or its error."""
    generator = torch.Generator().manual_seed(0)
    given = [KINDS[kind](torch.randn(6, 5, generator=generator)) for kind in kinds]
    found = []
    try:
        with block():
            results = call(*given)
        leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        for _ in range(3):
            found.append(described(results))
            results = results if isinstance(results, tuple) else (results,)
            losses = [t.double().square().sum() for t in results if t is not None and t.requires_grad]
            if not losses:
                break
            results = torch.autograd.grad(losses, leaves, allow_unused=True, create_graph=True)
    except Exception as error:
        found.append((type(error).__name__, re.sub("0x[0-9a-f]+", "", str(error)).partition("\n")[0]))
    return found


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("gather", "cross_entropy of probabilities") else pytest.param(n, marks=pytest.mark.thorough)
        for n in CALLS
    ],
)
def test_a_direct_call_does_what_the_dispatcher_does(name: str) -> None:
    kinds = [*((k, "plain") for k in KINDS), *(("plain", k) for k in KINDS), ("with a gradient", "with a gradient")]
    for pair in (*kinds, ("inference", "with a gradient"), ("with a gradient", "inference")):
        for block in BLOCKS.values():

            def dispatched(block: Callable[[], Any] = block) -> ExitStack:
                stack = ExitStack()
                stack.enter_context(block())
                stack.enter_context(BaseTorchFunctionMode())
                return stack

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert outcome(CALLS[name], pair, block) == outcome(CALLS[name], pair, dispatched), pair


def test_modes_are_seen_by_direct_calls() -> None:
    assert define._direct()
    with BaseTorchFunctionMode():
        assert not define._direct()
