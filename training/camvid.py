"""Train a small SegFormer on CamVid.

    python -m training.camvid unpack camvid-240x180.zip DATA       # writes DATA/train, DATA/val, DATA/test
    python -m training.camvid train DATA NETWORK                   # minutes on a GPU; writes Hugging Face's format
    python -m training.camvid score DATA NETWORK                   # writes the mIoU on clean scenes to scores.json
    acclimate run --model hf:NETWORK --data scenes:DATA/test --source scenes:DATA/train --scenario rounds --rounds 3

The 3.7 million weights are not committed.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Generator, Tensor, nn

from acclimate.bench.metrics import Scores
from acclimate.bench.networks import load_network
from acclimate.bench.provenance import origin
from acclimate.checks import read_logits
from acclimate.data.scenes import SceneFolder
from acclimate.data.types import IGNORE
from acclimate.parts.normalised import Normalised

CLASSES = "sky building pole road pavement tree sign fence car pedestrian bicyclist".split()  # noqa: SIM905
VOID = 11
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def unpack(archive: Path, folder: Path, every: int = 1) -> None:
    """Write the archive as folders of scenes, with every `every`-th test scene. Void becomes 255 and is not scored."""
    with zipfile.ZipFile(archive) as packed:
        names = sorted(name for name in packed.namelist() if name.endswith((".jpg", ".png")))
        test = sorted({Path(name).stem for name in names if name.startswith("test/")})
        left_out = set(test) - set(test[::every])
        for name in names:
            if name.startswith("test/") and Path(name).stem in left_out:
                continue
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if "/labels/" not in name:
                path.write_bytes(packed.read(name))
                continue
            labels = np.array(Image.open(io.BytesIO(packed.read(name))))
            Image.fromarray(np.where(labels == VOID, IGNORE, labels).astype(np.uint8)).save(path)


def network(drop: float = 0.2) -> nn.Module:
    """Return a SegFormer-B0 with random weights."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    names = dict(enumerate(CLASSES))
    config = SegformerConfig(
        num_labels=len(CLASSES),
        id2label=names,
        label2id={name: i for i, name in names.items()},
        drop_path_rate=drop,
        semantic_loss_ignore_index=IGNORE,
    )
    net: nn.Module = SegformerForSemanticSegmentation(config)
    return net


def load(folder: Path) -> tuple[Tensor, Tensor]:
    """Return all images and labels of a folder of scenes."""
    scenes = SceneFolder(folder).scenes
    images, labels = zip(*(scenes[i] for i in range(len(scenes))), strict=True)
    return torch.stack(images).float() / 255, torch.stack(labels)


def jiggle(x: Tensor, y: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Scale by 0.75 to 1.75, crop, mirror half of the batches, and change the brightness a little."""
    size = x.shape[-2:]
    scale = 0.75 + float(torch.rand((), generator=generator))
    wide = [max(int(side * scale), 1) for side in size]
    x = F.interpolate(x, size=wide, mode="bilinear", align_corners=False)
    y = F.interpolate(y[:, None].float(), size=wide, mode="nearest")[:, 0]
    missing = [max(side - have, 0) for side, have in zip(size, wide, strict=True)]
    x = F.pad(x, (0, missing[1], 0, missing[0]), value=0.5)
    y = F.pad(y, (0, missing[1], 0, missing[0]), value=IGNORE)
    top, left = (
        int(torch.randint(0, have - side + 1, (), generator=generator))
        for have, side in zip(x.shape[-2:], size, strict=True)
    )
    x, y = (t[..., top : top + size[0], left : left + size[1]] for t in (x, y))
    if float(torch.rand((), generator=generator)) < 0.5:
        x, y = x.flip(-1), y.flip(-1)
    brightness = 0.8 + 0.4 * torch.rand(len(x), 1, 1, 1, generator=generator).to(x.device)
    return (x * brightness).clamp(0, 1), y.long()


def train(data: Path, out: Path, *, epochs: int = 240, lr: float = 8e-4, batch: int = 32, seed: int = 0) -> float:
    """Train with AdamW and a one-cycle learning rate, and return the mIoU on the validation scenes."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(seed)
    x, y = (t.to(device) for t in load(data / "train"))
    net = network().to(device)
    model = Normalised(net, MEAN, STD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=device == "cuda")
    steps = epochs * max(len(x) // batch, 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    loss = torch.zeros(())
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(x), generator=generator).to(device)
        for index in order.split(batch)[: max(len(x) // batch, 1)]:
            images, labels = jiggle(x[index], y[index], generator)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(images).logits
            full = F.interpolate(logits.float(), size=labels.shape[-2:], mode="bilinear", align_corners=False)
            loss = F.cross_entropy(full, labels, ignore_index=IGNORE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if (epoch + 1) % 20 == 0 or epoch + 1 == epochs:
            print(f"epoch {epoch + 1}/{epochs}: loss {loss.item():.3f}", flush=True)
    miou = score(model, data / "val", device)
    print(f"validation mIoU {100 * miou:.1f} %")
    save(net, out)
    return miou


@torch.no_grad()
def score(model: nn.Module, folder: Path, device: str) -> float:
    """Return the mIoU on a folder of scenes."""
    model.eval()
    scores = Scores()
    x, y = load(folder)
    for images, labels in zip(x.split(16), y.split(16), strict=True):
        scores.update(read_logits(model(images.to(device)), images), labels)
    return scores.score


def write_scores(data: Path, network: Path) -> None:
    """Write the mIoU on clean validation and test scenes to scores.json, beside the scenes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_network(f"hf:{network}", device).model
    miou = {part: score(model, data / part, device) for part in ("val", "test")}
    scenes = {part: len(SceneFolder(data / part).scenes) for part in miou}
    content = {"miou": miou, "scenes": scenes, "origin": origin(torch.device(device))}
    (data / "scores.json").write_text(json.dumps(content, indent=1) + "\n")
    print(content)


def save(net: nn.Module, out: Path) -> None:
    """Write the network in Hugging Face's format, which `hf:FOLDER` reads; the file has half precision."""
    copy.deepcopy(net).half().save_pretrained(out)  # type: ignore[operator]
    config = json.loads((out / "config.json").read_text())
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=1) + "\n")
    processor = {"image_processor_type": "SegformerImageProcessor", "image_mean": MEAN, "image_std": STD}
    (out / "preprocessor_config.json").write_text(json.dumps(processor))


def main() -> None:
    """Unpack, train, or score."""
    parser = argparse.ArgumentParser(
        prog="python -m training.camvid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("unpack", "train", "score"))
    parser.add_argument("source", type=Path, help="unpack: the archive; train and score: the folder of scenes")
    parser.add_argument("out", type=Path, help="unpack: the folder of scenes; train and score: the network's folder")
    parser.add_argument("--epochs", type=int, default=240, help="train: number of epochs (default: 240)")
    parser.add_argument(
        "--every", type=int, default=1, help="unpack: keep every N-th test scene (default: all)", metavar="N"
    )
    arguments = parser.parse_args()
    if arguments.what == "unpack":
        unpack(arguments.source, arguments.out, arguments.every)
    elif arguments.what == "score":
        write_scores(arguments.source, arguments.out)
    else:
        train(arguments.source, arguments.out, epochs=arguments.epochs)


if __name__ == "__main__":
    main()
