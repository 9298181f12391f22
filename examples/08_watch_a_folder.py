"""
Single images: a folder watched like a camera
=============================================

Each image that appears is predicted at once, and learned from in batches. With a folder of your own,
``python examples/08_watch_a_folder.py FOLDER``, it runs until Ctrl-C; without one, some digits arrive.
"""

# %%
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import acclimate
from acclimate.bench.networks import load_network
from acclimate.data import load_digits


def read(path: Path) -> torch.Tensor:
    """Return a grey image as (1, 1, H, W) in [0, 1]."""
    return torch.from_numpy(np.array(Image.open(path).convert("L"))).float()[None, None] / 255


def camera(folder: Path, count: int) -> None:
    """Write digits, one after another."""
    for number, image in enumerate(load_digits()[1].x[:count]):
        Image.fromarray((255 * image[0]).byte().numpy()).save(folder / f"{number:05}.tmp.png")
        (folder / f"{number:05}.tmp.png").rename(folder / f"{number:05}.png")  # complete when it appears


# %%
# ``Stream`` predicts single images with moving statistics, and learns when a batch has gathered.
def watch(folder: Path, stop_after: int | None) -> None:
    """Predict what appears in a folder, until Ctrl-C or so many images."""
    train, _ = load_digits()
    adapter = acclimate.EATA(load_network("digits-resnet").model, source=train.x[:512], lr=1e-3)
    guard = acclimate.Guard(adapter, probe=train.x[512:1024])
    seen: set[Path] = set()
    with acclimate.Stream(guard, size=64, wait=1.0) as stream:
        while stop_after is None or len(seen) < stop_after:
            new = sorted({path for path in folder.glob("*.png") if ".tmp" not in path.name} - seen)
            for path in new:
                confidence, label = stream(read(path)).softmax(1).max(1)
                if len(seen) % 40 == 0:
                    print(f"{path.name}: {int(label)} ({100 * float(confidence):.0f} %), learned from {stream.learned}")
                seen.add(path)
            time.sleep(0 if new else 0.05)
    print(guard.health)


if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
    watch(Path(sys.argv[1]), None)
else:
    with tempfile.TemporaryDirectory() as new_folder:
        threading.Thread(target=camera, args=(Path(new_folder), 160), daemon=True).start()
        watch(Path(new_folder), 160)
