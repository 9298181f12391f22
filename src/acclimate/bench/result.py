"""The result of a run: one method on one network and one stream, with its protocol and its origin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias

from ..files import rounded
from ..methods import METHODS
from .metrics import BINS
from .plan import SHARED

__all__ = ["Count", "DomainResult", "Result"]

Count: TypeAlias = Literal["paper", "gradient", "graph"]
"""How backward passes are counted: samples that received a gradient, samples in the graph, or as the paper does."""

_BY_GRAPH = {method.__name__ for method in METHODS.values() if method.counted == "graph"}
"""Methods whose samples in the graph the paper counts."""


@dataclass
class DomainResult:
    """The numbers of one domain. Rates are fractions."""

    name: str
    accuracy: float
    ece: float
    images: int
    forwards: int
    """Forward passes of single samples."""
    backwards: int
    """Samples that received a gradient."""
    seconds: float
    in_graph: int | None = None
    """Samples that were in the autograd graph; None if they were not counted."""
    clean_accuracy: float | None = None
    """Score on clean images after this domain: accuracy, or the mIoU of a segmenter."""
    adaptive_ece: float | None = None
    nll: float | None = None
    brier: float | None = None
    aurc: float | None = None
    kept: float | None = None
    """Share of samples learned from."""
    gpu_memory: float | None = None
    """Peak in this domain, in MB; None without a GPU."""
    process_memory: float | None = None
    """Peak of this process so far, in MB."""
    miou: float | None = None
    """Mean intersection over union of a segmenter; its accuracy and ECE count pixels."""
    iou: list[float | None] | None = None
    """IoU of each class; None for a class that was neither present nor predicted."""
    skipped: int | None = None
    """Broken images that were left out; None if they would have stopped the run."""
    rejected: int | None = None
    """Batches that the adapter rejected; None if one would have stopped the run."""

    @property
    def score(self) -> float:
        """Main metric: accuracy of a classifier, mIoU of a segmenter."""
        return self.accuracy if self.miou is None else self.miou


def _no_bins() -> dict[str, list[float]]:
    return {name: [0.0] * BINS for name in ("count", "confident", "correct")}


@dataclass
class Result:
    """The numbers of one run. `from_dict(result.as_dict())` and `from_dict(result.compact())` read them back.

    >>> import acclimate
    >>> from acclimate.bench.evaluate import evaluate
    >>> from acclimate.bench.networks import load_network
    >>> from acclimate.bench.scenarios import lifelong
    >>> from acclimate.data import open_suite
    >>> fog = lifelong(open_suite("digits"), shifts=["fog"], images=64)
    >>> result = evaluate(acclimate.Source(load_network("digits-resnet").model), fog)
    >>> result.method, result.forwards, 0 <= result.ece <= 1
    ('Source', 64, True)
    """

    method: str
    """Class name, such as `EATA`."""
    network: str
    """Class name."""
    call: str
    """The adapter's `repr`."""
    scenario: str
    seed: int
    model: str = ""
    """The plan's name for the network."""
    clean_before: float | None = None
    """Score on clean images before the stream."""
    domains: list[DomainResult] = field(default_factory=list)
    bins: dict[str, list[float]] = field(default_factory=_no_bins)
    """Reliability of the whole stream: `count`, and sums of `confident` and `correct`, per bin of confidence."""
    measured: dict[str, Any] | None = None
    """The measurements of a study of the paper, which has no domains."""
    protocol: dict[str, Any] = field(default_factory=dict)
    """What must be equal for results to be compared."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The method's arguments: settings that all methods share, and its own overrides."""
    preprocess: dict[str, Any] | None = None
    weights: str | None = None
    """Fingerprint of the source network."""
    source_accuracy: dict[str, float] | None = None
    """Accuracy of the source network per domain; None if it did not run before with the same seed."""
    origin: dict[str, str | None] = field(default_factory=dict)
    along: list[float] | None = None
    """Score of each batch, of hostile streams and guarded methods."""
    health: dict[str, Any] | None = None
    """What the guard has seen and done, if there was one (`acclimate.online.policy.Health`)."""
    done: bool = False
    """Whether all domains are finished."""

    @property
    def accuracy(self) -> float:
        """Mean over domains, as in the paper's tables."""
        return sum(d.accuracy for d in self.domains) / len(self.domains)

    @property
    def ece(self) -> float:
        """Mean over domains of each domain's ECE."""
        return sum(d.ece for d in self.domains) / len(self.domains)

    @property
    def miou(self) -> float | None:
        """Mean over domains, of a segmenter."""
        return self._mean("miou")

    @property
    def score(self) -> float:
        """Main metric: accuracy of a classifier, mIoU of a segmenter."""
        return self.accuracy if self.miou is None else self.miou

    @property
    def score_name(self) -> str:
        """Name of the main metric."""
        return "accuracy" if self.miou is None else "mIoU"

    @property
    def clean_after(self) -> float | None:
        """Score on clean images after the last domain."""
        return self.domains[-1].clean_accuracy

    @property
    def seconds(self) -> float:
        """Time spent in the stream, without the probes."""
        return sum(d.seconds for d in self.domains)

    @property
    def forwards(self) -> int:
        """Forward passes of single samples."""
        return sum(d.forwards for d in self.domains)

    @property
    def backwards(self) -> int:
        """Samples that received a gradient."""
        return sum(d.backwards for d in self.domains)

    @property
    def in_graph(self) -> int | None:
        """Samples that were in the autograd graph; None if they were not counted."""
        counted = [d.in_graph for d in self.domains if d.in_graph is not None]
        return sum(counted) if len(counted) == len(self.domains) else None

    def backward_passes(self, count: Count = "paper") -> int | None:
        """Count backward passes as the paper does for this method, or in one way for all; None if it was not done."""
        return self.in_graph if count == "graph" or (count == "paper" and self.method in _BY_GRAPH) else self.backwards

    @property
    def images_per_second(self) -> float | None:
        """Throughput in the stream."""
        return sum(d.images for d in self.domains) / self.seconds if self.seconds else None

    @property
    def kept(self) -> float | None:
        """Share of samples learned from, mean over domains."""
        return self._mean("kept")

    @property
    def gpu_memory(self) -> float | None:
        """Peak over domains, in MB."""
        return max((d.gpu_memory for d in self.domains if d.gpu_memory is not None), default=None)

    @property
    def skipped(self) -> int:
        """Broken images that were left out."""
        return sum(d.skipped or 0 for d in self.domains)

    @property
    def label(self) -> str:
        """The method, with its own arguments."""
        own = [f"{name}={value}" for name, value in self.arguments.items() if name not in (*SHARED, "guard")]
        own += ["guarded"] if self.arguments.get("guard") else []
        return self.method + (f" ({', '.join(own)})" if own else "")

    @property
    def setting(self) -> str:
        """Everything that must be equal for two results to be seeds of one experiment."""
        return json.dumps([self.method, self.weights, self.preprocess, self.model, self.protocol, self.arguments])

    def _mean(self, name: str) -> float | None:
        values = [getattr(d, name) for d in self.domains]
        return None if None in values else sum(values) / len(values)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON, and a `summary` for readers, which `from_dict` ignores."""
        if not self.domains:
            return asdict(self)
        whole = ("accuracy", "ece", "clean_after", "seconds", "forwards", "backwards", "images_per_second")
        means = ("adaptive_ece", "nll", "brier", "aurc", "kept", "miou")
        summary = {name: getattr(self, name) for name in (*whole, "gpu_memory", *(["skipped"] if self.skipped else []))}
        return {"summary": summary | {name: self._mean(name) for name in means}, **asdict(self)}

    def compact(self) -> dict[str, Any]:
        """Return the same for committed files: 6 significant digits, no summary, nothing that is None.

        Domains are columns, `{"name": [...], "accuracy": [...], ...}`; a column of equal numbers is one number.
        """
        content: dict[str, Any] = rounded(asdict(self), digits=6)
        columns = {f.name: [domain[f.name] for domain in content["domains"]] for f in fields(DomainResult)}
        content["domains"] = {
            name: column[0] if name not in ("name", "iou") and len(set(column)) == 1 else column
            for name, column in columns.items()
            if any(value is not None for value in column)
        }
        return {name: value for name, value in content.items() if value is not None}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Result:
        """Read what `as_dict` or `compact` wrote."""
        own = {name: value for name, value in content.items() if name != "summary"}
        if unknown := own.keys() - {f.name for f in fields(cls)}:
            raise ValueError(f"a result has no {', '.join(sorted(unknown))}")
        domains = content["domains"]
        if isinstance(domains, Mapping):
            count = len(domains.get("name", ()))
            columns = [column if isinstance(column, list) else [column] * count for column in domains.values()]
            domains = [dict(zip(domains, row, strict=True)) for row in zip(*columns, strict=True)]
        return cls(**{**own, "domains": [DomainResult(**domain) for domain in domains]})
