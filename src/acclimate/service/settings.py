"""The settings of a server. Plain data, and the single source of its options and its configuration file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..bench.demo import DEMO_NETWORKS
from ..bench.plan import PlanError, check_fields, check_overrides, option, read_config
from ..checks import no_such
from ..core.options import NETWORKS
from ..methods import METHODS

__all__ = ["TOKEN", "Settings", "SettingsError"]

TOKEN = "ACCLIMATE_TOKEN"  # noqa: S105
"""The environment variable that has the token for control."""
_MEGA = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_RESERVED = {
    "source": "--source names the clean images",
    "engine": "--engine says how passes run",
    "classes": "a server predicts all classes of its network",
    "ranks": "a server is one process: --replicas starts more",
}
"""Arguments of a method that the server gives it."""


class SettingsError(PlanError):
    """Settings that no server can have."""


@dataclass(frozen=True)
class Settings:
    """What is served, and within which limits. The fields' metadata describes them."""

    model: str = option("digits-resnet", "A network: `acclimate list` shows how to name one.")
    method: str = option("eata-c", "How it adapts.", choices=METHODS)
    source: str | None = option(
        None,
        "Unlabelled images like the training images: a folder, or a data set. EATA and EATA-C need them, and the guard "
        "uses some.",
        usual="the digits' own",
    )
    source_images: int = option(2000, "How many of them are used at most, the guard's 512 included.", least=64)
    preset: str | None = option(
        None,
        "Hyper-parameters to start from, or the file of `acclimate tune`.",
        choices=NETWORKS,
        usual="depends on the network",
    )
    overrides: Mapping[str, Mapping[str, Any]] = option(
        dict,
        "An argument of the method, such as eata-c.lr=0.001, or guard.tolerated=0.05; repeat for more.",
        name="set",
    )
    guard: bool = option(True, "Watch the method, and undo what harms.")
    device: str = option("cpu", "Device, such as cpu or cuda.")
    engine: str = option(
        "eager", "How passes run: eagerly, as CUDA graphs, or compiled as well.", choices=("eager", "recorded", "auto")
    )
    labels: str | None = option(None, "Names of the classes: a text file with one per line, or a JSON list.")
    name: str | None = option(None, "The model's name in addresses.", usual="that of the network")
    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0 lets other machines in.")
    allow_host: Sequence[str] = option(
        (), "A host name under which a proxy reaches the server, in addition to 127.0.0.1; repeat for more."
    )
    port: int = option(8000, "Port to listen on; 0 takes a free one.", least=0, most=65535)
    state: str = option("acclimate-serve", "Folder for states, snapshots and the audit log.")
    save_every: int = option(60, "Seconds between two writes of the state.", least=1)
    cameras: int = option(100, "States of cameras in memory; others wait in the folder.", least=1)
    batch_size: int = option(64, "Images predicted at once, and learned from at once.", least=1)
    wait: int = option(5, "Milliseconds for which a request waits for others to share its batch.", least=0)
    queue: int = option(256, "Images that may wait. Further ones are answered with 503.", least=1)
    connections: int = option(256, "Connections at a time.", least=1)
    body: int = option(16, "Megabytes of a request at most.", least=1)
    load_body: int = option(1000, "Megabytes of a state that is sent to /control/load at most.", least=1)
    pixels: int = option(25, "Megapixels of an image at most.", least=1)
    timeout: int = option(30, "Seconds for which a slow client is waited for.", least=1)
    log: str = option(
        "auto", "Lines of text, or JSON.", choices=("auto", "text", "json"), usual="text on a terminal, else json"
    )
    replicas: int | None = option(
        None, "Run so many replicas on Ray Serve; cameras are routed to the one that has their state.", least=1
    )
    demo: bool = option(False, "Send corrupted digits to itself, so that the page has something to show.")
    token_file: str | None = option(None, f"File with the token for control; else ${TOKEN}. Without one it is off.")

    def __post_init__(self) -> None:
        try:
            check_fields(self)
            check_overrides(self.overrides, _RESERVED, guard=self.guard)
        except PlanError as error:
            raise SettingsError(str(error)) from error
        if others := sorted(self.overrides.keys() - {self.method, "guard"}):
            raise SettingsError(f"{others[0]} has settings, and the method is {self.method}: leave them out")
        if self.demo and self.model not in DEMO_NETWORKS.values():
            raise SettingsError(f"--demo sends digits, and {self.model} is for other images: leave it out")
        if self.name is not None and not _NAME.fullmatch(str(self.name)):
            raise SettingsError(f"name={self.name!r}: expected letters, digits, dots, dashes and underscores")
        named = isinstance(self.allow_host, (list, tuple)) and all(isinstance(name, str) for name in self.allow_host)
        for name in self.allow_host if named else [self.allow_host]:
            if not named or not _HOST.fullmatch(str(name)):
                expected = "expected host names without scheme and port, such as tta.example.org"
                raise SettingsError(f"allow_host={name!r}: {expected}")
        if "://" in self.state:
            raise SettingsError(f"state={self.state} is not a folder: the server needs one that it can lock")
        if self.queue < self.batch_size:
            raise SettingsError(f"queue={self.queue} is smaller than batch_size={self.batch_size}: no batch would fill")

    @classmethod
    def read(cls, config: Path | None, options: Mapping[str, Any]) -> Settings:
        """Return the settings of a JSON or TOML file, overridden by options."""
        content = {**(read_config(config) if config is not None else {}), **options}
        if unknown := content.keys() - {f.name for f in fields(cls)}:
            raise SettingsError(f"a server has {no_such('setting', min(unknown), [f.name for f in fields(cls)])}")
        return cls(**content)

    @property
    def token(self) -> str | None:
        """The token for control, or None."""
        if self.token_file is not None:
            file = Path(self.token_file)
            if not file.is_file():
                found = "is a folder" if file.is_dir() else "does not exist"
                raise SettingsError(f"--token-file {file} {found}: name a file that has the token")
            token = file.read_text("utf-8", errors="replace").strip()
        else:
            token = os.environ.get(TOKEN, "").strip()
            if not token:
                return None
        if len(token) < 16:
            raise SettingsError("the token has fewer than 16 characters: make one with `openssl rand -hex 16`")
        if not (token.isascii() and token.isprintable()):  # no header could have it
            raise SettingsError("the token has other than ASCII characters: make one with `openssl rand -hex 16`")
        return token

    @property
    def most_bytes(self) -> int:
        """The largest body of a request."""
        return self.body * _MEGA

    @property
    def most_state_bytes(self) -> int:
        """The largest state that is loaded."""
        return self.load_body * _MEGA

    @property
    def most_pixels(self) -> int:
        """The largest image."""
        return self.pixels * _MEGA

    def allows(self, host: str) -> bool:
        """Return whether `allow_host` has a name, which may have a port."""
        return re.sub(":[0-9]+$", "", host).lower() in map(str.lower, self.allow_host)

    @property
    def checks_host(self) -> bool:
        """Whether the server is reached under known names only."""
        return self.host in ("127.0.0.1", "localhost", "::1") or bool(self.allow_host)
