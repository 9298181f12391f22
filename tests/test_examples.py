"""The gallery: every program runs by itself, and shows something."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning", "ignore:.*many workers", "ignore:a batch of")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [example.name])
    mpl.use("agg")
    plt.close("all")
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(example), run_name="__main__")
        assert capsys.readouterr().out or plt.get_fignums()
        draws = "plt.figure(" in example.read_text() or "plt.subplots(" in example.read_text()
        assert bool(plt.get_fignums()) == draws
    finally:
        plt.close("all")
        torch.set_num_threads(threads)
    assert [*tmp_path.iterdir()] == [], "it leaves files where it was started"


def test_the_server_ends_with_a_client_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def refuse(_: object) -> None:
        raise OSError("the client fails")

    server = SimpleNamespace(
        stderr=["at http://127.0.0.1:1"],
        terminate=lambda: ended.append("asked"),
        communicate=lambda: ended.append("gone"),
    )
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: server)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    (example,) = (path for path in EXAMPLES if path.name.startswith("12"))
    with pytest.raises(OSError, match="the client fails"):
        runpy.run_path(str(example))
    assert ended == ["asked", "gone"]


def test_examples_have_a_title_and_download_nothing() -> None:
    for example in EXAMPLES:
        text = example.read_text()
        title, line = text.removeprefix('"""\n').splitlines()[:2]
        assert line == "=" * len(title), example.name
        assert "pretrained=True)" not in text.replace("``pretrained=True``", "")
