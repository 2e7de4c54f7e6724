"""The ops that contain no product of matrices: known by name, by tag, or as views.

Pointwise ops and views carry a tag or a property of their own. The rest is named here, so that an op which nobody has
looked at is reported as unpriced.
"""

from __future__ import annotations

from typing import Any

NAMES = frozenset(
    f"aten.{name}"
    for name in """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _batch_norm_with_update
    _conj _conj_physical _cummax_helper _embedding_bag _embedding_bag_backward _embedding_bag_forward_only
    _fused_dropout _fused_rms_norm _fused_rms_norm_backward _local_scalar_dense _log_softmax
    _log_softmax_backward_data _masked_softmax _masked_softmax_backward _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _nested_tensor_from_mask
    _reshape_alias _reshape_copy _resize_output _safe_softmax _softmax _softmax_backward_data _sparse_broadcast_to
    _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
    _to_copy _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate
    _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa _weight_norm_interface
    _weight_norm_interface_backward adaptive_avg_pool1d adaptive_max_pool2d adaptive_max_pool2d_backward alias all
    alias_copy amax amin aminmax any arange argmax argmin argsort as_strided_ as_strided_scatter avg_pool1d avg_pool2d
    avg_pool2d_backward avg_pool3d bernoulli bernoulli_ bincount bucketize batch_norm_backward cat clone
    col2im constant_pad_nd copy copy_ count_nonzero cross_entropy_loss cummax cummin cumprod cumsum detach_
    diagonal_backward dropout embedding embedding_backward embedding_dense_backward embedding_renorm_ empty
    empty_like empty_permuted empty_strided equal exponential_ eye fill fill_ flip full full_like gather geometric_
    glu glu_backward histc im2col index index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put
    index_put_ index_select is_same_size kthvalue lift lift_fresh lift_fresh_copy linspace log_softmax logcumsumexp
    logspace logsumexp max max_pool1d max_pool2d max_pool2d_with_indices max_pool2d_with_indices_backward
    max_pool3d_with_indices mean median min mish_backward mse_loss mse_loss_backward multinomial multi_margin_loss
    nanmean nansum narrow_copy native_batch_norm native_batch_norm_backward native_dropout native_dropout_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward new_empty
    new_empty_strided new_full new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward
    nll_loss_forward nonzero nonzero_static norm normal normal_ one_hot ones ones_like pixel_shuffle pixel_unshuffle
    poisson prod put rand rand_like randint randint_like randn randn_like random_ randperm reflection_pad1d
    reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward repeat repeat_interleave replication_pad1d
    replication_pad2d resize_ roll rot90 scalar_tensor scatter scatter_ scatter_add scatter_add_ scatter_reduce
    scatter_reduce_ searchsorted select_backward select_scatter set_ slice_backward slice_scatter smooth_l1_loss
    smooth_l1_loss_backward soft_margin_loss softmax sort split_with_sizes_copy stack std std_mean sum
    sym_numel sym_size sym_storage_offset sym_stride take topk trace tril tril_ tril_indices triu triu_ triu_indices
    unbind_copy unfold_backward uniform uniform_ unique_consecutive unique_dim upsample_bicubic2d
    upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest2d_backward value_selecting_reduction_backward var var_mean zero zero_ zeros
    zeros_like cudnn_batch_norm cudnn_batch_norm_backward _cudnn_init_dropout_state linalg_vector_norm _assert_async
    _assert_scalar _assert_tensor_metadata _is_all_true _is_any_true diagonal_scatter masked_scatter
    floor_divide floor_divide_ fmod remainder polar view_as_complex view_as_real complex real imag
    unsafe_split unsafe_split_with_sizes unsafe_chunk masked_fill size stride numel dim is_contiguous
    sym_is_contiguous storage_offset addr _linalg_check_errors transpose t squeeze unsqueeze swapaxes swapdims
    as_strided
    masked_scatter_backward masked_select native_norm renorm slice_copy isin
    """.split()
)
NAMES |= {f"profiler._record_function_{name}" for name in ("enter", "enter_new", "exit")}
NAMES |= {"prim.device", "prims.convert_element_type", "prims.iota", "prims.broadcast_in_dim"}


def has_no_product(name: str, overload: Any, pointwise: Any) -> bool:
    """Whether an op is known to multiply no matrices. ``pointwise`` is ``torch.Tag.pointwise``."""
    # What is done in place (masked_fill_) has the price of what is not.
    return name in NAMES or name.removesuffix("_") in NAMES or overload.is_view or pointwise in overload.tags
