"""The demo: small networks, trained on clean digits, meet one corruption after another and never start over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.adapter import Adapter
from ..data.corruptions import corrupt
from ..data.digits import load_digits
from ..methods import METHODS
from ..methods.presets import COTTA_ON_CIFAR10
from . import figures, report
from .own_networks import digits_resnet, digits_vit
from .report import Section
from .result import Result
from .stream import Domain

__all__ = ["Demo"]

NETWORKS = {"resnet": digits_resnet, "vit": digits_vit}
TITLES = {"SmallResNet": "A small ResNet: BatchNorm", "SmallViT": "A small ViT: LayerNorm"}

LEARNING_RATES = {"resnet": {"entropy": 0.01, "consistency": 0.05}, "vit": {"entropy": 0.003, "consistency": 0.01}}
"""Chosen on this stream, for methods that minimise entropy and for EATA-C: the paper's are for streams of 11,730
batches of ImageNet, and this one has 72 of digits. The other methods keep to their presets."""

KINDS = dict.fromkeys(("tent", "sar", "rdumb", "eta", "eata"), "entropy") | dict.fromkeys(
    ("eta-c", "eata-c"), "consistency"
)

ON_DIGITS: dict[str, dict[str, Any]] = {
    "cotta": COTTA_ON_CIFAR10,  # ten classes, too
    "rdumb": {"every": 10},  # the default, 1,000 batches, would never come
}


@dataclass(frozen=True)
class Demo:
    """What the demo shows."""

    methods: Sequence[str] = ("source", "bn-adapt", "tent", "eta", "eata", "eata-c")
    networks: Sequence[str] = ("resnet", "vit")
    severity: int = 4
    images: int = 384
    seed: int = 0
    device: str = "cpu"
    running: Mapping[str, Any] = field(default_factory=dict)
    """`engine` and `precision`, where they are not to be torch's own."""

    corruptions = (
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "defocus_blur",
        "motion_blur",
        "zoom_blur",
        "fog",
        "brightness",
        "contrast",
        "pixelate",
        "speckle_noise",
        "gaussian_blur",
    )

    def domains(self) -> Iterator[Domain]:
        """The stream as it is made: the same digits under each corruption."""
        _, test = load_digits()
        generator = torch.Generator().manual_seed(self.seed)
        clean = Domain.of("", test.x[: self.images], test.y[: self.images])
        for name in self.corruptions:
            yield Domain(name, [(corrupt(x, name, self.severity, generator), y) for x, y in clean.batches])

    def clean(self) -> Domain:
        """Clean digits that the stream does not show, to see what is forgotten."""
        _, test = load_digits()
        return Domain.of("clean", test.x[-128:], test.y[-128:])

    def adapters(self) -> Iterator[Adapter]:
        """Each method around a fresh copy of each network that it fits."""
        for network in self.networks:
            for method in self.methods:
                if (network, method) != ("vit", "bn-adapt"):  # which has no BatchNorm
                    yield self._adapter(network, method)

    def _adapter(self, network: str, method: str) -> Adapter:
        training, _ = load_digits()
        arguments: dict[str, Any] = {"seed": self.seed} | dict(self.running)
        arguments |= ON_DIGITS.get(method, {})
        if method in KINDS:
            arguments["lr"] = LEARNING_RATES[network][KINDS[method]]
        if method.startswith("eata"):
            arguments["source"] = training.x[:1000].to(self.device)
        family = "resnet50" if network == "resnet" else "vit-base"
        return METHODS[method].preset(family, NETWORKS[network]().to(self.device), **arguments)

    def write(self, out: Path, domains: Iterable[Domain], results: Sequence[Result], command: str = "demo") -> Path:
        """The numbers as JSON, pictures, and the page, whose path is returned."""
        options = f"--severity {self.severity} --images {self.images} --seed {self.seed} --device {self.device}"
        chosen = [f"--network {name}" for name in self.networks] + [f"--method {name}" for name in self.methods]
        report.write_json(out / "results.json", results, " ".join([f"acclimate {command}", options, *chosen]))
        lead = (
            f"Small networks, trained on clean digits alone, meet {len(self.corruptions)} corruptions one after the "
            f"other at severity {self.severity}, {self.images:,} digits each, and never start over. Each method "
            "predicts a batch, then learns from it, without labels."
        )
        pictures = [(domain.name, next(iter(domain.on("cpu")))[0][:8]) for domain in domains]
        sections = [_section(title, [r for r in results if r.network == name]) for name, title in TITLES.items()]
        sections = [section for section in sections if section.results]
        seen = Section("What the networks see", [], [("Eight digits of each corruption.", figures.examples(pictures))])
        page = out / "report.html"
        report.write_html(page, "acclimate: networks meet corrupted digits", lead, [*sections, seen])
        figures.accuracy_along_all([s.results for s in sections]).savefig(out / "accuracy.png", dpi=150)
        return page


def _section(title: str, results: Sequence[Result]) -> Section:
    if not results:
        return Section(title, [], [])
    return Section(
        title,
        results,
        [
            ("Accuracy on each corruption, in the order of the stream.", figures.along(results, "score")),
            (
                "How often predictions of each confidence are right, over the whole stream. On the dashed line "
                "confidence means what it says; bars below it are overconfidence.",
                figures.reliability(results),
            ),
            (
                "Accuracy on clean digits that are not in the stream, probed from a snapshot before it and after each "
                "corruption.",
                figures.forgetting(results),
            ),
        ],
    )
