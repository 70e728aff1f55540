"""isograd for MLX: functions of MLX arrays with MLX's own differentiation.

    import isograd.mlx as igm

    y = igm.softmax(x, axis=-1)
    loss_and_grad = mx.value_and_grad(lambda x: -igm.log_softmax(x)[..., 0].sum())

On an Apple GPU they are lazy and run the library's Metal kernels; elsewhere MLX's arrays are computed by the CPU's
kernels, at once. First derivatives have the library's bits; what is not differentiated says so: second derivatives,
forward mode (`mx.jvp`) and `mx.vmap` raise UnsupportedError.
"""

try:
    import mlx.core as _mlx_core  # noqa: F401
except ImportError as error:
    raise ImportError("isograd.mlx needs MLX, which is not installed: pip install 'isograd[mlx]'") from error

from isograd.mlx.functional import attention, attention_delta, log_softmax, moe_router, softmax, take_along_axis

__all__ = ["attention", "attention_delta", "log_softmax", "moe_router", "softmax", "take_along_axis"]
