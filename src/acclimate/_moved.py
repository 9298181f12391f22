"""Modules that have moved: their old names work for one release, and warn."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "install"]

MOVED = {
    "adapter": "core.adapter",
    "augment": "parts.augment",
    "branches": "parts.branches",
    "collect": "data.collect",
    "engine.compiled": "engine.tracing",
    "engine.stages": "engine.two_stage_norm",
    "evaluate": "bench.evaluate",
    "experiment": "bench.run",
    "figures": "bench.figures",
    "fisher": "parts.fisher",
    "metrics": "bench.metrics",
    "models": "bench.own_networks",
    "network": "checks",
    "norm": "parts.batchnorm",
    "normalised": "parts.normalised",
    "optimizers": "parts.optimizers",
    "parameters": "parts.parameters",
    "passes": "core.step",
    "pixels": "parts.multiscale",
    "plan": "bench.plan",
    "prediction": "core.prediction",
    "randomness": "parts.randomness",
    "replay": "parts.image_buffer",
    "report": "bench.report",
    "results": "bench.result_folder",
    "scenarios": "bench.scenarios",
    "selection": "parts.selection",
    "sharpness": "parts.sharpness",
    "state": "core.state",
    "stream": "bench.stream",
    "tables": "bench.tables",
    "teacher": "parts.teacher",
    "terminal": "cli.terminal",
    "zoo": "bench.networks",
}
"""Old names of modules below `acclimate`, and their new ones. `acclimate.subnetwork` stays the function."""


class _Alias(MetaPathFinder, Loader):
    """Finds a moved module under its old name."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, or None."""
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "acclimate" and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself, under both names."""
        new = f"acclimate.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} has moved: import {new} instead", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._found = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has already run under its new name and keeps that spec."""
        module.__spec__, module.__loader__ = self._found


def install() -> None:
    """Register the finder of old names, after all other finders."""
    if not any(isinstance(finder, _Alias) for finder in sys.meta_path):
        sys.meta_path.append(_Alias())
