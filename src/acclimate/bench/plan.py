"""A plan: what is compared, and under what protocol. Plain data, and the single source of a run's options.

Command-line options, configuration files and the paper's recipes all have the fields of `Plan`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..checks import no_such
from ..core.options import NETWORKS
from ..core.settings_file import is_settings_file
from ..core.signature import arguments_of
from ..methods import METHODS
from ..online.guard import GUARD_OPTIONS
from .scenarios import SCENARIOS

__all__ = [
    *("PROTOCOL", "SHARED", "Job", "Plan", "PlanError", "check_fields", "check_overrides", "combine", "option"),
    *("read_assignment", "read_config", "read_overrides"),
]

PROTOCOL = (
    "data",
    "scenario",
    "severity",
    "shifts",
    "batch_size",
    "images",
    "probe",
    "precision",
    "rounds",
    "skip_broken",
)
"""Fields that must be equal for results to be compared."""

SHARED = ("source", "source_images", "probe_images", "preset")
"""Fields that all methods of a plan share, in addition to the protocol."""

_OPTIONS = {
    "source": "all methods have the clean images of --source",
    "seed": "all methods have the seeds of --seed",
    "classes": "all methods have the classes of --data",
}
"""Arguments of methods that a plan gives them."""

_SCENES = {"acdc", "cityscapes", "scenes"}
"""Data with one label per pixel."""


class PlanError(ValueError):
    """A plan that cannot be carried out."""


@dataclass(frozen=True)
class Job:
    """One run of a plan."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.method}-seed{self.seed}"


def option(
    default: Any,
    about: str,
    *,
    name: str = "",
    least: int | None = None,
    most: int | None = None,
    choices: Iterable[str] = (),
    usual: str | None = None,
) -> Any:
    """A field of a plan: its default, and its option's help, name, bounds, choices and default in words."""
    option = {"help": about, "name": name, "least": least, "most": most, "choices": [*choices], "usual": usual}
    return field(default_factory=dict, metadata=option) if default is dict else field(default=default, metadata=option)


@dataclass(frozen=True)
class Plan:
    """What is compared, and under what protocol. The fields' metadata describes them.

    >>> plan = Plan(methods=["source", "eata"], images=32, shifts=["fog"], overrides={"eata": {"beta": 500}})
    >>> [job.name for job in plan.jobs()]
    ['source-seed0', 'eata-seed0']
    """

    methods: Sequence[str] = option(
        tuple(METHODS),
        "A method to run; repeat for more. `acclimate methods` lists them.",
        name="method",
        choices=METHODS,
        usual="all that fit",
    )
    model: str = option("digits-resnet", "A network: `acclimate list` shows how to name one.")
    data: str = option("digits", "A data set: `acclimate list` shows how to name one.")
    scenario: str = option("lifelong", "Order of the domains, and when to reset.", choices=SCENARIOS)
    severity: int = option(5, "Severity of the corruptions.", least=1, most=5)
    shifts: Sequence[str] | None = option(None, "A corruption; repeat for more.", name="shift", usual="all")
    seeds: Sequence[int] = option((0,), "Seed of the stream and the adapters; repeat for more.", name="seed", usual="0")
    batch_size: int = option(None, "Images per batch.", least=1, usual="64; 1 for street scenes")
    images: int | None = option(None, "Images per domain.", least=1, usual="all")
    source: str | None = option(
        None, "Data set with clean images for the Fisher importance of EATA and EATA-C.", usual="that of --data"
    )
    source_images: int = option(
        None, "Clean images for the Fisher importance.", least=1, usual="2,000; 20 street scenes, as in the paper"
    )
    probe: str = option(
        "snapshot",
        "How to measure forgetting: from a snapshot that leaves the stream unchanged, by the paper's adaptation to "
        "clean images between the domains, or not at all.",
        choices=("snapshot", "readapt", "none"),
    )
    probe_images: int = option(1000, "Clean images that forgetting is measured on.", least=1)
    preset: str | None = option(
        None,
        "Hyper-parameters to start from, or the file of `acclimate tune`.",
        choices=NETWORKS,
        usual="depends on the network",
    )
    overrides: Mapping[str, Mapping[str, Any]] = option(
        dict, "An argument of a method, such as eata.beta=500, or of guard; repeat for more.", name="set"
    )
    device: str = option("cpu", "Device, such as cpu or cuda.")
    engine: str = option(
        "eager",
        "How passes run: eagerly, as CUDA graphs, or compiled as well.",
        choices=("eager", "recorded", "auto"),
    )
    precision: str = option(
        "fp32", "Number format.", choices=("fp32", "tf32", "bf16"), usual="fp32; bf16 with engine auto on a GPU"
    )
    workers: int = option(0, "Processes that read images.", least=0, usual="0; most cores on a GPU")
    cache: str | None = option(None, "Folder for decoded images, so that each file is decoded only once.")
    skip_broken: bool = option(
        False, "Leave out images that cannot be read, and count them; otherwise the first one stops the run."
    )
    rounds: int = option(10, "Rounds of the scenario `rounds`.", least=1)
    guard: bool = option(False, "Watch every method with a guard, which undoes a collapse and answers while it lasts.")

    def __post_init__(self) -> None:
        scenes = not _SCENES.isdisjoint(self.data.split(":")[:2])
        for name, usual, of_scenes in (("batch_size", 64, 1), ("source_images", 2000, 20)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, of_scenes if scenes else usual)
        for name in ("methods", "seeds"):  # named twice counts once
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        check_fields(self)
        check_overrides(self.overrides, _OPTIONS, guard=self.guard)
        if not self.methods or not self.seeds:
            raise PlanError("a plan needs at least one method and one seed")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """Read what `as_dict` wrote, or a configuration file."""
        if unknown := content.keys() - {f.name for f in fields(cls)}:
            raise PlanError(f"a plan has {no_such('field', min(unknown), [f.name for f in fields(cls)])}")
        for name in ("methods", "seeds", "shifts"):
            if not isinstance(content.get(name, []), (list, tuple, type(None))):
                raise PlanError(f"{name}={content[name]!r}: expected a list")
        arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in content.items()}
        return cls(**arguments)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content

    def jobs(self) -> Iterator[Job]:
        """Yield each method with each seed, seed by seed."""
        for seed in self.seeds:
            for method in self.methods:
                yield Job(method, seed)

    @property
    def protocol(self) -> dict[str, Any]:
        """The fields that must be equal for results to be compared."""
        whole = self.as_dict()
        idle = {"rounds": self.scenario != "rounds", "skip_broken": not self.skip_broken}
        return {name: whole[name] for name in PROTOCOL if not idle.get(name)}

    def arguments(self, job: Job) -> dict[str, Any]:
        """Return the arguments of a job's method: settings that all methods share, and its own overrides."""
        whole = self.as_dict()
        guard = {"guard": whole["overrides"].get("guard", True)} if self.guards(job) else {}
        return {**{name: whole[name] for name in SHARED}, **guard, **whole["overrides"].get(job.method, {})}

    def guards(self, job: Job) -> bool:
        """Return whether a job's method is watched by a guard; the source network needs none."""
        return self.guard and job.method != "source"


def check_fields(values: Any) -> None:
    """Raise if a field of a dataclass has a value that its `option` does not allow."""
    for each in fields(values):
        name, value, bounds = each.metadata["name"] or each.name, getattr(values, each.name), each.metadata
        if value is None and each.default is None:
            continue
        choices, own = bounds["choices"], name == "preset" and is_settings_file(value)
        if name == "method":
            _check_methods([value] if isinstance(value, str) else value)
        elif choices and value not in choices and not own:
            raise PlanError(no_such(name, value, choices))
        if isinstance(each.default, bool) and not isinstance(value, bool):
            raise PlanError(f"{name}={value!r}: expected true or false")
        least, most = bounds["least"], bounds["most"]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if least is not None and not (whole and value >= least and (most is None or value <= most)):
            expected = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise PlanError(f"{name}={value!r}: expected a number {expected}")


def check_overrides(
    overrides: Mapping[str, Mapping[str, Any]], reserved: Mapping[str, str], *, guard: bool = True
) -> None:
    """Raise for arguments that a method or the guard does not have, or that are `reserved`, for the reason given."""
    _check_methods(overrides.keys() - {"guard"})
    if "guard" in overrides and not guard:
        raise PlanError("there are settings for a guard, but no guard: add --guard, or leave them out")
    for method, settings in overrides.items():
        if not isinstance(settings, Mapping):
            raise PlanError(f"overrides of {method} are {settings!r}: expected arguments by name, {{'lr': 0.01}}")
        for name in settings:
            if name in reserved:
                raise PlanError(f"{method}.{name} cannot be set: {reserved[name]}")
            taken = GUARD_OPTIONS if method == "guard" else arguments_of(METHODS[method])
            if name not in (known := [each for each in taken if each not in reserved]):
                raise PlanError(f"{method} has {no_such('argument', name, known)}")


def _check_methods(names: Iterable[str]) -> None:
    for name in names:
        if name not in METHODS and name not in (known := METHODS.known()):
            raise PlanError(no_such("method", name, known))


def combine(config: Mapping[str, Any], options: Mapping[str, Any]) -> Plan:
    """Return the plan of a configuration, overridden by options. On a GPU workers read images, and `auto` uses bf16."""
    both: dict[str, Any] = {**config, **options}
    old, new = (content.get("overrides", {}) for content in (config, options))
    both["overrides"] = {name: {**old.get(name, {}), **new.get(name, {})} for name in {**old, **new}}
    if str(both.get("device", "cpu")).startswith("cuda"):
        both.setdefault("workers", max(1, min(16, (os.cpu_count() or 2) - 1)))
        if both.get("engine") == "auto":
            both.setdefault("precision", "bf16")
    return Plan.from_dict(both)


def read_config(file: Path) -> dict[str, Any]:
    """Read fields of a plan from a JSON or TOML file."""
    try:
        text = file.read_text("utf-8")
        if file.suffix == ".toml":
            import tomllib

            return tomllib.loads(text)
        content = json.loads(text)
    except ImportError as error:
        raise PlanError(f"{file}: TOML needs Python 3.11: write it as JSON") from error
    except ValueError as error:
        kind = "TOML" if file.suffix == ".toml" else "JSON; TOML is read from files that end with .toml"
        raise PlanError(f"{file} cannot be read ({error}): expected {kind}") from error
    if not isinstance(content, dict):
        raise PlanError(f"{file} has no plan: expected an object with methods, model, data, …")
    return content


def read_overrides(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read `["eata.beta=500"]` as `{"eata": {"beta": 500}}`."""
    read: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, value = read_assignment(setting, "METHOD.ARGUMENT=VALUE, such as eata.beta=500")
        method, dot, argument = name.partition(".")
        if not dot:
            raise PlanError(f"--set {setting}: expected METHOD.ARGUMENT=VALUE, such as eata.beta=500")
        if method not in METHODS and method not in (known := METHODS.known()):
            raise PlanError(f"--set {setting}: {no_such('method', method, known)}")
        read.setdefault(method, {})[argument] = value
    return read


def read_assignment(setting: str, expected: str = "ARGUMENT=VALUE, such as lr=0.01") -> tuple[str, Any]:
    """Read `"lr=0.01"` as `("lr", 0.01)`."""
    name, equals, value = setting.partition("=")
    if not equals or not name:
        raise PlanError(f"--set {setting}: expected {expected}")
    return name, _value(value)


def _value(text: str) -> Any:
    """Return the Python value that a text means, or the text itself."""
    if text.strip("+-").lower() in ("nan", "inf"):
        return float(text)
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text
