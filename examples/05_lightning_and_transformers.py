"""
A Lightning module and a Hugging Face pipeline
==============================================

Both keep their own loop; the network inside learns from what it predicts.
"""

# %%
# **Lightning.** A callback puts the adapter in the network's place while ``trainer.test`` or ``trainer.predict`` runs.
import logging
import warnings
from functools import partial

import lightning
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import acclimate
from acclimate.bench.networks import load_network
from acclimate.data import load_digits
from acclimate.data.corruptions import corrupt
from acclimate.integrations.lightning import Adapt
from acclimate.integrations.transformers import AdaptiveImageClassification

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = load_network("digits-resnet").model

    def test_step(self, batch):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())


train, test = load_digits()
foggy = corrupt(test.x[:1024], "fog", 4, torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(foggy, test.y[:1024]), batch_size=64)


def tested(*callbacks: Adapt) -> float:
    trainer = lightning.Trainer(
        callbacks=[*callbacks],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return 100 * trainer.test(Digits(), loader, verbose=False)[0]["accuracy"]


adapt = Adapt("net", partial(acclimate.EATA, source=train.x[:256], lr=5e-3))
print(f"without the callback {tested():.1f} % right, with it {tested(adapt):.1f} %")
print(adapt.adapter.passes.state_dict())

# %%
# **transformers.** A pipeline of the same name and behaviour, with a method. The model is random here; with
# ``from_pretrained`` it is yours.
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor  # noqa: E402

torch.manual_seed(0)
config = ViTConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=32, patch_size=8
)
pipe = AdaptiveImageClassification(
    method=partial(acclimate.ETAC.preset, "vit-base", margin=None),
    model=ViTForImageClassification(config),
    image_processor=ViTImageProcessor(size={"height": 32, "width": 32}),
    device="cpu",
)
pictures = [Image.fromarray((255 * image[0]).byte().numpy()).convert("RGB") for image in test.x[:32]]
answers = pipe(pictures, batch_size=16)
print(len(answers), "answers such as", answers[0][0])
print("learned from", int(pipe.adapter.passes.backwards), "images")
