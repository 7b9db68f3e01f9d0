"""The ops that the models of the zoo run."""

# Seen as a whole one level up (attention, recurrent layers), or no tensor comes out.
NO_RULE_NEEDED = {
    "prim.device.default",
    "aten._local_scalar_dense.default",
    "aten.mkldnn_rnn_layer.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
}

_NAMES = """
_adaptive_avg_pool2d.default _fft_c2c.default _grouped_mm.default _safe_softmax.default _softmax.default
_to_copy.default _unsafe_view.default _weight_norm_interface.default abs.default add.Tensor add_.Tensor
addcmul.default addmm.default alias.default all.default amax.default arange.default arange.start
arange.start_step argmax.default as_strided_.default avg_pool2d.default baddbmm.default bitwise_and.Tensor
bitwise_not.default bmm.default cat.default clamp.default clamp_min.default clone.default col2im.default
constant_pad_nd.default convolution.default copy_.default cos.default cumsum.default detach.default div.Tensor
div.Tensor_mode div_.Tensor embedding.default empty.memory_format empty_like.default eq.Scalar eq.Tensor
exp.default expand.default fill_.Tensor floor_divide.default full.default full_like.default gather.default
ge.Scalar ge.Tensor gelu.default glu.default gt.Scalar gt.Tensor hardsigmoid.default hardswish.default
hardswish_.default hardtanh.default hardtanh_.default histc.default im2col.default index.Tensor
index_put_.default index_select.default le.Tensor leaky_relu_.default lift_fresh.default
linalg_vector_norm.default log.default lt.Scalar masked_fill.Scalar max.dim max_pool2d_with_indices.default
maximum.default mean.dim minimum.default mm.default mul.Scalar mul.Tensor native_batch_norm.default
native_group_norm.default native_layer_norm.default ne.Scalar neg.default new_ones.default new_zeros.default
ones.default permute.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor rand.default reciprocal.default
reflection_pad2d.default relu.default relu_.default repeat.default roll.default rsqrt.default rsub.Scalar
scalar_tensor.default select.int sigmoid.default silu.default silu_.default sin.default slice.Tensor
softplus.default sort.default split.Tensor split_with_sizes.default sqrt.default squeeze.dim stack.default
sub.Tensor sum.dim_IntList t.default tanh.default topk.default transpose.int unbind.int unfold.default
unsqueeze.default upsample_bicubic2d.default upsample_bilinear2d.default upsample_linear1d.default
upsample_nearest2d.default view.default view_as_real.default where.self zeros.default zeros_like.default
"""
ZOO_OPS = [f"aten.{name}" for name in _NAMES.split()]
