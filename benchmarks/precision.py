"""Whether a faster engine predicts as well: `python -m benchmarks.precision [--device cuda] [--out FOLDER]`.

The demo's stream of real digits under twelve corruptions, for methods, engines and seeds (which draw the corruptions
and the sub-networks): mean accuracy and ECE over the seeds, and the range over them. Writes `precision_DEVICE.json`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from acclimate.demo import Demo
from acclimate.evaluate import evaluate, origin
from acclimate.files import write_text
from acclimate.stream import Scenario

ENGINES: dict[str, dict[str, Any]] = {
    "eager fp32": {},
    "eager bf16": {"precision": "bf16"},
    "auto fp32": {"engine": "auto", "precision": "fp32"},
    "auto tf32": {"engine": "auto", "precision": "tf32"},
    "auto bf16": {"engine": "auto", "precision": "bf16"},
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engines", nargs="*", choices=list(ENGINES), default=list(ENGINES))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for seed in range(arguments.seeds):
        for engine in arguments.engines:
            methods = ("source", "tent", "eata", "eata-c")
            show = Demo(methods, seed=seed, device=arguments.device, running=ENGINES[engine])
            scenario = Scenario("demo", list(show.domains()))
            for adapter in show.adapters():
                result = evaluate(adapter, scenario)
                key = (type(adapter.model).__name__, type(adapter).__name__, engine)
                found.setdefault(key, []).append((result.accuracy, result.ece))
                print(*key, seed, f"{100 * result.accuracy:.2f} {100 * result.ece:.2f}", flush=True)
    rows = [
        {"network": network, "method": method, "engine": engine}
        | {"accuracy": [accuracy for accuracy, _ in pairs], "ece": [ece for _, ece in pairs]}
        for (network, method, engine), pairs in sorted(found.items())
    ]
    result = {
        "command": f"python -m benchmarks.precision --device {arguments.device}",
        "origin": origin(torch.device(arguments.device)),
        "seeds": list(range(arguments.seeds)),
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = "h200" if arguments.device == "cuda" else "cpu"
    write_text(arguments.out / f"precision_{name}.json", json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
