"""A pipeline for transformers: classify images, and adapt to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..extras import extra

with extra("transformers"):
    from transformers import ImageClassificationPipeline
    from transformers.modeling_outputs import ImageClassifierOutput

__all__ = ["AdaptiveImageClassification"]


class AdaptiveImageClassification(ImageClassificationPipeline):
    """Classify images as transformers' pipeline does, with a model that learns from them.

    Give it several images per call and a `batch_size`: BatchNorm needs batches, and each batch is one step. The adapter
    is in `adapter`. Its images are what the image processor returns, which MEMO, CoTTA and ROID cannot augment. To load
    a model by name, `transformers.pipeline` takes `pipeline_class=AdaptiveImageClassification` and `method=`.

    >>> import acclimate, PIL.Image
    >>> from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
    >>> small = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
    >>> pipe = AdaptiveImageClassification(
    ...     method=acclimate.Tent,
    ...     model=ViTForImageClassification(small),
    ...     image_processor=ViTImageProcessor(size={"height": 16, "width": 16}),
    ...     device="cpu",
    ... )
    >>> answers = pipe([PIL.Image.new("RGB", (16, 16))] * 4, batch_size=4)
    >>> len(answers), pipe.adapter.last.updated
    (4, True)

    Args:
        method: what makes an adapter from the model, such as `partial(acclimate.EATA, source=clean_batches)`.
        model: a loaded model.
        arguments: what the pipeline takes, such as `image_processor` and `device`.
    """

    def __init__(self, *, method: Callable[[nn.Module], nn.Module], model: Any, **arguments: Any) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model={model!r}: expected a loaded model. To load one by name, use transformers.pipeline("
                '"image-classification", model=NAME, pipeline_class=AdaptiveImageClassification, method=METHOD)'
            )
        super().__init__(model=model, **arguments)  # type: ignore[no-untyped-call]
        self.adapter: Any = method(self.model)

    def _forward(self, model_inputs: Any) -> ImageClassifierOutput:  # type: ignore[override]
        return ImageClassifierOutput(logits=self.adapter(model_inputs["pixel_values"]))
