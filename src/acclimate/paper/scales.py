"""On what a recipe runs: the paper's own data, a tenth of it, CIFAR-10, or digits that are always there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..bench.demo import digit_overrides
from ..bench.plan import Plan, PlanError
from ..parts.selection import Scaled

__all__ = ["SCALES", "Kind", "Scale"]

Kind = Literal["resnet", "vit"]


@dataclass(frozen=True)
class Scale:
    """Networks, data, and how much of it."""

    name: str
    about: str
    needs: str
    """What the user names: data in its layout, perhaps networks."""
    networks: Mapping[Kind, str]
    classes: int
    clean: int
    """How many clean images there are."""
    data: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of every plan, such as `images`."""
    settings: Mapping[Kind, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Arguments of methods, where they differ from the presets."""
    presets: Mapping[Kind, str] = field(default_factory=lambda: {"resnet": "resnet50", "vit": "vit-base"})
    """Whose hyper-parameters networks have."""
    few: Mapping[str, int] = field(default_factory=dict)
    """Images of each domain for methods that take long."""
    only: Sequence[str] = ()
    """Methods that are measured; none named are all. What is there of others is shown, too."""
    within: Sequence[Kind] = ()
    """Networks that they are measured on, likewise."""

    def on(
        self,
        *,
        data: str | None = None,
        networks: Mapping[Kind, str] | None = None,
        only: Sequence[str] = (),
        within: Sequence[Kind] = (),
        **fields: Any,
    ) -> Scale:
        """With data, networks, methods and fields of a plan that are given."""
        chosen = {name: value for name, value in fields.items() if value is not None}
        return replace(
            self,
            data=data or self.data,
            networks={**self.networks, **(networks or {})},
            fields={**self.fields, **chosen},
            only=only or self.only,
            within=within or self.within,
        )

    def plan(self, network: Kind, *methods: str, arguments: Mapping[str, Any] | None = None, **fields: Any) -> Plan:
        """Methods on a network, all with these `arguments` on top of the scale's own."""
        if not self.data:
            raise PlanError(f"the scale {self.name} needs {self.needs}: name it with --data")
        own = self.settings.get(network, {})
        overrides = {method: {**own.get(method, {}), **(arguments or {})} for method in methods}
        given = {name: settings for name, settings in overrides.items() if settings}
        return Plan(
            methods=methods,
            model=self.networks[network],
            preset=self.presets[network],
            **{"data": self.data, "overrides": given, **self.fields, **fields},
        )

    def epsilon(self, value: float) -> float:
        """The paper's ε, which is for 1,000 classes, for this scale's."""
        return round(Scaled(value).at(self.classes), 6)


_IMAGENET: Mapping[Kind, str] = {
    "resnet": "timm:resnet50.tv_in1k",
    "vit": "timm:vit_base_patch16_224.augreg_in21k_ft_in1k",
}
"""The nearest that is published: the paper trained its own ResNet-50, with stochastic depth."""
KINDS_OF_NETWORK: Sequence[Kind] = ("resnet", "vit")

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "paper",
            "ImageNet-C as published, ResNet-50 and ViT-Base",
            "imagenet-c:FOLDER,CLEAN (imagenet-r:FOLDER for the recipe imagenet-r)",
            _IMAGENET,
            1000,
            50_000,
        ),
        Scale(
            "5k",
            "five fixed images of each class of ImageNet-C",
            "imagenet-c-5k:FOLDER,CLEAN",
            _IMAGENET,
            1000,
            5000,
            few={"memo": 500},
        ),
        Scale(
            "cifar10",
            "CIFAR-10 corrupted on the fly, two networks of ours",
            "cifar10:FOLDER (python -m training.cifar10 unpack)",
            {"resnet": "cifar10-resnet", "vit": "cifar10-vit"},
            10,
            10_000,
            presets={"resnet": "cifar-resnet", "vit": "cifar-vit"},
            few={"memo": 1000},
        ),
        Scale(
            "digits",
            "handwritten digits, always there; most recipes take minutes on a CPU",
            "nothing",
            {"resnet": "digits-resnet", "vit": "digits-vit"},
            10,
            2000,
            data="digits",
            fields={"images": 256, "source_images": 512, "probe_images": 256},
            settings={kind: digit_overrides(kind) for kind in KINDS_OF_NETWORK},
            few={"memo": 16},
        ),
    )
}
"""Every scale by its name on the command line."""
