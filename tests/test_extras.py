"""What to install is said by the name of the right package, and in the way in which ours was installed."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from acclimate import extras
from acclimate.bench.networks import NetworkError, load_network

BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")'
LAZY = """
def __getattr__(name):
    try:
        import torchvision
    except RuntimeError as error:
        raise ModuleNotFoundError(f"Could not import module {name!r}") from error
"""


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'acclimate[bench]'"),
        ({"url": "file:///a", "dir_info": {"editable": True}}, "pip install -c constraints.txt -e '.[bench]'"),
        ({"url": "file:///a", "dir_info": {}}, "pip install -c constraints.txt '.[bench]'"),
        ({"url": "file:///a.whl", "archive_info": {}}, "pip install 'acclimate[bench] @ file:///a.whl'"),
        (
            {"url": "https://host/a", "vcs_info": {"vcs": "git"}},
            "pip install 'acclimate[bench] @ git+https://host/a'",
        ),
    ],
)
def test_an_extra_is_installed_as_the_package_was(
    origin: dict | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(extras, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert extras.install_command("bench").endswith(command)


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    assert "constraints.txt" in extras.install_command("bench")


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_an_integration_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name, *(module for module in sys.modules if module.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"acclimate.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"\[{name}\]"):
        importlib.import_module(f"acclimate.integrations.{name}")


@pytest.mark.parametrize(
    ("spec", "packages", "remedy"),
    [
        ("timm:resnet18", {"timm": "import torchvision", "torchvision": BROKEN}, "install a build of torchvision"),
        ("timm:resnet18", {"timm": "import torchvision.ops"}, "pip install torchvision"),
        ("timm:resnet18", {}, "pip install timm"),
        ("timm:resnet18", {"timm": "raise RuntimeError('old')"}, "install a build of timm"),
        ("hf:vit", {"transformers": LAZY, "torchvision": BROKEN}, "install a build of torchvision"),
    ],
)
def test_the_package_that_fails_to_import_is_named(
    spec: str, packages: dict[str, str], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision", "transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name, content in packages.items():
        (tmp_path / f"{name}.py").write_text(content)
    try:
        with pytest.raises(NetworkError, match=remedy):
            load_network(spec)
    finally:
        for name in packages:
            sys.modules.pop(name, None)
