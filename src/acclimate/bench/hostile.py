"""Streams that break methods: a stuck camera, noise, sorted labels, missing pixels, crafted images.

scenario = bursts(suite, severity=3)
scenario = poisoned(suite, network=net)

The options are those of `lifelong`. All are tolerant: methods without a guard may diverge or reject a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..checks import read_logits
from ..data.types import Change, Part, Suite
from ..parts.batchnorm import Normalisation
from .stream import SampledDomain, Scenario, label_of, sample_domain, sample_shifts

__all__ = [
    "HOSTILE",
    "bursts",
    "mixing",
    "noise",
    "one_by_one",
    "one_class",
    "poisoned",
    "recurring",
    "sorted_labels",
    "stuck",
]

VISITS = 20
"""Visits of the scenario recurring."""
STEPS, STEP = 10, 0.2
"""Steps that craft an image, and how far each moves a pixel."""


def sorted_labels(suite: Suite, **options: Any) -> Scenario:
    """Class after class, on clean images first: the statistics of a batch are those of one class."""
    return _scenario("sorted", [_by_label(domain) for domain in _clean_first(suite, **options)])


def one_class(suite: Suite, *, images: int | None = None, **options: Any) -> Scenario:
    """Images of the most frequent class alone, clean ones first: a network may forget all others."""
    return _scenario("one-class", [_only_one_class(domain, images) for domain in _clean_first(suite, **options)])


def stuck(suite: Suite, **options: Any) -> Scenario:
    """In the middle half of each shift one image comes again and again: a network may learn it by heart."""
    return _scenario("stuck", [_stuck(domain) for domain in sample_shifts(suite, **options)])


def noise(suite: Suite, **options: Any) -> Scenario:
    """In the middle half of each shift all images are uniform noise: there is nothing to learn from them."""
    return _scenario("noise", [_in_the_middle(domain, _noise) for domain in sample_shifts(suite, **options)])


def bursts(suite: Suite, **options: Any) -> Scenario:
    """In the middle half of each shift, batches with black and NaN images: one NaN can spoil all weights."""
    domains = sample_shifts(suite, **options)
    return _scenario("bursts", [_in_the_middle(domain, _spoil, lambda number: number % 3 < 2) for domain in domains])


def recurring(suite: Suite, **options: Any) -> Scenario:
    """Twenty short visits to the shifts in turn, as long as lifelong in all: small harms add up."""
    domains = sample_shifts(suite, **options)
    size = max(sum(len(domain.picks) for domain in domains) // VISITS, domains[0].batch_size)
    visits = [_visit(domains[number % len(domains)], number // len(domains), size) for number in range(VISITS)]
    return _scenario("recurring", visits)


def mixing(suite: Suite, **options: Any) -> Scenario:
    """Each shift turns into the next one image by image: no batch has one shift, and no change is seen."""
    domains = sample_shifts(suite, **options)
    mixed = [_mixed(domain, following) for domain, following in pairwise(domains)]
    return _scenario("mixing", [*mixed, domains[-1]])


def one_by_one(suite: Suite, **options: Any) -> Scenario:
    """Lifelong in batches of one image: statistics and gradients of one image are poor."""
    return _scenario("one-by-one", sample_shifts(suite, **{**options, "batch_size": 1}))


def poisoned(suite: Suite, *, network: nn.Module, share: float = 0.1, **options: Any) -> Scenario:
    """Clean first, with a tenth of each batch crafted to flip the predictions of the others.

    An attacker who knows the source network crafts them. With BatchNorm they act through the batch's statistics.
    Without it, they are confident predictions of class 0, which a method that minimises entropy learns from.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share}: expected a share of the images, between 0 and 1")
    with torch.inference_mode(False):
        attacked = deepcopy(network).requires_grad_(False)  # adapters change the network itself
    domains = [
        replace(domain, parts=[_changed(domain.parts[0], partial(_poison, attacked, share))])
        for domain in _clean_first(suite, **options)
    ]
    return _scenario("poisoned", domains)


HOSTILE: dict[str, Callable[..., Scenario]] = {
    "sorted": sorted_labels,
    "one-class": one_class,
    "stuck": stuck,
    "noise": noise,
    "bursts": bursts,
    "recurring": recurring,
    "mixing": mixing,
    "one-by-one": one_by_one,
    "poisoned": poisoned,
}
"""Hostile scenarios by their name on the command line."""


# Domains --------------------------------------------------------------------------------------------------------------


def _scenario(name: str, domains: list[SampledDomain]) -> Scenario:
    return Scenario(name, domains, tolerant=True)


def _clean_first(suite: Suite, **options: Any) -> list[SampledDomain]:
    loading = {name: value for name, value in options.items() if name not in ("severity", "shifts")}
    return [sample_domain("clean", suite.clean(), **loading), *sample_shifts(suite, **options)]


def _seed(domain: SampledDomain) -> int:
    return zlib.crc32(f"{domain.seed} {domain.name}".encode())


def _by_label(domain: SampledDomain) -> SampledDomain:
    return replace(domain, picks=sorted(domain.picks, key=lambda pick: label_of(domain.parts[0], pick[1])))


def _only_one_class(domain: SampledDomain, images: int | None) -> SampledDomain:
    labels = torch.tensor([label_of(domain.parts[0], index) for _, index in domain.picks])
    label = int(labels.bincount().argmax())
    own = [pick for pick, other in zip(domain.picks, labels.tolist(), strict=True) if other == label]
    return replace(domain, picks=own[:images])


def _middle(domain: SampledDomain) -> range:
    """Return the batches of the middle half. The first batch is never one of them."""
    start = -(-len(domain) // 4)
    return range(start, start + len(domain) // 2)


def _in_the_middle(
    domain: SampledDomain, change: Change, chosen: Callable[[int], bool] = lambda _: True
) -> SampledDomain:
    """Return the domain with a further change of the `chosen` batches of its middle half, counted from 0."""
    middle = _middle(domain)
    hit = {batch for number, batch in enumerate(middle) if chosen(number)}
    picks = [(int(place // domain.batch_size in hit), index) for place, (_, index) in enumerate(domain.picks)]
    (part,) = domain.parts
    return replace(domain, parts=[part, _changed(part, change)], picks=picks)


def _stuck(domain: SampledDomain) -> SampledDomain:
    (part,) = domain.parts
    frozen = replace(part, change=partial(_freeze, part.change, _seed(domain)))
    middle, picks = _middle(domain), [*domain.picks]
    places = range(len(picks))[middle.start * domain.batch_size : middle.stop * domain.batch_size]
    for place in places:
        picks[place] = (1, picks[places[0]][1])
    return replace(domain, parts=[part, frozen], picks=picks)


def _visit(domain: SampledDomain, number: int, size: int) -> SampledDomain:
    """Return the images that follow those of the visits before, from the start again after the last."""
    picks = [domain.picks[place % len(domain.picks)] for place in range(number * size, (number + 1) * size)]
    return replace(domain, name=f"{domain.name}, visit {number + 1}", picks=picks, round=number + 1)


def _mixed(domain: SampledDomain, following: SampledDomain) -> SampledDomain:
    """Return the domain with a share of the next one that grows from 0 in the first batch to 1 in the last."""
    generator = Generator().manual_seed(_seed(domain))
    picks = [*domain.picks]
    for batch in range(len(domain)):
        places = range(len(picks))[batch * domain.batch_size : (batch + 1) * domain.batch_size]
        count = round(len(places) * batch / max(len(domain) - 1, 1))
        for row in torch.randperm(len(places), generator=generator)[:count].tolist():
            picks[places[row]] = (1, following.picks[places[row] % len(following.picks)][1])
    return replace(domain, parts=[*domain.parts, *following.parts], picks=picks)


# Changes of images ----------------------------------------------------------------------------------------------------


def _changed(part: Part, change: Change) -> Part:
    """Return the part with a further change, after its own."""
    return replace(part, change=change if part.change is None else partial(_in_turn, part.change, change))


def _in_turn(first: Change, second: Change, x: Tensor, generator: Generator) -> Tensor:
    return second(first(x, generator), generator)


def _noise(x: Tensor, generator: Generator) -> Tensor:
    return torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def _spoil(x: Tensor, generator: Generator) -> Tensor:
    """Return the batch with a third of the images black and another third NaN."""
    third = max(len(x) // 3, 1)
    rows = torch.randperm(len(x), generator=generator, device=x.device)
    return x.index_fill(0, rows[:third], 0.0).index_fill(0, rows[third : 2 * third], torch.nan)


def _freeze(change: Change | None, seed: int, x: Tensor, generator: Generator) -> Tensor:
    """Return the first image in all rows, with the same noise in every batch."""
    one = x[:1] if change is None else change(x[:1], Generator(generator.device).manual_seed(seed))
    return one.expand_as(x).clone()


def _poison(network: nn.Module, share: float, x: Tensor, generator: Generator) -> Tensor:
    """Return the batch with a share of crafted images, at least one; a batch of one image stays as it is."""
    count = min(max(round(share * len(x)), 1), len(x) - 1)
    rows = torch.randperm(len(x), generator=generator, device=x.device)
    crafted, others = rows[:count], rows[count:]
    norm = Normalisation(network)
    with torch.inference_mode(False), torch.enable_grad(), _deterministic():
        x = x.clone()
        with norm.batch(len(x)):  # predictions with source statistics are wrong on shifted images: flips would help
            predicted = read_logits(network(x), x).argmax(1)
        for _ in range(STEPS if count else 0):
            pixels = x[crafted].requires_grad_()
            if norm.layers:
                mixed = x.index_copy(0, crafted, pixels)
                with norm.batch(len(x)):
                    loss = F.cross_entropy(read_logits(network(mixed), mixed)[others], predicted[others])
            else:
                with norm.source():
                    logits = read_logits(network(pixels), pixels)
                loss = -F.cross_entropy(logits, torch.zeros_like(predicted[crafted]))
            (gradient,) = torch.autograd.grad(loss, pixels)
            x[crafted] = (pixels.detach() + STEP * gradient.sign()).clamp(0, 1)
    return x


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make convolutions on a GPU repeat their result: signs of small gradients would differ otherwise."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
