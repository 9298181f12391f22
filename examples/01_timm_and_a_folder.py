"""
A timm network on a folder of images
====================================

A camera writes images into a folder. A network of timm classifies them and adapts to them, batch by batch. Nothing but
the loop that you have already.
"""

# %%
# A folder of images, here digits under noise. Yours has files of its own.
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
from PIL import Image

import acclimate
from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt

torch.manual_seed(0)
train, test = load_digits()
noisy = corrupt(test.x[:640], "gaussian_noise", 5, torch.Generator().manual_seed(0))
folder = Path(tempfile.mkdtemp())
for number, image in enumerate(noisy):
    Image.fromarray((255 * image[0]).byte().numpy()).save(folder / f"{number:04}.png")

# %%
# A network of timm. With ``pretrained=True`` it would be downloaded; this one is trained on clean digits for a moment.
net = timm.create_model("resnet10t", in_chans=1, num_classes=10)
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for index in torch.randperm(len(train.x))[:2048].split(64):
    loss = torch.nn.functional.cross_entropy(net(train.x[index]), train.y[index])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
net.eval()


# %%
# Read the folder in batches, and adapt. ``source`` has clean images, for the regulariser that limits forgetting.
def batches(size: int = 64):
    files = sorted(folder.glob("*.png"))
    for start in range(0, len(files), size):
        pixels = np.stack([np.array(Image.open(file)) for file in files[start : start + size]])
        yield torch.from_numpy(pixels)[:, None].float() / 255


source = torch.cat([net(x).detach().argmax(1) for x in batches()])
model = acclimate.EATA(net, source=train.x[:256], lr=5e-3, beta=100.0)
adapted = torch.cat([model(x).argmax(1) for x in batches()])

right = {"source": source == test.y[:640], "EATA": adapted == test.y[:640]}
for name, hits in right.items():
    print(f"{name:6} {100 * hits.float().mean():.1f} % right")

# %%
# Accuracy along the folder:
plt.figure(figsize=(7, 3))
for name, hits in right.items():
    plt.plot([100 * float(some.float().mean()) for some in hits.split(64)], "o-", label=name)
plt.xlabel("batch of 64 images")
plt.ylabel("accuracy (%)")
plt.legend()
plt.tight_layout()
