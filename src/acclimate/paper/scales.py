"""Scales of a recipe: the paper's own data, a tenth of it, smaller data sets, or digits, which need no download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..bench.demo import digit_overrides
from ..bench.plan import Plan, PlanError
from ..core.settings_file import is_settings_file, model_of, read_settings
from ..methods import METHODS
from ..parts.selection import Scaled

__all__ = ["CLASSIFIERS", "KINDS_OF_NETWORK", "SCALES", "Kind", "Scale", "presets_in"]

Kind = Literal["resnet", "vit", "segformer"]
KINDS_OF_NETWORK: Sequence[Kind] = ("resnet", "vit", "segformer")
CLASSIFIERS: Sequence[Kind] = ("resnet", "vit")


@dataclass(frozen=True)
class Scale:
    """Networks, data, and how much of it."""

    name: str
    about: str
    needs: str
    """What the user must provide: data in its layout."""
    networks: Mapping[Kind, str]
    classes: int
    clean: int
    """Number of clean images."""
    data: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every plan, such as `images`."""
    settings: Mapping[Kind, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Arguments of methods that differ from the presets."""
    presets: Mapping[Kind, str] = field(
        default_factory=lambda: {"resnet": "resnet50", "vit": "vit-base", "segformer": "segformer-b5"}
    )
    """Names of the presets, or files with settings that the recipe `tune` has chosen."""
    parts: bool = False
    """Whether its data has a part `,tune` for choosing settings, and a part `,judge` for all other recipes."""
    few: Mapping[str, int] = field(default_factory=dict)
    """Images per domain for slow methods."""
    only: Sequence[str] = ()
    """Methods to measure; all if empty. Results of others that are already there are shown as well."""
    within: Sequence[Kind] = ()
    """Networks to measure on; all if empty."""
    levels: Sequence[int] = ()
    """Severities to measure at; all if empty."""

    @property
    def classifiers(self) -> list[Kind]:
        """The networks that classify images."""
        return [kind for kind in CLASSIFIERS if kind in self.networks]

    def nearest(self, kind: Kind) -> Kind:
        """Return the kind of network that the paper uses, or the one that is asked for, or there, instead."""
        among = [each for each in self.classifiers if not self.within or each in self.within]
        return kind if kind in among else next(iter(among), kind)

    @property
    def apart(self) -> bool:
        """Whether images apart from those that are judged are there for choosing settings."""
        return self.parts or self.data.endswith(",judge")

    @property
    def judged(self) -> str:
        """The data that results are judged on."""
        return f"{self.data.removesuffix(',judge')},judge" if self.parts and self.data else self.data

    @property
    def held_out(self) -> str:
        """The data that settings are chosen on: other images than those that are judged."""
        return f"{self.data.removesuffix(',judge')},tune"

    def on(
        self,
        *,
        data: str | None = None,
        networks: Mapping[Kind, str] | None = None,
        presets: Mapping[Kind, str] | None = None,
        only: Sequence[str] = (),
        within: Sequence[Kind] = (),
        levels: Sequence[int] = (),
        **fields: Any,
    ) -> Scale:
        """Return the scale with other data, networks, presets, limits or fields of a plan, if they are given."""
        given = {name: value for name, value in fields.items() if value is not None}
        return replace(
            self,
            data=data or self.data,
            networks={**self.networks, **(networks or {})},
            presets={**self.presets, **(presets or {})},
            fields={**self.fields, **given},
            only=only or self.only,
            within=within or self.within,
            levels=levels or self.levels,
        )

    def plan(self, network: Kind, *methods: str, arguments: Mapping[str, Any] | None = None, **fields: Any) -> Plan:
        """Return a plan for methods on a network, all with these `arguments` in addition to the scale's own."""
        if not self.data:
            raise PlanError(f"the scale {self.name} needs {self.needs}: name it with --data")
        if network not in self.networks:
            raise PlanError(f"the scale {self.name} has no {network}: name one with --{network}, or use --scale paper")
        own = self.settings.get(network, {})
        overrides = {method: {**own.get(method, {}), **(arguments or {})} for method in methods}
        given = {name: settings for name, settings in overrides.items() if settings}
        fields = {"data": self.judged, "overrides": given, **self.fields, **fields}
        return Plan(methods=methods, model=self.networks[network], preset=self.presets[network], **fields)

    def setting(self, network: Kind, method: str, argument: str) -> float:
        """Return an argument that a method has here."""
        preset, chosen = self.presets[network], dict[str, Any]()
        if is_settings_file(preset):
            preset, chosen = read_settings(preset, METHODS[method].__name__)
        own = self.settings.get(network, {}).get(method, {})
        value: float = {**METHODS[method].presets[preset], **chosen, **own}[argument]
        return value

    def epsilon(self, value: float) -> float:
        """Convert the paper's ε for 1,000 classes to this scale's number of classes."""
        return round(Scaled(value).at(self.classes), 6)


def presets_in(files: Sequence[str], networks: Mapping[Kind, str]) -> dict[Kind, str]:
    """Return which of the networks each file of settings was chosen for."""
    found: dict[Kind, str] = {}
    for file in files:
        model = model_of(file)
        own = [kind for kind, name in networks.items() if name.partition("=")[0] == model]
        if not own:
            known = ", ".join(networks.values())
            raise PlanError(f"{file} contains settings for {model}, which is not one of the networks here: {known}")
        found |= dict.fromkeys(own, file)
    return found


_IMAGENET: Mapping[Kind, str] = {
    "resnet": "timm:resnet50.tv_in1k",
    "vit": "timm:vit_base_patch16_224.augreg_in21k_ft_in1k@imagenet",
}
"""The nearest published networks: the paper trained its own ResNet-50, with stochastic depth.

The paper's source accuracy of ViT-Base, 39.8, fits these weights with ImageNet's mean and standard deviation. With
their own, which are 0.5, the network is far more accurate: `--vit` and the name without `@imagenet`.
"""
_CITYSCAPES = "hf:nvidia/segformer-b5-finetuned-cityscapes-1024-1024"

SCALES: dict[str, Scale] = {
    "paper": Scale(
        "paper",
        "the paper's data as published; ResNet-50 and ViT-Base, SegFormer-B5 for street scenes",
        "imagenet-c:FOLDER,CLEAN; imagenet-r:FOLDER or acdc:FOLDER,CITYSCAPES for the recipes of these names",
        {**_IMAGENET, "segformer": _CITYSCAPES},
        classes=1000,
        clean=50_000,
    ),
    "5k": Scale(
        "5k",
        "five fixed images of each class of ImageNet-C",
        "imagenet-c-5k:FOLDER,CLEAN",
        _IMAGENET,
        classes=1000,
        clean=5000,
        few={"memo": 500},
    ),
    "imagenet-5k": Scale(
        "imagenet-5k",
        "four validation images of each class of ImageNet, corrupted on the fly; Keras' ResNet-50",
        "imagenet-5k:FOLDER, and --resnet keras-resnet50=FILE (python -m training.imagenet_resnet50)",
        {"resnet": "keras-resnet50"},
        classes=1000,
        clean=4000,
        parts=True,
        few={"cotta": 1000, "memo": 100, "tea": 500},
    ),
    "tiny-imagenet": Scale(
        "tiny-imagenet",
        "Tiny-ImageNet corrupted on the fly, two networks of ours with 200 classes",
        "tiny-imagenet:FOLDER (python -m training.tiny_imagenet unpack)",
        {"resnet": "tiny-imagenet-resnet", "vit": "tiny-imagenet-vit"},
        classes=200,
        clean=10_000,
        parts=True,
        few={"cotta": 2500, "memo": 100, "tea": 1000},
    ),
    "cifar10": Scale(
        "cifar10",
        "CIFAR-10 corrupted on the fly, two small networks of ours",
        "cifar10:FOLDER (python -m training.cifar10 unpack), or cifar10:FOLDER,judge with settings of the recipe tune",
        {"resnet": "cifar10-resnet", "vit": "cifar10-vit"},
        classes=10,
        clean=10_000,
        presets={"resnet": "cifar-resnet", "vit": "cifar-vit", "segformer": "segformer-b5"},
        few={"memo": 1000},
    ),
    "digits": Scale(
        "digits",
        "handwritten digits, no download; most recipes take minutes on a CPU",
        "nothing",
        {"resnet": "digits-resnet", "vit": "digits-vit"},
        classes=10,
        clean=2000,
        data="digits",
        fields={"images": 256, "source_images": 512, "probe_images": 256},
        settings={kind: digit_overrides(kind) for kind in CLASSIFIERS},
        few={"memo": 16},
    ),
}
"""Every scale by its name on the command line."""
