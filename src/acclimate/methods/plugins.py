"""Methods of other packages, which name them as entry points. They are looked for when one is asked for."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from ..core.adapter import Adapter

__all__ = ["GROUP", "Methods", "plugin_names"]

GROUP = "acclimate.methods"
"""The group of entry points: `[project.entry-points."acclimate.methods"]` in a package's pyproject.toml."""


class Methods(dict[str, type[Adapter]]):
    """Our methods by name. `METHODS[name]` also finds an installed plug-in; iterating gives ours alone.

    >>> import acclimate
    >>> acclimate.METHODS["eata"].__name__
    'EATA'
    """

    def __missing__(self, name: str) -> type[Adapter]:
        """Load a plug-in."""
        found = _plugins().get(name)
        if found is None:
            raise KeyError(name)
        try:
            method = found.load()
        except Exception as error:
            raise ImportError(f"the plug-in {name} ({found.value}) could not be imported: {error}") from error
        if not (isinstance(method, type) and issubclass(method, Adapter)):
            raise TypeError(
                f"the plug-in {name} ({found.value}) is not a method: expected a subclass of acclimate.Adapter"
            )
        return method

    def known(self) -> list[str]:
        """Return every name, ours first and then those of installed plug-ins."""
        return [*self, *(name for name in plugin_names() if name not in self)]


def plugin_names() -> list[str]:
    """Return the names of installed plug-ins. None is imported."""
    return sorted(_plugins())


def _plugins() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}
