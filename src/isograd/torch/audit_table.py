"""What is known of torch's operators: whether their bits depend on the run, the batch split, or the machine.

By name without namespace, trailing underscore, and `_foreach_`. Not here are views, what has the tag `pointwise`, and
what has `nondeterministic_seeded`; on integers all but the last are exact, and the rest is unknown.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """Operators of one kind, and what replaces them."""

    kind: str
    names: str
    hint: str = ""


EXACT = "copies, selections, and arithmetic that IEEE 754 defines"
SCALED = "exact but where alpha scales an operand: some machines round once, others twice"
ELEMENTWISE = "elementwise; by a library's function, or with fused multiplications and additions"
SUM = "sums floats in an order that depends on shapes and the machine"
PRODUCT = "a product; sums floats in an order that depends on shapes, the library and the machine"
ATOMIC = "on a GPU floats are added in the order in which threads come"
ACCUMULATED = "indices that repeat are added in the order in which threads come, where accumulate is set"
TIES = "which of equal elements comes first is open"
ALGORITHM = "the library chooses among algorithms, of which some add in the order in which threads come"

_USE = "run the step under `igt.use()`"
_FIXED = "one kind of machine, and micro-batches of one shape, summed by `igt.distributed.GradientSum`"
_DETERMINISTIC = "`torch.use_deterministic_algorithms(True)` fixes the order on one kind of machine"

TABLE = (
    Row(
        EXACT,
        # memory
        "_to_copy alias_copy arange as_strided_scatter cat clone constant_pad_nd copy detach_copy "
        "diag_embed diagonal_scatter empty empty_like empty_permuted empty_strided eye fill fill_diagonal flip full "
        "full_like lift lift_fresh lift_fresh_copy masked_fill masked_scatter masked_select new_empty "
        "new_empty_strided new_full new_ones new_zeros nonzero ones ones_like reflection_pad1d reflection_pad2d "
        "reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d resize roll "
        "rot90 scalar_tensor select_backward select_scatter set slice_backward slice_scatter split_with_sizes_copy "
        "stack tril triu unfold_copy zero zeros zeros_like _reshape_alias _unsafe_view _local_scalar_dense "
        "_copy_from_and_resize _chunk_cat _pin_memory pixel_shuffle pixel_unshuffle channel_shuffle is_pinned equal "
        "_assert_async _nested_view_from_buffer record_stream result_type is_nonzero item "
        # selection
        "embedding gather index index_copy index_fill index_select _unsafe_index where bucketize searchsorted take "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d max_pool2d_with_indices max_pool3d_with_indices "
        "adaptive_max_pool2d adaptive_max_pool3d max_unpool2d im2col _unique2 unique_dim unique_consecutive "
        # comparisons, maxima
        "all amax amin aminmax any argmax argmin clamp clamp_max clamp_min clip count_nonzero cummax cummin "
        "_cummax_helper _cummin_helper eq fmax fmin ge gt heaviside isclose isfinite isinf isnan isneginf isposinf le "
        "logical_and logical_not logical_or logical_xor lt max maximum min minimum ne sign sgn signbit isin "
        # arithmetic; a step of IEEE 754 each
        "abs ceil copysign div divide floor frac frexp fmod hardshrink hardtanh hardtanh_backward hardshrink_backward "
        "leaky_relu leaky_relu_backward mul multiply nan_to_num native_dropout_backward neg nextafter positive "
        "reciprocal relu relu6 remainder round softshrink softshrink_backward sqrt square threshold "
        "threshold_backward true_divide trunc _amp_update_scale _amp_foreach_non_finite_check_and_unscale",
    ),
    Row(SCALED, "add sub subtract rsub"),
    Row(ELEMENTWISE, "linspace logspace", "fill such a table on one machine and keep it"),
    Row(
        ELEMENTWISE,
        "_fused_adam _fused_adamw _fused_sgd _fused_adagrad addcdiv addcmul lerp",
        "in an optimizer, `igt.optim.AdamW`, `igt.optim.SGD` or `igt.optim.Lion`",
    ),
    Row(
        ELEMENTWISE,
        "exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid erf pow rsqrt gelu silu softplus glu mish elu "
        "hardswish hardsigmoid hardswish_backward hardsigmoid_backward gelu_backward silu_backward tanh_backward "
        "sigmoid_backward softplus_backward glu_backward mish_backward elu_backward log_sigmoid_forward "
        "log_sigmoid_backward smooth_l1_loss_backward huber_loss_backward mse_loss_backward polar "
        "binary_cross_entropy_backward",
    ),
    Row(SUM, "_softmax _softmax_backward_data softmax", f"`igt.softmax`, or {_USE}"),
    Row(SUM, "_log_softmax _log_softmax_backward_data log_softmax", f"`igt.log_softmax`, or {_USE}"),
    Row(
        SUM,
        "_fused_rms_norm _fused_rms_norm_backward rms_norm",
        f"`igt.rms_norm`, or {_USE}",
    ),
    Row(SUM, "native_layer_norm native_layer_norm_backward layer_norm", f"`igt.layer_norm`, or {_USE}"),
    Row(
        SUM,
        "_safe_softmax _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _flash_attention_forward "
        "_efficient_attention_forward _cudnn_attention_forward _scaled_dot_product_fused_attention_overrideable "
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        f"`igt.scaled_dot_product_attention`, or {_USE}",
    ),
    Row(
        ATOMIC,
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward _flash_attention_backward _efficient_attention_backward "
        "_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable_backward",
        f"`igt.scaled_dot_product_attention`, or {_USE}",
    ),
    Row(SUM, "nll_loss_forward nll_loss_backward", f"`igt.cross_entropy`, or {_USE}"),
    Row(SUM, "norm linalg_vector_norm", "of gradients, `igt.clip_grad_norm_`"),
    Row(
        SUM,
        "sum mean nansum prod var var_mean std std_mean logsumexp _logcumsumexp "
        "native_group_norm native_group_norm_backward "
        "native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward "
        "_native_batch_norm_legit _native_batch_norm_legit_no_training batch_norm_backward _batch_norm_with_update "
        "cumprod dist renorm trace mse_loss smooth_l1_loss huber_loss soft_margin_loss multi_margin_loss "
        "binary_cross_entropy binary_cross_entropy_with_logits avg_pool2d avg_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d col2im embedding_renorm _fft_c2c _fft_c2r _fft_r2c upsample_bilinear2d "
        "upsample_bicubic2d upsample_linear1d upsample_trilinear3d grid_sampler_2d grid_sampler_3d",
        _FIXED,
    ),
    Row(
        PRODUCT,
        "mm addmm bmm baddbmm addbmm addmv mv dot vdot addr linear matmul _addmm_activation mkldnn_linear _scaled_mm "
        "_grouped_mm _scaled_grouped_mm _weight_norm_interface _weight_norm_interface_backward _cdist_forward "
        "_cdist_backward _pdist_forward _int_mm bilinear _trilinear",
        _FIXED,
    ),
    Row(
        ALGORITHM,
        "convolution convolution_backward _convolution cudnn_convolution cudnn_convolution_transpose "
        "mkldnn_convolution convolution_overrideable convolution_backward_overrideable miopen_convolution "
        "_cudnn_rnn _cudnn_rnn_backward "
        "_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell _thnn_fused_gru_cell_backward "
        "mkldnn_rnn_layer mkldnn_rnn_layer_backward",
        "`torch.backends.cudnn.deterministic = True` and `torch.backends.cudnn.benchmark = False`",
    ),
    Row(ATOMIC, "scatter_add", f"`igt.scatter_add`, or {_USE}"),
    Row(ATOMIC, "index_add", f"`igt.index_add`, or {_USE}"),
    Row(ATOMIC, "embedding_dense_backward", f"`igt.embedding`, or {_USE}"),
    Row(
        ATOMIC,
        "scatter scatter_reduce index_reduce segment_reduce _segment_reduce_backward _embedding_bag "
        "_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only histc cumsum "
        "nll_loss2d_forward nll_loss2d_backward _ctc_loss _ctc_loss_backward avg_pool2d_backward avg_pool3d_backward "
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward max_pool2d_with_indices_backward "
        "max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward "
        "fractional_max_pool2d_backward fractional_max_pool3d_backward reflection_pad1d_backward "
        "reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
        "replication_pad3d_backward upsample_linear1d_backward upsample_bilinear2d_backward "
        "upsample_bicubic2d_backward upsample_trilinear3d_backward upsample_nearest1d_backward "
        "upsample_nearest2d_backward upsample_nearest3d_backward grid_sampler_2d_backward grid_sampler_3d_backward "
        "unfold_backward bincount",
        _DETERMINISTIC,
    ),
    Row(
        ACCUMULATED,
        "index_put _index_put_impl _unsafe_index_put put",
        "`igt.index_select` or `igt.embedding` in place of `w[ids]`, whose gradient this is",
    ),
    Row(TIES, "topk", f"`igt.topk`, or {_USE}"),
    Row(TIES, "sort argsort kthvalue median nanmedian mode", "`stable=True`, where the function has it"),
)

# By namespace, operators that add over ranks; all others in it move data.
COLLECTIVES = {
    "c10d": "allreduce_ allreduce_coalesced_ reduce_ reduce_scatter_ _reduce_scatter_base_ "
    "reduce_scatter_tensor_coalesced_",
    "_c10d_functional": "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ reduce_scatter_tensor "
    "reduce_scatter_tensor_coalesced",
    "fsdp": "",
}
COLLECTIVE = "adds floats of all ranks in an order that depends on their number, the network and the library"
COLLECTIVE_HINT = "of gradients, `igt.distributed.GradientSum`"
RANDOM = "depends on the state of a generator, which differs between batch splits, devices and numbers of ranks"
SEED = "seed before the run, and draw for the whole batch whatever its split"
UNKNOWN = "nothing is known of this operator"
UNKNOWN_HINT = "see whether its sums have a fixed order, or compare two runs with `igt.trace`"
# The addition of a gradient to what a micro-batch before has left.
ACCUMULATION = "adds the gradients of micro-batches in floats: their number and order show in the sum"
ACCUMULATION_HINT = "`igt.distributed.GradientSum`"
ROWS = {name: row for row in TABLE for name in row.names.split()}
