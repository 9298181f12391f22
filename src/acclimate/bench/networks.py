"""Networks by name, each with its preprocessing, and with normalisation inside.

loaded = load_network("timm:resnet50")                      # weights from timm's hub
loaded = load_network("timm:resnet50=weights.safetensors")  # or from a file
loaded = load_network("timm:vit_base_patch16_224@imagenet")  # with ImageNet's mean and std instead of its own
loaded = load_network("my_networks.py:make")                # a function of your own
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..checks import no_such
from ..data.folders import Preprocess
from ..parts.normalised import IMAGENET, Normalised, check_normalisation
from .own_networks import NETWORKS
from .own_networks import weights as own_weights

__all__ = ["KINDS", "Loaded", "NetworkError", "load_network"]

Normalisation: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation per channel."""


class NetworkError(ValueError):
    """A network that cannot be loaded."""


@dataclass(frozen=True)
class Loaded:
    """A network for images in [0, 1], and the resize and crop that it expects."""

    name: str
    model: nn.Module
    preprocess: Preprocess | None
    """None: images keep their size."""

    @property
    def has_batch_norm(self) -> bool:
        """Whether any of its layers is BatchNorm."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules())

    @property
    def family(self) -> str:
        """Preset to start from: that of the paper's network with BatchNorm, or of the one without."""
        return "resnet50" if self.has_batch_norm else "vit-base"

    @property
    def outputs(self) -> int | None:
        """Outputs of its last linear layer, usually the number of classes."""
        return next((m.out_features for m in [*self.model.modules()][::-1] if isinstance(m, nn.Linear)), None)


def _ours(name: str, weights: Path | None) -> Loaded:
    net, file = NETWORKS[name](), weights or own_weights(name)
    if file is None:
        raise NetworkError(
            f"the weights of {name} do not come with the package: they are in the repository, in weights/; give their "
            f"file, {name}=FILE, or train them with python -m training.{name.rpartition('-')[0].replace('-', '_')}"
        )
    _fill(net, file)
    return Loaded(name, net, Preprocess())


@contextmanager
def _fetching(library: str, name: str) -> Iterator[None]:
    try:
        yield
    except NetworkError:
        raise
    except (RuntimeError, ValueError) as error:
        known = _names(library)
        why = f"{library}:{name}: {error}" if name in known else f"{library} has {no_such('network', name, known)}"
        raise NetworkError(why) from error
    except OSError as error:
        hint = f"give a file, {library}:{name}=FILE"
        raise NetworkError(f"{library} could not fetch the weights of {name} ({error}): {hint}") from error


def _timm(name: str, weights: Path | None, given: Normalisation | None) -> Loaded:
    timm = _library("timm")
    with _fetching("timm", name):
        net = timm.create_model(name, pretrained=weights is None)
    _fill(net, weights)
    config = timm.data.resolve_model_data_config(net)
    crop = int(config["input_size"][-1])
    sizes = Preprocess(math.floor(crop / config["crop_pct"]), crop, _interpolation(config["interpolation"]))
    return Loaded(f"timm:{name}", _normalised(name, net, given, (config["mean"], config["std"])), sizes)


def _keras_resnet50(weights: Path | None) -> Loaded:
    """Return Keras' first ResNet-50, whose strides are on the first convolution of a block."""
    if weights is None:
        raise NetworkError("give the file of weights, keras-resnet50=FILE: see python -m training.imagenet_resnet50")
    net = _library("timm").create_model("resnet50")
    for stage in (net.layer2, net.layer3, net.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    _fill(net, weights)
    mean, std = tuple(value / 255 for value in (123.68, 116.779, 103.939)), (1 / 255,) * 3
    net.pretrained_cfg = {**net.pretrained_cfg, "mean": mean, "std": std}
    return Loaded("keras-resnet50", Normalised(net), Preprocess(256, 224))


def _torchvision(name: str, weights: Path | None, given: Normalisation | None) -> Loaded:
    models = _library("torchvision.models")
    with _fetching("torchvision", name):
        transforms = models.get_model_weights(name).DEFAULT.transforms()
        segments = not hasattr(transforms, "crop_size")
        own = _shape_of(_read(weights)) if weights and segments else {}
        net = models.get_model(name, weights=None if weights else "DEFAULT", **own)
    _fill(net, weights)
    how = _interpolation(transforms.interpolation.value)
    sizes = None if segments else Preprocess(transforms.resize_size[0], transforms.crop_size[0], how)
    return Loaded(f"torchvision:{name}", _normalised(name, net, given, (transforms.mean, transforms.std)), sizes)


def _hugging_face(name: str, weights: Path | None, given: Normalisation | None) -> Loaded:
    transformers = _library("transformers", "AutoImageProcessor")
    if weights is not None:
        raise NetworkError("hf: takes a name or a folder in the hub's format, not a file of weights")
    try:
        made_for = transformers.AutoConfig.from_pretrained(name).architectures or [""]
        segments = "SemanticSegmentation" in made_for[0]
        kind = (
            transformers.AutoModelForSemanticSegmentation if segments else transformers.AutoModelForImageClassification
        )
        net = kind.from_pretrained(name)
        processor = transformers.AutoImageProcessor.from_pretrained(name)
    except OSError as error:
        raise NetworkError(f"transformers could not load {name!r}: {str(error).splitlines()[0]}") from error
    own = (processor.image_mean, processor.image_std)
    if not getattr(processor, "do_normalize", True):
        own = ((0.0,) * 3, (1.0,) * 3)
    model = _normalised(name, net, given, own)
    if segments:
        return Loaded(f"hf:{name}", model, None)
    size = processor.size
    side = int(size.get("shortest_edge") or size["height"])
    cuts = getattr(processor, "do_center_crop", False)
    crop = int(processor.crop_size["height"]) if cuts else side
    share = getattr(processor, "crop_pct", None)
    if share and side < 384:  # as ConvNeXt does: resize to a larger size, then crop
        side, crop, cuts = int(side / share), side, True
    how = {2: "bilinear", 3: "bicubic"}.get(int(processor.resample), "bilinear")
    squash = not cuts and "shortest_edge" not in size
    return Loaded(f"hf:{name}", model, Preprocess(side, crop, _interpolation(how), squash))


def _normalised(name: str, net: nn.Module, given: Normalisation | None, own: Normalisation) -> Normalised:
    """Return a network with the given normalisation, or its own; warn if they differ."""
    model = Normalised(net, *own)
    if given is None:
        return model
    channels = len(own[0])
    mean, std = (values * channels if len(values) == 1 else values for values in map(tuple, given))
    if len(mean) != channels or len(std) != channels:
        raise NetworkError(f"{name} takes {channels} channels, and @ gives {len(mean)} means and {len(std)} deviations")
    check_normalisation(name, (mean, std), own)
    for buffer, values in ((model.mean, mean), (model.std, std)):
        buffer.copy_(torch.tensor(values).view(-1, 1, 1))
    if not bool((model.std > 0).all()):
        raise NetworkError(f"{name}: the standard deviations after @ must be above 0")
    return model


def _file(spec: str) -> Loaded:
    path, _, function = spec.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise NetworkError(f"there is no file {file}: expected FILE.py:FUNCTION")
    found = importlib.util.spec_from_file_location(f"acclimate_user_{file.stem}", file)
    if found is None or found.loader is None:
        raise NetworkError(f"{file} is not a Python file: expected FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses look their module up there
    found.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise NetworkError(f"{file} has no function {function!r}")
    made = getattr(module, function)()
    net, preprocess = made if isinstance(made, tuple) else (made, None)
    if not isinstance(net, nn.Module):
        raise NetworkError(f"{function} in {file} returned {type(net).__name__}, not a torch.nn.Module")
    return Loaded(f"{file.name}:{function}", net, preprocess)


KINDS: dict[str, str] = {
    "digits-resnet": "the demo's small ResNet, with BatchNorm",
    "digits-vit": "the demo's small ViT, with LayerNorm",
    "cifar10-resnet": "a small ResNet for CIFAR-10, or cifar10-resnet=FILE",
    "cifar10-vit": "a small ViT for CIFAR-10, or cifar10-vit=FILE",
    "tiny-imagenet-resnet": "a ResNet for Tiny-ImageNet, or tiny-imagenet-resnet=FILE",
    "tiny-imagenet-vit": "a ViT for Tiny-ImageNet, or tiny-imagenet-vit=FILE",
    "keras-resnet50=FILE": "Keras' ResNet-50 for ImageNet, which `python -m training.imagenet_resnet50` converts",
    "timm:NAME": "a network of timm, with weights from its hub, or from a file: timm:NAME=FILE; with another "
    "normalisation than its own: timm:NAME@imagenet, or timm:NAME@MEAN/STD",
    "torchvision:NAME": "a network of torchvision, or torchvision:NAME=FILE",
    "hf:NAME": "an image classifier or a segmenter of transformers, by name or from a folder",
    "FILE.py:FUNCTION": "your own: a function that returns a network for images in [0, 1], or (network, Preprocess)",
}
"""Specifications that `load_network` understands. Every library's network can have another normalisation."""

_LIBRARIES: dict[str, Callable[[str, Path | None, Normalisation | None], Loaded]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "hf": _hugging_face,
}


def load_network(spec: str, device: torch.device | str = "cpu") -> Loaded:
    """Load a network by its specification (see `KINDS`), in evaluation mode on a device.

    >>> loaded = load_network("digits-resnet")
    >>> type(loaded.model).__name__, loaded.family
    ('SmallResNet', 'resnet50')
    """
    library, _, name = spec.partition(":")
    own, _, weights = spec.partition("=")
    if own == "keras-resnet50":
        loaded = _keras_resnet50(Path(weights) if weights else None)
    elif own in NETWORKS:
        loaded = _ours(own, Path(weights) if weights else None)
    elif library in _LIBRARIES:
        named, normalisation = _split(name)
        own, _, weights = named.partition("=")
        loaded = _LIBRARIES[library](own, Path(weights) if weights else None, normalisation)
        loaded = replace(loaded, name=loaded.name + name.removeprefix(named))
    elif ".py:" in spec:
        loaded = _file(spec)
    else:
        raise NetworkError(_unknown(spec))
    _check_finite(spec, loaded.model)  # on the CPU, where each look costs nothing
    loaded.model.to(device).eval()
    return loaded


def _check_finite(spec: str, model: nn.Module) -> None:
    """Refuse weights and statistics with NaN or infinity. Other buffers, such as masks, may have them."""
    statistics = ((n, b) for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var")))
    bad = [name for name, tensor in (*model.named_parameters(), *statistics) if not bool(tensor.isfinite().all())]
    if bad:
        raise NetworkError(
            f"{spec} has NaN or infinity in {', '.join(bad[:3])}{' and more' * (len(bad) > 3)}: a training that "
            "diverged, or weights stored in half precision, which ends at 65504"
        )


def _unknown(spec: str) -> str:
    """Return the message about a specification that names no network, with the name under another library."""
    _, colon, name = spec.partition(":")
    elsewhere = [f"{each}:{spec}" for each in ("timm", "torchvision") if not colon and spec in _names(each)]
    kinds = [kind.replace("NAME", name) if colon else kind for kind in KINDS]
    return no_such("network", spec, [*elsewhere, *kinds])


def _names(library: str) -> list[str]:
    """Return the names of a library's networks; none if it cannot be imported or has no list."""
    try:
        if library == "timm":
            timm = _library("timm")
            return [*timm.list_models(), *timm.list_pretrained()]
        return [*_library("torchvision.models").list_models()] if library == "torchvision" else []
    except NetworkError:
        return []


_NORMALISATION = re.compile(r"(.+)@(?:(imagenet)|([\d.,]+)/([\d.,]+))")


def _split(name: str) -> tuple[str, Normalisation | None]:
    """Split NAME@imagenet or NAME@MEAN/STD into the name and the normalisation; None is the network's own."""
    found = _NORMALISATION.fullmatch(name)
    if "@" not in name or Path(name.partition("=")[2] or name).exists():
        return name, None
    if found is None:
        raise NetworkError(f"{name}: after @ expected imagenet, or MEAN/STD such as 0.5,0.5,0.5/0.5,0.5,0.5")
    if found[2]:
        return found[1], IMAGENET
    try:
        mean, std = (tuple(map(float, values.split(","))) for values in found.group(3, 4))
    except ValueError as error:
        raise NetworkError(f"{name}: expected @MEAN/STD, such as @0.5,0.5,0.5/0.5,0.5,0.5") from error
    return found[1], (mean, std)


def _interpolation(name: str) -> Literal["bilinear", "bicubic"]:
    return "bicubic" if name == "bicubic" else "bilinear"


def _library(module: str, *names: str) -> Any:
    """Import a module; `names` are those of its objects that it imports when they are first used."""
    try:
        library = importlib.import_module(module)
        for name in names:
            getattr(library, name)
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises the latter
        package = module.partition(".")[0]
        raise NetworkError(f"{package} cannot be imported: {import_remedy(error, package)}") from error
    return library


def import_remedy(error: BaseException, package: str) -> str:
    """Name the package to install: the missing one, or the one in which the import failed first."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error}; pip install {error.name.partition('.')[0]}"
    through = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    failed = next((name for name in reversed(through) if name in _PACKAGES), package)
    return f"{error}; install a build of {failed} for torch {torch.__version__}"


_PACKAGES = ("torchvision", "timm", "transformers")


def _shape_of(content: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments for torchvision's segmenter that a file implies: its classes, and whether it has a second head."""
    last = [tensor for name, tensor in content.items() if name.startswith("classifier.") and name.endswith(".weight")]
    if not last:
        raise NetworkError("the file has no weights of a segmenter: it has no classifier")
    aux = any(name.startswith("aux_classifier.") for name in content)
    return {"num_classes": len(last[-1]), "aux_loss": aux, "weights_backbone": None}


def _fill(net: nn.Module, weights: Path | None) -> None:
    """Load a file's weights into a network."""
    if weights is None:
        return
    try:
        net.load_state_dict(_read(weights))
    except RuntimeError as error:
        raise NetworkError(f"{weights} holds another network's weights: {str(error)[:300]}") from error


def _read(weights: Path) -> dict[str, Tensor]:
    """Read a file's weights by name."""
    if not weights.is_file():
        raise NetworkError(f"there is no file of weights {weights}")
    try:
        content = (
            load_file(weights) if weights.suffix == ".safetensors" else torch.load(weights, "cpu", weights_only=True)
        )
    except Exception as error:
        raise NetworkError(f"{weights} cannot be read as weights ({error}): a broken download?") from error
    for key in ("state_dict", "model"):
        content = content.get(key, content)
    return {name.removeprefix("module."): tensor for name, tensor in content.items()}
