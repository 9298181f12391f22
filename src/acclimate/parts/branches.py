"""Find the residual branches of a network: f in x + f(x).

A table lists the blocks of timm, torchvision, transformers and acclimate. For other networks the user names the modules
whose output is added to x (`branches`; of several in a row, the last one), or those that return x + f(x) (`blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from .wrappers import plain_names

__all__ = ["Branch", "Names", "find_branches"]

Names: TypeAlias = str | Sequence[str]
"""A pattern of module names, with `*` for any text between two dots, such as `"layers.*.mlp"`; or a list of them."""


@dataclass(frozen=True)
class Branch:
    """A residual branch f of x + f(x)."""

    name: str
    """The module's name, or the block's if the table was used."""
    block: int
    """The index of the block that the branch belongs to."""
    modules: tuple[nn.Module, ...]
    """The modules that compute f, in order; the output of the last one is added to x."""
    whole: bool = False
    """The only module is a block that returns x + f(x)."""

    @property
    def first(self) -> nn.Module:
        """The module that takes x."""
        return self.modules[0]

    @property
    def last(self) -> nn.Module:
        """The module that returns f(x)."""
        return self.modules[-1]


# Library (or one of its modules) and class of a block → versions of it in different releases. A version has one string
# per branch: the names of its modules in order, with `?` after one that may be absent. A block with a false attribute
# of `_SWITCHES` has no identity connection.
_BLOCKS: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("timm", "BasicBlock"): (("conv1 bn1 drop_block? act1 aa? conv2 bn2 se? drop_path?",),),
    ("timm", "Bottleneck"): (("conv1 bn1 act1 conv2 bn2 drop_block? act2 aa? conv3 bn3 se? drop_path?",),),
    ("timm.models.regnet", "Bottleneck"): (("conv1 conv2 se? conv3 drop_path",),),
    ("timm.models.resnetv2", "Bottleneck"): (("conv1 norm1 conv2 norm2 conv3 norm3 drop_path",),),
    ("timm.models.resnetv2", "PreActBottleneck"): (("conv1 norm2 conv2 norm3 conv3 drop_path",),),
    ("timm", "Block"): (("norm1 attn ls1? drop_path1", "norm2 mlp ls2? drop_path2"),),
    ("timm", "EvaBlock"): (("norm1 attn drop_path1", "norm2 mlp drop_path2"),),
    ("timm", "MixerBlock"): (("norm1 mlp_tokens", "norm2 mlp_channels"),),
    ("timm", "ConvNeXtBlock"): (("conv_dw norm mlp drop_path",),),
    ("timm", "SwinTransformerBlock"): (("norm1 attn drop_path1", "norm2 mlp drop_path2"),),
    ("timm", "SwinTransformerV2Block"): (("attn norm1 drop_path1", "mlp norm2 drop_path2"),),
    ("timm", "ConvBnAct"): (("conv bn1 aa? drop_path",),),
    ("timm", "DepthwiseSeparableConv"): (("conv_s2d? bn_s2d? conv_dw bn1 aa? se? conv_pw bn2 drop_path",),),
    ("timm", "InvertedResidual"): (("conv_s2d? bn_s2d? conv_pw bn1 conv_dw bn2 aa? se? conv_pwl bn3 drop_path",),),
    ("timm", "EdgeResidual"): (("conv_exp bn1 aa? se? conv_pwl bn2 drop_path",),),
    ("timm", "UniversalInvertedResidual"): (("dw_start pw_exp dw_mid se? pw_proj dw_end layer_scale drop_path",),),
    ("torchvision", "BasicBlock"): (("conv1 bn1 conv2 bn2",),),
    ("torchvision", "Bottleneck"): (("conv1 bn1 conv2 bn2 conv3 bn3",),),
    ("torchvision", "EncoderBlock"): (("ln_1 self_attention dropout", "ln_2 mlp"),),
    ("torchvision", "CNBlock"): (("block stochastic_depth",),),
    ("torchvision", "SwinTransformerBlock"): (("norm1 attn", "norm2 mlp"),),
    ("torchvision", "SwinTransformerBlockV2"): (("attn norm1", "mlp norm2"),),
    ("torchvision", "MBConv"): (("block stochastic_depth",),),
    ("torchvision", "FusedMBConv"): (("block stochastic_depth",),),
    ("torchvision", "InvertedResidual"): (("conv",), ("block",)),
    ("transformers", "ViTLayer"): (
        ("layernorm_before attention", "layernorm_after mlp"),
        ("layernorm_before attention", "layernorm_after intermediate output.dense"),
    ),
    ("transformers", "Dinov2Layer"): (("norm1 attention layer_scale1", "norm2 mlp layer_scale2"),),
    ("transformers", "Dinov2WithRegistersLayer"): (("norm1 attention layer_scale1", "norm2 mlp layer_scale2"),),
    ("transformers", "SegformerLayer"): (
        ("layernorm_before attention", "layernorm_after mlp"),
        ("layer_norm_1 attention", "layer_norm_2 mlp"),
    ),
    ("transformers", "ConvNextLayer"): (("dwconv layernorm pwconv1 act? pwconv2 drop_path",),),
    ("transformers", "SwinLayer"): (
        ("layernorm_before attention drop_path", "layernorm_after mlp"),
        ("layernorm_before attention drop_path", "layernorm_after intermediate output"),
    ),
    ("acclimate", "Block"): (("conv1 norm1 conv2 norm2 drop_path",),),
    ("acclimate", "TransformerBlock"): (("norm1 attn drop_path1", "norm2 mlp drop_path2"),),
}
_SWITCHES = ("has_skip", "use_res_connect")


def find_branches(model: nn.Module, branches: Names | None = None, blocks: Names | None = None) -> list[Branch]:
    """Return the residual branches of a network in order, or raise if none is known."""
    if branches is not None or blocks is not None:
        return _find_named(model, branches, blocks)
    found: list[Branch] = []
    block = 0
    for path, module in model.named_modules():
        if own := list(_in_block(path, module, block)):
            found += own
            block += 1
    if not found:
        raise ValueError(
            f"no residual branch is known in {type(model).__name__}. Name the modules whose output is "
            'added to x, branches="layers.*.mlp" (of several in a row, the last one), or those that return x + f(x), '
            'blocks="layers.*"'
        )
    return found


def _in_block(path: str, module: nn.Module, block: int) -> Iterator[Branch]:
    if not all(getattr(module, switch, True) for switch in _SWITCHES):
        return
    for cls in type(module).__mro__:
        known = ((where, cls.__name__) for where in (cls.__module__, cls.__module__.split(".")[0]))
        for version in (version for key in known for version in _BLOCKS.get(key, ())):
            branches = [_modules(module, names) for names in version]
            if all(branches):
                for modules in branches:
                    yield Branch(path, block, modules)
                return


def _modules(block: nn.Module, names: str) -> tuple[nn.Module, ...]:
    """Return the named modules, or an empty tuple if a required one is absent."""
    modules = []
    for name in names.split():
        found: object = block
        for attribute in name.removesuffix("?").split("."):
            found = getattr(found, attribute, None)
        if isinstance(found, nn.Module):
            modules.append(found)
        elif not name.endswith("?"):
            return ()
    return tuple(modules)


def _find_named(model: nn.Module, branches: Names | None, blocks: Names | None) -> list[Branch]:
    patterns = [(pattern, False) for pattern in _as_list(branches)] + [(pattern, True) for pattern in _as_list(blocks)]
    plain = plain_names(model)
    modules = {plain(name): module for name, module in model.named_modules()}  # the module inside a wrapper
    patterns = [(plain(pattern), whole) for pattern, whole in patterns]
    for pattern, _ in patterns:
        if not any(_matches(name, pattern) for name in modules):
            some = ", ".join([*modules][1:6])
            raise ValueError(f"{type(model).__name__} has no module {pattern!r}; it has {some}, …")
    parents: dict[str, int] = {}
    found = []
    for name, module in modules.items():
        for pattern, whole in patterns:
            if _matches(name, pattern):
                parent = name if whole else name.rpartition(".")[0]
                found.append(Branch(name, parents.setdefault(parent, len(parents)), (module,), whole))
                break
    if not found:
        raise ValueError("branches= and blocks= name no module: give at least one pattern")
    return found


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name matches, where `*` does not match a dot."""
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _as_list(names: Names | None) -> Sequence[str]:
    return [names] if isinstance(names, str) else names or ()
