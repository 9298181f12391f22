"""
Your own network, and its residual branches
===========================================

Any module that returns logits can be wrapped. EATA-C also samples sub-networks: it drops some residual branches, the f
of x + f(x). Those of common networks are known; for your own, name them.
"""

# %%
# A residual network that no library knows, trained on digits for a moment:
import matplotlib.pyplot as plt
import torch
from torch import nn

import acclimate
from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.mix = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 1))

    def forward(self, x):
        return x + self.mix(self.norm(x))


class MyNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 4, stride=4)
        self.layers = nn.Sequential(*(Block(width) for _ in range(4)))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).amax((2, 3)))


torch.manual_seed(0)
train, test = load_digits()
net = MyNet()
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
for _ in range(2):
    for index in torch.randperm(len(train.x)).split(100):
        loss = nn.functional.cross_entropy(net(train.x[index]), train.y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
net.eval()

# %%
# Without names, EATA-C says what it needs:
try:
    acclimate.ETAC(net)
except ValueError as error:
    print(error)

# %%
# ``branches`` are the modules whose output f(x) is added to x; where f is several modules in a row, name the last one.
# ``blocks`` would be the modules that return x + f(x).
branches = "layers.*.mix"
with torch.no_grad(), acclimate.subnetwork(net, drop=0.2, branches=branches, generator=torch.Generator()):
    some_branches = net(test.x[:64]).argmax(1)
with torch.no_grad():
    all_branches = net(test.x[:64]).argmax(1)
print(f"sub-networks agree with the network on {int((some_branches == all_branches).sum())} of 64 digits")

# %%
# What adapts are the norm layers, ``parameters="norm"``. You can choose others by name or by a test:
model = acclimate.EATAC(net, source=train.x[:256], branches=branches, lr=0.02)
print(f"{len(model.names)} tensors adapt, such as {model.names[0]}")

# %%
# Uncertainty from sub-networks: on noisy digits, wrong answers are the uncertain ones.
noisy = corrupt(test.x[:512], "speckle_noise", 5, torch.Generator().manual_seed(0))
logits = torch.cat([model(x) for x in noisy.split(64)])
uncertainty = torch.cat([model.uncertainty(x).model for x in noisy.split(64)])
right = logits.argmax(1) == test.y[:512]
print(f"{100 * right.float().mean():.1f} % right")

plt.figure(figsize=(7, 3))
ranges = torch.linspace(0, float(uncertainty.quantile(0.95)), 25).numpy()
for name, which in (("right", right), ("wrong", ~right)):
    plt.hist(uncertainty[which].numpy(), bins=ranges, alpha=0.6, density=True, label=name)
plt.xlabel("model uncertainty")
plt.yscale("log")
plt.ylabel("density")
plt.legend()
plt.tight_layout()
