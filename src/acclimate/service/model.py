"""What is served: a network with its method and guard, the images that it takes, and the names of its classes."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..bench.demo import DEMO_NETWORKS, digit_overrides
from ..bench.networks import Loaded, load_network
from ..bench.run import check_device
from ..checks import read_logits
from ..core.adapter import Adapter
from ..data import SUITES, open_suite
from ..data.folders import SUFFIXES, Preprocess, read_image
from ..data.textures import grey
from ..data.types import BrokenImageError, ImageSet
from ..methods import METHODS
from ..online.guard import Guard
from .settings import Settings, SettingsError

__all__ = ["Served", "build"]

_PROBE, _FEWEST, _SHARE = 512, 32, 4
"""Source images that are held out for the guard: at most and at least, and one in so many."""
_log = logging.getLogger("acclimate.service")


@dataclass(frozen=True)
class Served:
    """A network that adapts, and what a client must know about it."""

    name: str
    network: str
    adapter: Adapter | Guard
    channels: int
    size: tuple[int, int] | None
    """Height and width; None takes any."""
    preprocess: Preprocess
    labels: tuple[str, ...]

    @property
    def guarded(self) -> bool:
        """Whether a guard watches it."""
        return isinstance(self.adapter, Guard)

    @property
    def shape(self) -> list[int]:
        """The shape of a batch; -1 is any number."""
        return [-1, self.channels, *(self.size or (-1, -1))]


def build(settings: Settings) -> Served:
    """Load the network and the source images, and build the method. Errors say which setting to change."""
    check_device(settings.device)
    loaded = load_network(settings.model, settings.device)
    preprocess, channels = _preprocess(loaded), _channels(loaded.model)
    images = _source_images(settings, preprocess, channels)
    size = (preprocess.crop, preprocess.crop) if preprocess.crop else None
    outputs = _outputs(loaded, channels, size, settings.device)
    guarded = settings.guard and settings.method != "source"
    held_out = _held_out(len(images)) if guarded else 0
    adapter: Adapter | Guard
    adapter = _adapter(settings, loaded, images[held_out:])
    if guarded:
        adapter = Guard(adapter, probe=images[:held_out] if held_out else None, **settings.overrides.get("guard", {}))
    name = settings.name or re.sub("[^A-Za-z0-9._-]", "-", loaded.name)
    return Served(name, loaded.name, adapter, channels, size, preprocess, _labels(settings.labels, loaded, outputs))


def _held_out(count: int) -> int:
    """Return how many of the source images are the guard's; none, with a warning, if they are too few."""
    enough = _SHARE * _FEWEST
    if 0 < count < enough:
        _log.warning("%d source images are too few to hold some out: give the guard %d or more", count, enough)
    return min(_PROBE, count // _SHARE) if count >= enough else 0


def _preprocess(loaded: Loaded) -> Preprocess:
    if loaded.name in DEMO_NETWORKS.values():
        return Preprocess(32, 32)
    return loaded.preprocess or Preprocess()


def _channels(model: nn.Module) -> int:
    """Return the number of colour channels, which the first convolution has."""
    return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)


def _outputs(loaded: Loaded, channels: int, size: tuple[int, int] | None, device: str) -> int:
    """Return the number of classes, and raise for a network that is no classifier of images."""
    x = torch.full((1, channels, *(size or (224, 224))), 0.5, device=device)
    try:
        with torch.no_grad():
            logits = read_logits(loaded.model(x), x)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(f"{loaded.name} does not take images of {tuple(x.shape[1:])}: {error}") from error
    if logits.dim() != 2:
        raise SettingsError(f"{loaded.name} segments images, and the service is for classifiers: use the library")
    return logits.shape[1]


def _adapter(settings: Settings, loaded: Loaded, source: Tensor) -> Adapter:
    method = METHODS[settings.method]
    own = {plan: digit_overrides(short) for short, plan in DEMO_NETWORKS.items()}.get(loaded.name, {})
    arguments: dict[str, Any] = {**own.get(settings.method, {}), **settings.overrides.get(settings.method, {})}
    arguments |= {"engine": settings.engine}
    if "source" in inspect.signature(method).parameters and arguments.get("beta") != 0:
        if not len(source):
            raise SettingsError(
                f"{settings.method} needs clean images: name a folder with --source, or set {settings.method}.beta=0"
            )
        arguments["source"] = source
    return method.preset(settings.preset or loaded.family, loaded.model, **arguments)


def _source_images(settings: Settings, preprocess: Preprocess, channels: int) -> Tensor:
    """Return images like the training images (n, C, H, W), in random order; none if none are named."""
    name = settings.source
    if name is None:
        if settings.model not in DEMO_NETWORKS.values():
            return torch.empty(0)
        name = "demo:training"
    if name.partition(":")[0] in SUITES:
        found: ImageSet | _Files = open_suite(name, preprocess).clean().images
    else:
        found = _Files(name, preprocess)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[: settings.source_images]
    try:
        picked = [as_input(found[index][0], channels) for index in order.tolist()]
    except BrokenImageError as error:
        why = f"--source {name}: {error.path} cannot be read ({error.reason}). Fetch it again, or remove it"
        raise SettingsError(why) from error
    if len({x.shape for x in picked}) > 1:
        raise SettingsError(f"the images of {name} differ in size, and {settings.model} resizes none: resize them")
    return torch.stack(picked).to(settings.device)


class _Files(Sequence[tuple[Tensor, int]]):
    """All images in a folder and below it."""

    def __init__(self, folder: str, preprocess: Preprocess) -> None:
        root = Path(folder)
        if not root.is_dir():
            raise SettingsError(f"--source {folder}: there is no such folder, and no data set of that name")
        self.paths = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not self.paths:
            raise SettingsError(f"--source {folder} has no images")
        self.preprocess = preprocess

    def __getitem__(self, index: Any) -> Any:
        return read_image(self.paths[index], self.preprocess), -1

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (self[index] for index in range(len(self)))


def as_input(image: Tensor, channels: int) -> Tensor:
    """Return one image in [0, 1], in grey levels if the network has one channel."""
    x = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    if channels == 1 and len(x) == 3:
        x = grey(x.unsqueeze(0)).squeeze(0)
    return x


def _labels(file: str | None, loaded: Loaded, outputs: int) -> tuple[str, ...]:
    if file is None:
        return tuple(map(str, range(outputs)))
    path = Path(file)
    if not path.is_file():
        raise SettingsError(f"--labels {path}: there is no such file")
    try:
        text = path.read_text("utf-8")
        names = json.loads(text) if path.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    except ValueError as error:
        expected = "a JSON list" if path.suffix == ".json" else "text in UTF-8, one name per line"
        raise SettingsError(f"--labels {path} cannot be read ({error}): expected {expected}") from error
    if not isinstance(names, list) or len(names) != outputs:
        count = len(names) if isinstance(names, list) else "no list of"
        raise SettingsError(f"{path} has {count} labels, and {loaded.name} has {outputs} classes")
    return tuple(map(str, names))
