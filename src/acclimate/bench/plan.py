"""What is compared, and under what protocol: plain data, which goes into a file."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..methods import METHODS
from .scenarios import SCENARIOS

__all__ = ["PROTOCOL", "SHARED", "Job", "Plan", "PlanError", "read_overrides"]

PROTOCOL = ("data", "scenario", "severity", "shifts", "batch_size", "images", "probe", "precision", "rounds")
"""What must be equal for results to be compared."""
SCENES = {"acdc", "cityscapes", "scenes"}
"""Data with a label a pixel."""

SHARED = ("source", "source_images", "probe_images", "preset")
"""What all methods of a plan are given alike, besides the protocol."""

ENGINES = ("eager", "recorded", "auto")
PRECISIONS = ("fp32", "tf32", "bf16")
PROBES = ("snapshot", "readapt", "none")


class PlanError(ValueError):
    """A plan that cannot be carried out, with the reason."""


@dataclass(frozen=True)
class Job:
    """One run of a plan."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.method}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What is compared, and under what protocol."""

    methods: Sequence[str] = tuple(METHODS)
    model: str = "digits-resnet"
    data: str = "digits"
    scenario: str = "lifelong"
    severity: int = 5
    shifts: Sequence[str] | None = None
    seeds: Sequence[int] = (0,)
    batch_size: int = None  # type: ignore[assignment]
    """Not given, 64, and one street scene at a time."""
    images: int | None = None
    """Of each domain; None takes all."""
    source: str | None = None
    """Where clean images for the Fisher importance of EATA and EATA-C come from; None: the data's own clean part."""
    source_images: int = None  # type: ignore[assignment]
    """How many; not given, 2,000, and 20 street scenes, as the paper has it."""
    probe: str = "snapshot"
    """How forgetting is measured: from a `snapshot` that leaves the stream untouched, by the paper's `readapt`ation to
    clean images between the domains, or not at all (`none`)."""
    probe_images: int = 1000
    preset: str | None = None
    """Whose hyper-parameters to start from (see `presets`); None goes by whether the network has BatchNorm."""
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments by method, `{"eata": {"beta": 500}}`."""
    device: str = "cpu"
    engine: str = "eager"
    """How passes run: `eager`, or `auto`, as fast as the device allows once it is compiled."""
    precision: str = "fp32"
    workers: int = 0
    cache: str | None = None
    """A folder where decoded images are kept: files are decoded once, not for each method and seed."""
    rounds: int = 10
    """Of the scenario `rounds`."""

    def __post_init__(self) -> None:
        scenes = not SCENES.isdisjoint(self.data.split(":")[:2])
        for name, usual, of_scenes in (("batch_size", 64, 1), ("source_images", 2000, 20)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, of_scenes if scenes else usual)
        checked: list[tuple[str, Iterable[str], str]] = [
            *((method, METHODS, "method") for method in (*self.methods, *self.overrides)),
            (self.scenario, SCENARIOS, "scenario"),
            (self.engine, ENGINES, "engine"),
            (self.precision, PRECISIONS, "precision"),
            (self.probe, PROBES, "probe"),
        ]
        for value, known, what in checked:
            if value not in [*known]:
                raise PlanError(f"no {what} {value!r}: choose from {', '.join(known)}")
        if not self.methods or not self.seeds:
            raise PlanError("a plan needs at least one method and one seed")
        for name in ("severity", "batch_size", "images", "source_images", "probe_images", "rounds"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PlanError(f"{name}={value!r}: expected a number of at least 1")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """The reverse of `as_dict`; also what a configuration file holds."""
        if unknown := content.keys() - {f.name for f in fields(cls)}:
            raise PlanError(
                f"a plan has no {', '.join(sorted(unknown))}: it has {', '.join(f.name for f in fields(cls))}"
            )
        for name in ("methods", "seeds", "shifts"):
            if not isinstance(content.get(name, []), (list, tuple, type(None))):
                raise PlanError(f"{name}={content[name]!r}: expected a list")
        arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content.items()}
        return cls(**arguments)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content

    def jobs(self) -> Iterator[Job]:
        """Seed by seed, method by method."""
        for seed in self.seeds:
            for method in self.methods:
                yield Job(method, seed)

    @property
    def protocol(self) -> dict[str, Any]:
        """What must be equal for results to be compared."""
        whole = self.as_dict()
        return {name: whole[name] for name in PROTOCOL if name != "rounds" or self.scenario == "rounds"}

    def arguments(self, job: Job) -> dict[str, Any]:
        """What a job's method was given besides: settings of all methods, and its own overrides."""
        whole = self.as_dict()
        return {**{name: whole[name] for name in SHARED}, **whole["overrides"].get(job.method, {})}


def read_overrides(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`["eata.beta=500"]` as `{"eata": {"beta": 500}}`."""
    read: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        method, dot, argument = name.partition(".")
        if not equals or not dot or method not in METHODS:
            raise PlanError(f"--set {setting}: expected METHOD.ARGUMENT=VALUE, such as eata.beta=500")
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        read.setdefault(method, {})[argument] = value
    return read
