"""The files in deploy/: they parse, and name what exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
yaml = pytest.importorskip("yaml", reason="PyYAML reads the compose file")

from acclimate.service.metrics import Metrics  # noqa: E402

DEPLOY = Path(__file__).parents[1] / "deploy"


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/acclimate.json").read_text())
    used = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"acclimate_\w+", target["expr"])
    }
    known = {sample for family in Metrics().registry.collect() for sample in _samples(family)}
    assert len(used) >= 10
    assert used <= known


def _samples(family) -> set[str]:  # type: ignore[no-untyped-def]
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {family.name + ending for ending in endings[family.type]}


def test_the_compose_file_names_files_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose["services"].keys() == {"acclimate", "prometheus", "grafana"}
    build = compose["services"]["acclimate"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    mounted = [v.split(":")[0] for s in compose["services"].values() for v in s["volumes"] if v.startswith("./")]
    assert mounted
    assert all((DEPLOY / name).exists() for name in mounted)
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert scraped[0]["targets"] == ["acclimate:8000"]


def test_there_is_time_to_write_the_state() -> None:
    unit = re.search(r"TimeoutStopSec=(\d+)", (DEPLOY / "acclimate.service").read_text())
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["acclimate"]["stop_grace_period"]
    assert unit is not None
    assert min(int(unit[1]), int(compose.removesuffix("s"))) >= 90  # requests have 5 s, and the worker 60


@pytest.mark.parametrize(
    "words",
    [
        shlex.split(re.sub(r'[",\[\]]', " ", re.search(r"ENTRYPOINT (.*)", (DEPLOY / "Dockerfile").read_text())[1])),
        shlex.split(re.search(r"ExecStart=(.*)", (DEPLOY / "acclimate.service").read_text())[1]),
    ],
    ids=["Dockerfile", "systemd"],
)
def test_the_commands_have_options_that_exist(words: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "acclimate", "serve", "--help"],
        check=True,
        capture_output=True,
        text=True,
        env={"COLUMNS": "200", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
    ).stdout
    given = [word for word in words if word.startswith("--")]
    assert len(given) >= 3
    assert all(option in shown for option in given)
