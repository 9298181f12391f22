"""The residual blocks of timm, torchvision and transformers, and ours: which of their modules compute f in x + f(x)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

__all__ = ["BLOCKS", "SWITCHES"]

Versions: TypeAlias = tuple[tuple[str, ...], ...]

_PRE_NORM: Versions = (("norm1 attn ls1? drop_path1", "norm2 mlp ls2? drop_path2"),)
_POOLED: Versions = (("attn ls1? drop_path1", "norm2 mlp ls2? drop_path2"),)  # norm1 also feeds the shortcut
_VIT: Versions = (
    ("layernorm_before attention", "layernorm_after mlp"),
    ("layernorm_before attention", "layernorm_after intermediate output.dense"),  # output adds x
)
_BEIT: Versions = (
    ("layernorm_before attention", "layernorm_after mlp"),
    ("layernorm_before attention", "layernorm_after intermediate output"),
)
_CLIP: Versions = (("layer_norm1 self_attn", "layer_norm2 mlp"),)
_PVT: Versions = (("layer_norm_1 attention", "layer_norm_2 mlp"),)
_DINO: Versions = (("norm1 attention layer_scale1", "norm2 mlp layer_scale2"),)
_SEQUENTIAL: Versions = (("layer",),)
_MOBILE: Versions = (("expand_1x1 conv_3x3 reduce_1x1",),)

BLOCKS: Mapping[tuple[str, str], Versions] = {
    ("timm", "BasicBlock"): (("conv1 bn1 drop_block? act1 aa? conv2 bn2 se? drop_path?",),),
    ("timm", "Bottleneck"): (("conv1 bn1 act1 conv2 bn2 drop_block? act2 aa? conv3 bn3 se? drop_path?",),),
    ("timm", "Bottle2neck"): (("conv3 bn3 se?",),),
    ("timm", "ResNestBottleneck"): (("conv3 bn3",),),
    ("timm", "SelectiveKernelBasic"): (("conv1 conv2 se? drop_path?",),),
    ("timm", "SelectiveKernelBottleneck"): (("conv1 conv2 conv3 se? drop_path?",),),
    ("timm.models.regnet", "Bottleneck"): (("conv1 conv2 se? conv3 drop_path",),),
    ("timm.models.resnetv2", "Bottleneck"): (("conv1 norm1 conv2 norm2 conv3 norm3 drop_path",),),
    ("timm.models.resnetv2", "PreActBasic"): (("conv1 norm2 conv2 drop_path",),),
    ("timm.models.resnetv2", "PreActBottleneck"): (("conv1 norm2 conv2 norm3 conv3 drop_path",),),
    ("timm", "NormFreeBlock"): (("conv1 act2 conv2 act2b? conv2b? attn? act3 conv3 attn_last? drop_path",),),
    ("timm.models.byobnet", "BasicBlock"): (("conv1_kxk attn conv2_kxk attn_last drop_path",),),
    ("timm.models.byobnet", "BottleneckBlock"): (
        ("conv1_1x1 conv2_kxk conv2b_kxk attn conv3_1x1 attn_last drop_path",),
    ),
    ("timm.models.byobnet", "DarkBlock"): (("conv1_1x1 attn conv2_kxk attn_last drop_path",),),
    ("timm.models.byobnet", "EdgeBlock"): (("conv1_kxk attn conv2_1x1 attn_last drop_path",),),
    ("timm", "ConvBnAct"): (("conv bn1 aa? drop_path",),),
    ("timm", "DepthwiseSeparableConv"): (("conv_s2d? bn_s2d? conv_dw bn1 aa? se? conv_pw bn2 drop_path",),),
    ("timm", "InvertedResidual"): (("conv_s2d? bn_s2d? conv_pw bn1 conv_dw bn2 aa? se? conv_pwl bn3 drop_path",),),
    ("timm", "EdgeResidual"): (("conv_exp bn1 aa? se? conv_pwl bn2 drop_path",),),
    ("timm", "UniversalInvertedResidual"): (("dw_start pw_exp dw_mid se? pw_proj dw_end layer_scale drop_path",),),
    ("timm", "GhostBottleneck"): (("ghost1 conv_dw? bn_dw? se? ghost2",),),
    ("timm", "Block"): _PRE_NORM,
    ("timm", "EvaBlock"): _PRE_NORM,
    ("timm", "LayerScaleBlock"): (("norm1 attn", "norm2 mlp"),),
    ("timm", "XCABlock"): (("norm1 attn drop_path1", "norm3 local_mp drop_path3", "norm2 mlp drop_path2"),),
    ("timm", "MixerBlock"): (("norm1 mlp_tokens", "norm2 mlp_channels"),),
    ("timm", "MetaFormerBlock"): (("norm1 token_mixer drop_path1 layer_scale1", "norm2 mlp drop_path2 layer_scale2"),),
    ("timm", "MetaBlock1d"): (("norm1 token_mixer ls1 drop_path1", "norm2 mlp ls2 drop_path2"),),
    ("timm", "MetaBlock2d"): (("token_mixer ls1 drop_path1", "mlp ls2 drop_path2"),),
    ("timm", "ConvNeXtBlock"): (("conv_dw norm mlp drop_path",),),
    ("timm.models.edgenext", "ConvBlock"): (("norm mlp drop_path",),),
    ("timm.models.edgenext", "SplitTransposeBlock"): (("norm mlp",),),
    ("timm.models.starnet", "Block"): (("dwconv2 drop_path",),),
    ("timm", "GatedConvBlock"): (("fc2 drop_path",),),
    ("timm", "RepMixerBlock"): (("mlp layer_scale drop_path",),),
    ("timm.models.fastvit", "AttentionBlock"): (
        ("norm token_mixer layer_scale_1 drop_path1", "mlp layer_scale_2 drop_path2"),
    ),
    ("timm", "SwinTransformerBlock"): _PRE_NORM,
    ("timm", "SwinTransformerV2Block"): (("attn norm1 drop_path1", "mlp norm2 drop_path2"),),
    ("timm", "FocalNetBlock"): (("norm1 modulation norm1_post ls1 drop_path1", "norm2 mlp norm2_post ls2 drop_path2"),),
    ("timm", "GlobalContextVitBlock"): _PRE_NORM,
    ("timm", "SpatialBlock"): _PRE_NORM,
    ("timm", "ChannelBlock"): _PRE_NORM,
    ("timm", "HieraBlock"): _POOLED,
    ("timm", "LevitBlock"): (("attn drop_path1", "mlp drop_path2"),),
    ("timm.models.tiny_vit", "MBConv"): (("conv1 act1 conv2 act2 conv3 drop_path",),),
    ("timm", "TinyVitBlock"): (("attn drop_path1", "mlp drop_path2"),),
    ("timm", "SerialBlock"): (("norm1 factoratt_crpe", "norm2 mlp"),),
    ("timm", "TransformerBlock2d"): _PRE_NORM,
    ("timm", "PartitionAttentionCl"): _PRE_NORM,
    ("timm", "PartitionAttention2d"): _PRE_NORM,
    ("timm", "MbConvBlock"): (("pre_norm down conv1_1x1 norm1 conv2_kxk se_early? norm2 se? conv3_1x1 drop_path",),),
    ("torchvision", "BasicBlock"): (("conv1 bn1 conv2 bn2",),),
    ("torchvision", "Bottleneck"): (("conv1 bn1 conv2 bn2 conv3 bn3",),),
    ("torchvision", "ResBottleneckBlock"): (("f",),),
    ("torchvision", "EncoderBlock"): (("ln_1 self_attention dropout", "ln_2 mlp"),),
    ("torchvision", "CNBlock"): (("block stochastic_depth",),),
    ("torchvision", "SwinTransformerBlock"): (("norm1 attn", "norm2 mlp"),),
    ("torchvision", "SwinTransformerBlockV2"): (("attn norm1", "mlp norm2"),),
    ("torchvision", "MBConv"): (("block stochastic_depth",),),
    ("torchvision", "FusedMBConv"): (("block stochastic_depth",),),
    ("torchvision", "InvertedResidual"): (("conv",), ("block",)),
    ("torchvision", "_InvertedResidual"): (("layers",),),
    ("torchvision.models.maxvit", "MBConv"): (("layers",),),
    ("torchvision", "PartitionAttentionLayer"): (("attn_layer", "mlp_layer"),),
    ("transformers", "ViTLayer"): _VIT,
    ("transformers", "DeiTLayer"): _VIT,
    ("transformers", "ViTMSNLayer"): _VIT,
    ("transformers", "IJepaLayer"): _VIT,
    ("transformers", "DPTViTLayer"): _VIT,
    ("transformers", "CvtLayer"): _VIT,
    ("transformers", "BeitLayer"): _BEIT,
    ("transformers", "Data2VecVisionLayer"): _BEIT,
    ("transformers", "Dinov2Layer"): _DINO,
    ("transformers", "Dinov2WithRegistersLayer"): _DINO,
    ("transformers", "CLIPEncoderLayer"): _CLIP,
    ("transformers", "SiglipEncoderLayer"): _CLIP,
    ("transformers", "Siglip2EncoderLayer"): _CLIP,
    ("transformers", "SegformerLayer"): (
        ("layernorm_before attention", "layernorm_after mlp"),
        ("layer_norm_1 attention", "layer_norm_2 mlp"),
    ),
    ("transformers", "PvtLayer"): _PVT,
    ("transformers", "PvtV2BlockLayer"): _PVT,
    ("transformers", "SwinLayer"): (
        ("layernorm_before attention drop_path", "layernorm_after mlp"),
        ("layernorm_before attention drop_path", "layernorm_after intermediate output"),
    ),
    ("transformers", "Swinv2Layer"): (("attention layernorm_before", "intermediate output layernorm_after"),),
    ("transformers", "HieraLayer"): (("attn", "layernorm_after mlp"),),
    ("transformers", "PoolFormerLayer"): (("before_norm pooling", "after_norm output"),),
    ("transformers", "ConvNextLayer"): (("dwconv layernorm pwconv1 act? pwconv2 drop_path",),),
    ("transformers", "ConvNextV2Layer"): (("dwconv layernorm pwconv1 act? grn pwconv2 drop_path",),),
    ("transformers", "ResNetBasicLayer"): _SEQUENTIAL,
    ("transformers", "ResNetBottleNeckLayer"): _SEQUENTIAL,
    ("transformers", "RegNetXLayer"): _SEQUENTIAL,
    ("transformers", "RegNetYLayer"): _SEQUENTIAL,
    ("transformers", "BitPreActivationBottleneckLayer"): (("conv1 norm2 conv2 norm3 conv3 drop_path",),),
    ("transformers", "BitBottleneckLayer"): (("conv1 norm1 conv2 norm2 conv3 norm3 drop_path",),),
    ("transformers", "EfficientNetBlock"): (
        ("expansion? depthwise_conv squeeze_excite projection.project_conv projection.project_bn",),
    ),
    ("transformers", "MobileNetV2InvertedResidual"): _MOBILE,
    ("transformers", "MobileViTInvertedResidual"): _MOBILE,
    ("transformers", "LevitResidualLayer"): (("module",),),
    ("transformers", "SwiftFormerEncoderBlock"): (("attn", "linear"),),
    ("acclimate", "Block"): (("conv1 norm1 conv2 norm2 drop_path",),),
    ("acclimate", "TransformerBlock"): (("norm1 attn drop_path1", "norm2 mlp drop_path2"),),
}
"""Library (or one of its modules) and class of a block → versions of it in different releases.

A version has one string per branch: the names of its modules in order, with `?` after one that may be absent. The
output of the last one is added to x, perhaps after a multiplication.
"""

SWITCHES = ("has_skip", "use_res_connect", "use_residual", "apply_residual", "shortcut", "projection.apply_dropout")
"""Attributes of a block that are False or None where it has no identity connection."""
