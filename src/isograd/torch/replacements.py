"""Which of torch's functions `use()` replaces, and by what; which it leaves to torch, when and why."""

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from isograd.errors import UnsupportedError
from isograd.torch import dot_product, dropping, exported, indexing, losses, product_functions


def _plain(kind: str) -> Callable[..., Tensor]:
    """torch.softmax, torch.special.softmax and the tensor method."""

    def call(input: Any, dim: Any, dtype: Any = None, *, out: Any = None) -> Tensor:  # noqa: A002
        return getattr(exported, kind)(_servable(kind, input), dim, dtype, out=out)  # type: ignore[no-any-return]

    return call


def _functional(kind: str) -> Callable[..., Tensor]:
    """torch.nn.functional.softmax, which modules call; without a dim torch guesses one and warns."""

    def call(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:  # noqa: A002
        tensor = _servable(kind, input)
        if dim is None:
            dim = F._get_softmax_dim(kind, tensor.dim(), _stacklevel)  # type: ignore[attr-defined]
        return getattr(exported, kind)(tensor, dim, dtype)  # type: ignore[no-any-return]

    return call


def _plainly(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of isograd.torch with torch's arguments, for plain tensors only."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                _servable(name, value)
        return call(*args, **kwargs)

    return checked


def _layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """torch.layer_norm, whose last argument says nothing to isograd."""
    return exported.layer_norm(input, normalized_shape, weight, bias, eps)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002
    """torch.nn.functional.silu; what is overwritten is kept for the gradient."""
    return input.copy_(exported.silu(input.clone())) if inplace else exported.silu(input)


def _in_place(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method that writes into its tensor; torch sees a copy, which it differentiates and may refuse."""

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.copy_(call(self, *args, **kwargs))

    return method


REPLACED: dict[Any, tuple[str, Callable[..., Any]]] = {}
for _kind in ("softmax", "log_softmax"):
    for _module, _name in ((torch, "torch"), (torch.special, "torch.special"), (Tensor, "torch.Tensor")):
        REPLACED[getattr(_module, _kind)] = (f"{_name}.{_kind}", _plain(_kind))
    REPLACED[getattr(F, _kind)] = (f"torch.nn.functional.{_kind}", _functional(_kind))

_INDEXING: tuple[Callable[..., Any], ...] = (
    indexing.gather,
    indexing.take_along_dim,
    indexing.scatter_add,
    indexing.index_add,
    indexing.index_select,
    exported.topk,
)
_FUNCTIONAL: tuple[Callable[..., Any], ...] = (
    dot_product.scaled_dot_product_attention,
    indexing.embedding,
    losses.cross_entropy,
    exported.gelu,
    exported.kl_div,
    exported.layer_norm,
    exported.rms_norm,
)
for _call in _INDEXING:
    _kind = _call.__name__
    for _module, _name in ((torch, "torch"), (Tensor, "torch.Tensor")):
        REPLACED[getattr(_module, _kind)] = (f"{_name}.{_kind}", _plainly(_kind, _call))
    if hasattr(Tensor, f"{_kind}_"):
        _method = _plainly(_kind, _in_place(_call))
        REPLACED[getattr(Tensor, f"{_kind}_")] = (f"torch.Tensor.{_kind}_", _method)
for _call in _FUNCTIONAL:
    _kind = _call.__name__
    REPLACED[getattr(F, _kind)] = (f"torch.nn.functional.{_kind}", _plainly(_kind, _call))
REPLACED[F.silu] = ("torch.nn.functional.silu", _plainly("silu", _silu))
REPLACED[torch.layer_norm] = ("torch.layer_norm", _plainly("layer_norm", _layer_norm))
REPLACED[torch.rms_norm] = ("torch.rms_norm", _plainly("rms_norm", exported.rms_norm))


# What is replaced besides, or instead, where products are order-free too.
PRODUCTS: dict[Any, tuple[str, Callable[..., Any]]] = {}
for _call in (
    product_functions.matmul,
    product_functions.mm,
    product_functions.mv,
    product_functions.dot,
    product_functions.bmm,
    product_functions.addmm,
    product_functions.addmv,
    product_functions.baddbmm,
):
    for _module, _name in ((torch, "torch"), (Tensor, "torch.Tensor")):
        PRODUCTS[getattr(_module, _call.__name__)] = (f"{_name}.{_call.__name__}", _plainly(_call.__name__, _call))
for _function, _name, _call in (
    (Tensor.__matmul__, "torch.Tensor.__matmul__", product_functions.matmul),
    (Tensor.__rmatmul__, "torch.Tensor.__rmatmul__", product_functions.rmatmul),
    (torch.linalg.matmul, "torch.linalg.matmul", product_functions.matmul),
    (torch.einsum, "torch.einsum", product_functions.einsum),
    (F.linear, "torch.nn.functional.linear", product_functions.linear),
    (
        F.scaled_dot_product_attention,
        "torch.nn.functional.scaled_dot_product_attention",
        functools.partial(dot_product.scaled_dot_product_attention, precision="int16"),
    ),
):
    PRODUCTS[_function] = (_name, _plainly(_name.rpartition(".")[2], _call))
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    _call = _plainly("linear_cross_entropy", product_functions.linear_cross_entropy)
    PRODUCTS[F.linear_cross_entropy] = ("torch.nn.functional.linear_cross_entropy", _call)


# What is replaced where a block says which samples of a step it has; these take them as an argument.
SAMPLED: dict[Any, tuple[str, Callable[..., Any]]] = {
    F.dropout: ("torch.nn.functional.dropout", _plainly("dropout", dropping.dropout)),
    torch.dropout: ("torch.dropout", _plainly("dropout", dropping.torch_dropout)),
}


class Left(NamedTuple):
    """A function that is left to torch: its name, the reason, and for which arguments it is worth a line."""

    name: str
    reason: str
    counts: Callable[[tuple[Any, ...], dict[str, Any]], bool]


def _training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a dropout that is on by default drops."""
    return bool(args[2] if len(args) > 2 else kwargs.get("training", True))


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _given(argument: str, place: int | None = None) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Whether an argument that is off by default is given."""

    def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        value = args[place] if place is not None and place < len(args) else kwargs.get(argument)
        return value is not None and value is not False

    return given


def of_floats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Sums of integers are exact in any order."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.is_floating_point() or value.is_complex()
    return True


def _differentiated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A selection with a gradient, which torch adds up."""
    return torch.is_grad_enabled() and len(args) > 0 and isinstance(args[0], Tensor) and args[0].requires_grad


def _selects_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`w[ids]`: indices may repeat; those of a boolean mask or a slice do not."""
    if not _differentiated(args, kwargs):
        return False
    for index in args[1] if isinstance(args[1], tuple) else (args[1],):
        if isinstance(index, list):
            return True
        if isinstance(index, Tensor) and index.dim() and index.dtype not in (torch.bool, torch.uint8):
            return True
    return False


_FUSED = "computes its softmax inside one fused operation of torch's"
_SUMS = "adds up repeated indices in a way that isograd has no operator for"
_SELECTED = "its gradient adds up repeated indices in torch's order; accepted: index_select, gather, embedding"
_ORDER = "adds up in an order of torch's own; isograd has no operator for it"
_PRODUCT = 'adds up in an order of torch\'s own; products="int16" replaces it'
_DRAWN = "draws from torch's generator, elsewhere for another split of the step; accepted: dropout of elements"
LEFT: dict[Any, Left] = {}


# What is left to torch where a block says which samples it has.
LEFT_OF_SAMPLES: dict[Any, Left] = {}


def _leave(
    reason: str,
    counts: Callable[[tuple[Any, ...], dict[str, Any]], bool],
    places: Iterable[tuple[Any, str]],
    names: str,
    left: dict[Any, Left] = LEFT,
) -> None:
    for module, prefix in places:
        for name in names.split():
            if hasattr(module, name):  # some are younger than the oldest torch that is served
                left.setdefault(getattr(module, name), Left(f"{prefix}.{name}", reason, counts))


_TORCH, _METHOD, _F = (torch, "torch"), (Tensor, "torch.Tensor"), (F, "torch.nn.functional")
_leave(_FUSED, _always, [_F], "linear_cross_entropy")
_leave(_FUSED, _always, [(torch._C._nn, "torch._C._nn")], "cross_entropy_loss")
_leave(
    _FUSED,
    _always,
    [_TORCH],
    "_native_multi_head_attention _transformer_encoder_layer_fwd _scaled_dot_product_attention_math "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _softmax _log_softmax _masked_softmax",
)
_leave(_FUSED, _always, [(torch.sparse, "torch.sparse")], "softmax log_softmax")
_leave(_SUMS, _always, [_F], "embedding_bag")
_leave(
    _SUMS,
    _always,
    [_TORCH, _METHOD],
    "scatter_reduce scatter_reduce_ index_reduce index_reduce_ segment_reduce",
)
_leave(_SUMS, _given("reduce"), [_TORCH, _METHOD], "scatter scatter_")
_leave(_SUMS, _given("accumulate", 3), [_TORCH, _METHOD], "index_put index_put_ put put_")
_leave(_SUMS, _given("weights", 1), [_TORCH, _METHOD], "bincount")
_leave(_SUMS, _given("weight"), [_TORCH, _METHOD], "histogram histogramdd")
_leave(_SELECTED, _selects_rows, [_METHOD], "__getitem__")
_leave(_SELECTED, _differentiated, [_TORCH, _METHOD], "take")
_leave(_DRAWN, _training, [_F], "dropout1d dropout2d dropout3d", LEFT_OF_SAMPLES)
_leave(_DRAWN, _given("training", 2), [_F], "alpha_dropout feature_alpha_dropout", LEFT_OF_SAMPLES)
_leave(
    _DRAWN,
    _given("train", 2),
    [_TORCH],
    "dropout_ native_dropout feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_",
    LEFT_OF_SAMPLES,
)
# Products, convolutions, recurrent layers, norms, sums and the losses that are sums.
_leave(
    _ORDER,
    of_floats,
    [_F],
    "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "group_norm instance_norm batch_norm local_response_norm normalize cosine_similarity pairwise_distance "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d lp_pool1d lp_pool2d "
    "lp_pool3d nll_loss gaussian_nll_loss poisson_nll_loss mse_loss l1_loss smooth_l1_loss huber_loss ctc_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits margin_ranking_loss hinge_embedding_loss "
    "cosine_embedding_loss multi_margin_loss multilabel_margin_loss soft_margin_loss multilabel_soft_margin_loss "
    "triplet_margin_loss triplet_margin_with_distance_loss",
)
_leave(
    _ORDER,
    of_floats,
    [(torch.linalg, "torch.linalg")],
    "matmul multi_dot vecdot norm vector_norm matrix_norm",
)
_leave(
    _ORDER,
    of_floats,
    [_TORCH, _METHOD],
    "matmul __matmul__ __rmatmul__ mm bmm mv dot vdot inner addmm addmm_ addbmm addbmm_ baddbmm baddbmm_ addmv addmv_ "
    "einsum tensordot chain_matmul cdist lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "group_norm instance_norm batch_norm native_layer_norm native_batch_norm native_group_norm "
    "sum nansum mean nanmean var var_mean std std_mean prod cumsum cumsum_ cumprod cumprod_ logsumexp logcumsumexp "
    "norm renorm renorm_ dist trace cov corrcoef trapezoid cumulative_trapezoid",
)
for _function in PRODUCTS.keys() & LEFT.keys():
    LEFT[_function] = LEFT[_function]._replace(reason=_PRODUCT)


def _opened(function: FunctionType) -> FunctionType:
    """A copy of a torch function written in Python whose inner calls meet the mode.

    The original hands itself to the mode first, and a mode is off while it handles a function.
    """

    def nobody_overrides(*tensors: Any) -> bool:
        return False

    scope = dict(function.__globals__)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
        scope[name] = nobody_overrides
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


OPENED: dict[Any, FunctionType] = {
    function: _opened(function)
    for function in (F.softmin, F.gumbel_softmax, F.multi_head_attention_forward)
    if isinstance(function, FunctionType)
}
# What is recomputed in backward, or called there by hooks, meets the mode too. Subclasses of tensors may handle these.
OPENED_BACKWARDS: dict[Any, FunctionType] = {
    function: _opened(function)
    for function in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
    if isinstance(function, FunctionType)
}


def is_plain(kind: type) -> bool:
    """Whether tensors of a type mean what torch's own do."""
    return kind in (Tensor, torch.nn.Parameter)


def _servable(kind: str, input: Any) -> Tensor:  # noqa: A002
    """The tensor, or UnsupportedError for what would lose its meaning on the way."""
    if not is_plain(type(input)) and not _is_fake(input):
        raise UnsupportedError(f"{kind}: input is a {type(input).__name__}; accepted: plain tensors")
    tensor: Tensor = input
    return tensor


def _is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)
