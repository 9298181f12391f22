"""
The service and a client
========================

A server in a process of its own adapts to the foggy digits that a client sends, and shows what it does at ``/``.
"""

# %%
# The digits in fog:
import json
import re
import subprocess
import sys
from io import BytesIO
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

import matplotlib.pyplot as plt
import torch
from PIL import Image

from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt

test = load_digits()[1]
foggy = corrupt(test.x[:256], "fog", 4, torch.Generator().manual_seed(0))


# %%
# A client sends pictures. curl would do, too: ``curl -F file=@digit.png http://127.0.0.1:8000/predict``
def classify(address: str, image: torch.Tensor) -> dict:
    picture = BytesIO()
    Image.fromarray((255 * image[0]).byte().numpy()).save(picture, "PNG")
    request = Request(f"{address}/predict", picture.getvalue(), {"Content-Type": "image/png"})
    with urlopen(request) as response:
        return json.load(response)["predictions"][0]


# %%
# ``acclimate serve`` with no options serves the embedded network. Here it takes a free port, and a folder that is
# removed at the end. Ctrl-C or a signal ends the server, which writes its state first:
with TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "acclimate", "serve", "--port", "0", "--state", folder, "--batch-size", "32"]
    server = subprocess.Popen([*command, "--log", "text"], stderr=subprocess.PIPE, text=True)
    try:
        address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.]+:\d+", line)))
        answers = [classify(address, image) for image in foggy]
    finally:
        server.terminate()
        server.communicate()

# %%
# Each answer has a label, a confidence, the entropy, how far the prediction is from that of the source
# network, and whether the image was learned from. The server learns from 32 images at a time:
print(answers[-1])
right = torch.tensor([answer["class"] for answer in answers]) == test.y[:256]
apart = torch.tensor([answer["disagreement"] for answer in answers])
for start in range(0, 256, 64):
    part = slice(start, start + 64)
    print(f"from image {start}: {right[part].float().mean():.0%} right, {apart[part].mean():.2f} from the source")

# %%
# The answers to single images, one after another:
figure, axis = plt.subplots(figsize=(7, 2.5))
axis.plot(right.float().unfold(0, 32, 1).mean(1), label="right, the last 32")
axis.plot(apart, ".", markersize=3, label="distance from the source's prediction")
axis.set(xlabel="image", ylim=(0, 1))
axis.legend(loc="lower right")
figure.tight_layout()
