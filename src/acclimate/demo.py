"""The demo: a small network, trained on clean digits, meets one corruption after another and never starts over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import figures, report
from .adapter import Adapter
from .data.corruptions import CORRUPTIONS, corrupt
from .data.digits import load_digits
from .evaluate import Result
from .methods import METHODS
from .models import digits_resnet
from .stream import Domain

__all__ = ["Demo"]

LEARNING_RATE = 0.01
"""For every method that learns. The paper's 2.5e-4 is for streams of 11,730 batches; this one has 192."""


@dataclass(frozen=True)
class Demo:
    """What the demo shows, and to whom."""

    methods: Sequence[str] = ("source", "bn-adapt", "tent", "eata")
    severity: int = 4
    images: int = 1000
    seed: int = 0
    device: str = "cpu"

    corruptions = tuple(CORRUPTIONS)

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
        return Domain.of("clean", test.x[-320:], test.y[-320:])

    def adapters(self) -> Iterator[Adapter]:
        """Each method around a fresh copy of the network."""
        training, _ = load_digits()
        for name in self.methods:
            arguments: dict[str, Any] = {} if name in ("source", "bn-adapt") else {"lr": LEARNING_RATE}
            if name == "eata":
                arguments["source"] = training.x[:1000]
            yield METHODS[name](digits_resnet().to(self.device), seed=self.seed, **arguments)

    def write(self, out: Path, domains: Iterable[Domain], results: Sequence[Result]) -> Path:
        """The numbers as JSON and the page, whose path is returned."""
        options = f"--severity {self.severity} --images {self.images} --seed {self.seed} --device {self.device}"
        command = " --method ".join([f"acclimate demo {options}", *self.methods])
        report.write_json(out / "results.json", results, command)
        lead = (
            f"A small network, trained on clean digits alone, meets {len(self.corruptions)} corruptions one after the "
            f"other at severity {self.severity}, {self.images:,} digits each, and never starts over. Each method "
            "predicts a batch, then learns from it, without labels."
        )
        pictures = [(domain.name, next(iter(domain.batches))[0][:8]) for domain in domains]
        drawn = [
            ("Accuracy on each corruption, in the order of the stream.", figures.accuracy_along(results)),
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
            ("What the network sees.", figures.examples(pictures)),
        ]
        page = out / "report.html"
        report.write_html(page, "acclimate: a network meets corrupted digits", lead, results, drawn)
        figures.accuracy_along(results).savefig(out / "accuracy.png", dpi=150)
        return page
