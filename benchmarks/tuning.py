"""Is what `acclimate tune` chooses close to the best? `python -m benchmarks.tuning [--images 400]`

For two networks on digits, and for methods that start from the paper's presets for other networks: learning rates are
chosen on every fifth image and the four corruptions that no table uses. Then every rate of the grid is judged on the
other images and the fifteen corruptions, lifelong. Writes `tuning_cpu.json`. Trials are kept in `--trials`, so that a
stopped command goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from acclimate.bench.plan import Job, Plan
from acclimate.bench.run import Run
from acclimate.bench.tables import Table, as_markdown
from acclimate.bench.tune import Tuning, choose, settings_to_try

from .command import command, write

METHODS = ("tent", "sar", "eata", "eata-c")


def measure(plan: Plan, out: Path) -> Iterator[dict[str, Any]]:
    """Yield one entry per method: what was chosen, and the accuracy of every rate on what is judged."""
    tuning = Tuning(replace(plan, data=f"{plan.data}tune"), out / plan.model / "tune")
    judged, first = replace(plan, data=f"{plan.data}judge", probe="none"), None
    trials = [*tuning.trials()]
    for method in plan.methods:
        own, scores = [trial for trial in trials if trial.method == method], []
        for settings in settings_to_try(method, tuning.first.family):
            one = replace(judged, methods=(method,), overrides={method: settings})
            run = Run(one, out / plan.model / f"{method}-{settings['lr']:g}", first)
            first, result = first or run, run.do(Job(method, plan.seeds[0]))
            scores.append({"lr": settings["lr"], "accuracy": 100 * result.accuracy, "ece": 100 * result.ece})
            print(plan.model, method, scores[-1], flush=True)
        yield {
            "network": plan.model,
            "method": method,
            "preset": tuning.first.family,
            "chosen": choose(own).settings["lr"],
            "trials": [{"lr": t.settings["lr"], "accuracy": t.accuracy, "forgotten": t.forgotten} for t in own],
            "judged": scores,
        }


def table(result: Mapping[str, Any]) -> Table:
    """Return one row per network and method."""
    rows = []
    for entry in result["choices"]:
        scores = {score["lr"]: score["accuracy"] for score in entry["judged"]}
        best, preset = max(scores, key=lambda lr: scores[lr]), entry["judged"][0]
        chosen = scores[entry["chosen"]]
        cells = [f"{entry['chosen']:g}", f"{chosen:.1f}", f"{best:g}", f"{scores[best]:.1f}"]
        cells += [f"{scores[best] - chosen:.1f}", f"{preset['accuracy']:.1f}"]
        rows.append([entry["network"], entry["method"], *cells])
    return ["network", "method", "chosen", "accuracy", "best of the grid", "accuracy", "lost", "paper's rate"], rows


def main() -> None:
    """Choose, judge, and write the result file."""
    parser = command(__doc__)
    parser.add_argument("--images", type=int, default=400, help="images per corruption")
    parser.add_argument("--trials", type=Path, default=Path("acclimate-tuning"), help="folder of the trials")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    choices = []
    for kind in ("resnet", "vit"):
        plan = Plan(
            methods=METHODS,
            model=f"digits-{kind}",
            data="digits:",
            images=arguments.images,
            source_images=400,
            probe_images=400,
            device=arguments.device,
        )
        choices += measure(plan, arguments.trials)
    result = {"images": arguments.images, "choices": choices}
    print(as_markdown(*table(result)))
    write("tuning", arguments, result, depth=3)


if __name__ == "__main__":
    main()
