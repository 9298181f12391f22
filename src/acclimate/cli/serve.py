"""The command `acclimate serve`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ..extras import install_command
from ..service.settings import Settings
from .options import plan_options
from .terminal import one_line_errors, say

__all__ = ["serve"]


@plan_options(of=Settings)
def serve(
    options: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="A JSON or TOML file with settings; options override it.")] = None,
) -> None:
    """Serve a model that adapts: predictions over HTTP, and a page that shows what it is doing.

    With no options it serves the embedded network for digits.
    """
    with one_line_errors("cannot serve"):
        try:
            for package in ("fastapi", "uvicorn", "prometheus_client", "python_multipart", "PIL"):
                importlib.import_module(package)
        except ImportError as error:
            raise ImportError(f"{error.name} is missing: {install_command('serve')}") from error
        settings = Settings.read(config, options)
        if settings.replicas is not None:
            from ..service.on_ray import run
        else:
            from ..service.server import serve as run
        run(settings, say)
