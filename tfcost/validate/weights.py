"""Copy weights from PyTorch's own Transformer modules into the reference, so that the two can be compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tfcost.errors import InputError
from tfcost.validate.attention import MultiHeadAttention
from tfcost.validate.layers import TransformerLayer
from tfcost.validate.reference import Decoder, Encoder, Transformer


@torch.no_grad()
def copy_torch_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy the parameters of ``theirs`` into ``ours``, in place; dtypes and devices are converted.

    =====================================  ==================================================
    theirs                                 ours
    =====================================  ==================================================
    ``nn.MultiheadAttention``              `MultiHeadAttention`
    ``nn.TransformerEncoderLayer``         `EncoderLayer`
    ``nn.TransformerDecoderLayer``         `DecoderLayer`
    ``nn.TransformerEncoder``, ``...Decoder``  `Encoder`, `Decoder` (or a single-stack `Transformer`)
    ``nn.Transformer``                     `Transformer` with ``arch="encoder-decoder"``
    =====================================  ==================================================

    ``nn.MultiheadAttention`` keeps query, key and value matrices in one ``[3d, d]`` parameter, in that order; it is
    split. Raises ``InputError`` for modules that do not match: other classes, layers, shapes, biases or final norms.
    """
    if isinstance(ours, MultiHeadAttention) and isinstance(theirs, nn.MultiheadAttention):
        _copy_attention(ours, theirs)
    elif isinstance(ours, TransformerLayer) and isinstance(
        theirs, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    ):
        _copy_layer(ours, theirs)
    elif isinstance(ours, Transformer) and isinstance(theirs, nn.Transformer) and ours.encoder and ours.decoder:
        copy_torch_weights(ours.encoder, theirs.encoder)
        copy_torch_weights(ours.decoder, theirs.decoder)
    elif isinstance(ours, Encoder | Decoder | Transformer) and isinstance(
        theirs, nn.TransformerEncoder | nn.TransformerDecoder
    ):
        if len(ours.layer) != len(theirs.layers):
            raise InputError(f"cannot copy {len(theirs.layers)} layers into {len(ours.layer)}")
        for our_layer, their_layer in zip(ours.layer, theirs.layers, strict=True):
            copy_torch_weights(our_layer, their_layer)
        _copy_plain(ours.final_norm, theirs.norm)
    else:
        raise InputError(f"cannot copy a {type(theirs).__name__} into a {type(ours).__name__}")


def _copy_layer(ours: TransformerLayer, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> None:
    _copy_attention(ours.attention, theirs.self_attn)
    norms = [theirs.norm1, theirs.norm2]
    if isinstance(theirs, nn.TransformerDecoderLayer):
        if ours.cross_attention is None:
            raise InputError("cannot copy a decoder layer into one without cross-attention")
        _copy_attention(ours.cross_attention, theirs.multihead_attn)
        norms.append(theirs.norm3)
    elif ours.cross_attention is not None:
        raise InputError("cannot copy an encoder layer into one with cross-attention")
    our_norms = [norm for norm in (ours.attention_norm, ours.cross_attention_norm, ours.mlp_norm) if norm is not None]
    for our_norm, their_norm in zip(our_norms, norms, strict=True):
        _copy_plain(our_norm, their_norm)
    _copy_plain(ours.mlp.up, theirs.linear1)
    _copy_plain(ours.mlp.down, theirs.linear2)


def _copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    if theirs.in_proj_weight is None:
        raise InputError("cannot copy an attention whose keys or values have their own width")
    weights = theirs.in_proj_weight.chunk(3)
    biases: tuple[Tensor | None, ...] = (None, None, None)
    if theirs.in_proj_bias is not None:
        biases = theirs.in_proj_bias.chunk(3)
    for linear, weight, bias in zip((ours.query, ours.key, ours.value), weights, biases, strict=True):
        _copy(linear.weight, weight)
        _copy(linear.bias, bias)
    _copy_plain(ours.output, theirs.out_proj)


def _copy_plain(ours: nn.Module | None, theirs: nn.Module | None) -> None:
    """Copy ``weight`` and ``bias`` of a projection or norm; a Conv1d of width 1 takes a Linear's."""
    if (ours is None) != (theirs is None):
        raise InputError("cannot copy: one has a final norm and the other has not")
    if ours is not None and theirs is not None:
        _copy(getattr(ours, "weight", None), getattr(theirs, "weight", None))
        _copy(getattr(ours, "bias", None), getattr(theirs, "bias", None))


def _copy(ours: Tensor | None, theirs: Tensor | None) -> None:
    if (ours is None) != (theirs is None):
        raise InputError("cannot copy: one has biases and the other has not")
    if ours is not None and theirs is not None:
        if ours.numel() != theirs.numel() or ours.shape[:2] != theirs.shape[:2]:
            raise InputError(f"cannot copy a {list(theirs.shape)} parameter into {list(ours.shape)}")
        ours.copy_(theirs.view_as(ours))
