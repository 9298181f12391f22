"""acclimate inside other libraries: the network learns there, and is itself again afterwards."""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

import acclimate
from acclimate.contract.networks import stream, tiny_network
from acclimate.integrations.lightning import Adapt
from acclimate.integrations.transformers import AdaptiveImageClassification

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning", "ignore:.*many workers")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict({"net": tiny_network("bn")})

    def predict_step(self, batch: Tensor) -> Tensor:
        return self.inner["net"](batch)

    def test_step(self, batch: Tensor) -> None:
        self.inner["net"](batch)


def trainer_with(*callbacks: Adapt) -> lightning.Trainer:
    return lightning.Trainer(
        callbacks=[*callbacks],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def predict(module: Classifier, callback: Adapt, images: Tensor) -> Tensor:
    return torch.cat(trainer_with(callback).predict(module, DataLoader(images, batch_size=8)))


def test_a_lightning_module_adapts_as_the_network_alone_does() -> None:
    images = torch.cat(stream())
    method = partial(acclimate.EATA, source=stream(3, seed=500), lr=1e-2)
    module, adapt = Classifier(), Adapt("inner.net", method)
    net, names = module.inner["net"].train(), [*module.state_dict()]
    alone = method(tiny_network("bn"))
    expected = torch.cat([alone(x) for x in images.split(8)])
    assert torch.equal(predict(module, adapt, images), expected)
    assert module.inner["net"] is net
    assert all(each.training for each in net.modules())
    assert [*module.state_dict()] == names
    again = torch.cat([alone(x) for x in images.split(8)])
    assert torch.equal(predict(module, adapt, images), again), "a second call continues"
    adapt.adapter.reset()
    source = tiny_network("bn").state_dict()
    assert all(torch.equal(source[name], value) for name, value in net.state_dict().items())


def test_another_module_is_predicted_by_its_own_network() -> None:
    images, adapt = torch.cat(stream()), Adapt("inner.net", acclimate.Tent)
    first, second = Classifier(), Classifier()
    with torch.no_grad():
        for p in second.parameters():
            p.mul_(1.5)
    alone = acclimate.Tent(deepcopy(second.inner["net"]))
    predict(first, adapt, images)
    expected = torch.cat([alone(x) for x in images.split(8)])
    assert torch.equal(predict(second, adapt, images), expected)


@pytest.mark.parametrize("stage", ["predict", "test"])
@pytest.mark.parametrize("method", [acclimate.ETA, partial(acclimate.EATA, source=stream(3, seed=500))])
def test_a_checkpoint_is_loaded_before_the_network_adapts(stage: str, method: Any, tmp_path: Path) -> None:
    trained = Classifier()
    with torch.no_grad():
        for p in trained.parameters():
            p.mul_(1.5)
    saving = trainer_with()
    saving.strategy.connect(trained)
    saving.save_checkpoint(tmp_path / "a.ckpt")
    module, adapt, batches = Classifier(), Adapt("inner.net", partial(method, lr=1e-2)), torch.stack(stream())
    alone = method(deepcopy(trained.inner["net"]), lr=1e-2)
    for x in batches:
        alone(x)
    for _ in range(2):  # the second call starts from the checkpoint again
        run = getattr(trainer_with(adapt), stage)
        run(module, batches, ckpt_path=tmp_path / "a.ckpt")
        assert all(map(torch.equal, module.parameters(), alone.model.parameters()))
    adapt.adapter.reset()
    assert all(map(torch.equal, module.parameters(), trained.parameters()))


def test_a_network_that_was_replaced_since_stays() -> None:
    module, adapt = Classifier(), Adapt("inner.net", acclimate.Tent)
    predict(module, adapt, torch.cat(stream()))
    module.inner["net"] = newer = tiny_network("bn")
    adapt.on_exception(trainer_with(), module, KeyboardInterrupt())
    assert module.inner["net"] is newer


def test_after_an_error_a_lightning_module_has_its_network_again() -> None:
    module, adapt = Classifier(), Adapt("inner.net", acclimate.Tent)
    net = module.inner["net"]
    with pytest.raises(ValueError, match="NaN"):
        predict(module, adapt, torch.full((8, 3, 16, 16), torch.nan))
    assert module.inner["net"] is net


def test_a_pipeline_adapts_and_answers_as_transformers_does() -> None:
    torch.manual_seed(0)
    small = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    model = ViTForImageClassification(small).eval()
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    pictures = [Image.new("RGB", (20, 20), (number, 90, 200 - number)) for number in range(0, 200, 25)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(**processor(pictures, return_tensors="pt")).logits.softmax(1)
    pipe = AdaptiveImageClassification(method=acclimate.Tent, model=model, image_processor=processor, device="cpu")
    answers = pipe(pictures, batch_size=4, top_k=1)
    assert [each[0]["score"] for each in answers[:4]] == pytest.approx(expected[:4].amax(1).tolist(), abs=1e-5)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert all("layernorm" in name.lower() for name in moved)
    assert int(pipe.adapter.passes.forwards) == len(pictures)


def test_a_pipeline_takes_a_name_through_transformers_alone(tmp_path: Path) -> None:
    small = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    ViTForImageClassification(small).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="pipeline_class"):
        AdaptiveImageClassification(method=acclimate.Tent, model=str(tmp_path))
    options = {"pipeline_class": AdaptiveImageClassification, "method": acclimate.Tent, "device": "cpu"}
    pipe = pipeline("image-classification", model=str(tmp_path), **options)
    pipe([Image.new("RGB", (16, 16))] * 4, batch_size=4)
    assert pipe.adapter.last.updated
