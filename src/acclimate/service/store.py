"""The folder of a server: states of cameras, snapshots, whether learning is frozen, and the audit log.

cameras/     one state per camera (`acclimate.Streams`)
snapshots/   states that someone asked for
audit.jsonl  one line per control call, never rewritten
control.json whether learning is frozen
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from secrets import token_hex
from typing import Any

from ..core.snapshot import DamagedStateError, StateError
from ..files import write_text
from ..online.one_by_one import Stream
from .errors import Refusal
from .settings import SettingsError

__all__ = ["Store"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST = 1000


class Store:
    """The folder of one server."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.cameras, self.snapshots = self.folder / "cameras", self.folder / "snapshots"
        try:
            for place in (self.cameras, self.snapshots):
                place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"--state {folder} cannot be a folder ({error.strerror}): name another, or one that does not exist yet"
            ) from error
        self._control, self._log = self.folder / "control.json", self.folder / "audit.jsonl"

    @property
    def frozen(self) -> bool:
        """Whether learning was frozen by a control call."""
        if not self._control.is_file():
            return False
        try:
            return bool(json.loads(self._control.read_text())["frozen"])
        except (ValueError, LookupError, TypeError) as error:
            raise DamagedStateError(f"{self._control} is damaged: remove it, and the server learns") from error

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        write_text(self._control, json.dumps({"frozen": frozen}) + "\n")

    def audit(self, entry: Mapping[str, Any]) -> None:
        """Append a line to the audit log, and wait until it is on the disk."""
        line = json.dumps({"time": _now(), **entry}, ensure_ascii=False) + "\n"
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)

    def check(self, learner: Stream) -> list[str]:
        """Try all states of cameras. Set damaged ones aside, and return their names; raise for another model's."""
        damaged = []
        start = learner.snapshot()
        for path in sorted(self.cameras.glob("*.safetensors")):
            try:
                _check_name(path)
                learner.restore(learner.read(path))
            except DamagedStateError:  # noqa: PERF203
                path.rename(path.with_suffix(f".damaged-{token_hex(4)}"))
                damaged.append(path.name)
            except StateError as error:
                raise StateError(f"{path}: {error}. Choose another folder with --state") from error
        learner.restore(start)
        return damaged

    # Snapshots --------------------------------------------------------------------------------------------------------

    def new_snapshot(self, stream: str, name: str | None, write: Callable[[Path], None]) -> str:
        """Write a snapshot, and return its name."""
        name = name or datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
        path = self._path(name)
        if path.exists():
            raise Refusal(409, f"there is a snapshot {name} already: choose another name")
        if sum(1 for _ in self.snapshots.glob("*.safetensors")) >= _MOST:
            raise Refusal(409, f"there are {_MOST} snapshots: remove some from {self.snapshots.name}/")
        write(path)
        try:
            write_text(path.with_suffix(".json"), json.dumps({"stream": stream, "time": _now()}) + "\n")
        except OSError:
            path.unlink()  # a snapshot is both files
            raise
        return name

    def list_snapshots(self) -> list[dict[str, Any]]:
        """Return names, cameras, times and sizes, the oldest first."""
        found = []
        for path in self.snapshots.glob("*.safetensors"):
            about = _about(path)
            found.append(
                {
                    "name": path.stem,
                    "stream": about.get("stream", ""),
                    "time": about.get("time", ""),
                    "bytes": path.stat().st_size,
                }
            )
        return sorted(found, key=lambda each: (str(each["time"]), each["name"]))

    def find_snapshot(self, name: str) -> tuple[Path, str]:
        """Return the file of a snapshot, and the camera that it was taken of; an empty name if that is not known."""
        path = self._path(name)
        if not path.is_file():
            raise Refusal(404, f"there is no snapshot {name}: GET /control/snapshots lists them")
        return path, str(_about(path).get("stream", ""))

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise Refusal(400, "the name of a snapshot has letters, digits, dots, dashes and underscores, at most 64")
        return self.snapshots / f"{name}.safetensors"


def _about(snapshot: Path) -> Mapping[str, Any]:
    """Return what was noted about a snapshot; nothing if that file is lost."""
    with suppress(OSError, ValueError):
        content = json.loads(snapshot.with_suffix(".json").read_text())
        return content if isinstance(content, dict) else {}
    return {}


def _check_name(path: Path) -> None:
    """Raise if the file beside a state does not name its camera."""
    try:
        path.with_suffix(".txt").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise DamagedStateError(f"the name of the camera of {path} is lost") from error


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
