"""The judge of an adapter: what a check measures, and which policies that concerns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Generator, Tensor

from ..checks import DivergenceError
from ..core.adapter import Adapter, Statistics
from ..functional import entropy
from ..parts.fisher import Fisher
from ..parts.multiscale import resized
from ..parts.world import Share, World
from .novelty import FEWEST
from .policy import Health, Policy, Signals
from .probe import Probe
from .signals import content, distance, diversity, per_sample, repeated, shuffle_patches
from .trial import Trial

__all__ = ["ENOUGH", "LOOKED", "SMALL", "Judge"]

LOOKED = ("skew", "content", "repeated")
"""Signals that are known before the prediction."""
ENOUGH = 48
"""Samples for a judgement; smaller batches are collected."""
SMALL = 8
"""Batches of fewer images have no statistics worth learning with."""
_REMEMBERED = 16  # checks and alarms that a state has: one camera's state should be small
_LOOK = 16  # images that the source network looks at for their content
_GRIDS = (4, 16)  # how finely they are shuffled


class Judge:
    """Compares predictions of an adapter with those of its source network, and counts how often a policy is concerned.

    It changes nothing: `Guard` acts. Several ranks measure over the batch of all, so that each one finds the same.
    """

    def __init__(self, adapter: Adapter, probe: Probe | None, policies: Sequence[Policy], random: Generator) -> None:
        self.adapter, self.probe, self.random = adapter, probe, random
        self.policies = tuple(policies)
        self.share = Share(0, 0, 0)
        """The part of the current batch that this rank has."""
        self._importance = self._estimate_importance()
        self.begin()

    def _estimate_importance(self) -> Tensor | None:
        own = getattr(self.adapter, "regulariser", None)
        if isinstance(own, Fisher) and own.importance is not None:
            return own.importance
        if self.probe is None or not self.adapter.adapted:
            return None
        return Fisher.estimate(self.adapter, self.probe.images[:256]).importance

    @property
    def world(self) -> World:
        """The ranks that share each batch."""
        return self.adapter.world

    def begin(self) -> None:
        """Forget what was measured."""
        self.health = Health(doing="frozen" if self.adapter.frozen else "learning", probed=self.probe is not None)
        self.window: dict[str, Tensor] = {}
        self.totals = torch.zeros(3, dtype=torch.float64, device=self.adapter.device)  # kept, entropy, drops
        self.samples = self.taught = 0  # of the batches of a check, and how many of them the method could learn from
        self.streaks = [0] * len(self.policies)
        self.trial: Trial | None = None
        """The last one of the current batch."""

    # Policies ---------------------------------------------------------------------------------------------------------

    @property
    def policies(self) -> tuple[Policy, ...]:
        """What to do when. New policies have not been concerned yet."""
        return self._policies

    @policies.setter
    def policies(self, policies: Sequence[Policy]) -> None:
        self._policies, self.streaks = tuple(policies), [0] * len(policies)

    @property
    def early(self) -> list[str]:
        """Signals of the policies that the source network's look decides."""
        return [policy.signal for policy in self.policies if policy.signal in LOOKED and policy.signal != "repeated"]

    @property
    def late(self) -> list[str]:
        """All other signals of the policies."""
        return [policy.signal for policy in self.policies if policy.signal not in LOOKED]

    def rulings(self, signals: Sequence[str]) -> Iterator[tuple[Policy, bool]]:
        """Yield each policy of these signals, and whether it rings."""
        for place, policy in enumerate(self.policies):
            if policy.signal in signals:
                self.streaks[place] = self.streaks[place] + 1 if policy.concerns(self.health.signals) else 0
                yield policy, self.streaks[place] >= policy.times

    def begin_streaks(self) -> None:
        """Forget which policies were concerned."""
        self.streaks = [0] * len(self.policies)

    @property
    def leaves(self) -> bool:
        """Whether a policy leaves the answers to the source network."""
        rulings = zip(self.policies, self.streaks, strict=True)
        return any(policy.action == "leave" and streak >= policy.times for policy, streak in rulings)

    def changed(self) -> None:
        """Forget what was found of an adapter that has been changed."""
        self.begin_streaks()
        if self.probe is not None:
            self.probe.begin()

    def noted(self) -> dict[str, Any]:
        """Return what is known of a batch before the adapter has taken it, for `put_back`."""
        return {"streaks": [*self.streaks], "samples": self.samples, "random": self.random.get_state()}

    def put_back(self, before: dict[str, Any]) -> None:
        """Forget a batch that was refused."""
        self.streaks, self.samples = before["streaks"], before["samples"]
        self.random.set_state(before["random"])

    # Measurements -----------------------------------------------------------------------------------------------------

    def count_dropped(self, dropped: int | Tensor) -> None:
        """Count the dropped steps that the next check reads."""
        self.totals[2].add_(dropped)

    def add(self, logits: Tensor, kept: float | Tensor | None) -> None:
        """Add up what the check of this batch reads. `kept` is None if the method could not learn."""
        n, own = len(logits), torch.zeros_like(self.totals)
        self.samples += self.share.total
        self.taught += 0 if kept is None else self.share.total
        if n:
            means = 0.0 if kept is None else kept, entropy(logits).mean()
            for total, mean in zip(own[:2].unbind(), means, strict=True):
                total.add_(n * mean)  # without a copy from the host
        self.totals += self.world.sum(own)

    def see(self, x: Tensor, *, novelty: bool = False) -> None:
        """Read what the images of a batch show by themselves: whether they are all the same, and if asked, new."""
        found = {}
        if (novelty or self.forgotten) and (new := self.novelty(x, self.share)) is not None:
            found["novelty"] = new
        if self.share.total > 1 and any(policy.signal == "repeated" for policy in self.policies):
            x = self.world.preceded(x)
            found["repeated"] = self.world.mean_of(repeated(x), max(0, len(x) - 1))
        values = (
            [value if isfinite(value) else None for value in torch.stack([*found.values()]).tolist()] if found else []
        )
        self._signal(**{"novelty": None, "repeated": None, **dict(zip(found, values, strict=True))})

    def novelty(self, x: Tensor, share: Share) -> Tensor | None:
        """Return how unlike the held-out images a batch is; None if there are none, or if the batch is small."""
        if self.probe is None or share.total < FEWEST:
            return None
        novelty: Tensor = self.probe.novelty(x, share, self.world)
        return novelty

    @property
    def forgotten(self) -> bool:
        """Whether held-out images are predicted worse than before; novelty is then read with every batch."""
        return self.probe is not None and self.probe.forgotten

    def look(self, x: Tensor) -> tuple[Tensor, bool]:
        """Let the source network look at some images; return entropies, and whether the images were enough to judge."""
        some = self._draw(x)
        views = [some, *(shuffle_patches(some, self.random, grid) for grid in _GRIDS)]
        self.health.passes += len(views) * len(some)
        share = Share.even(len(some), self.world.rank, self.world.size)
        logits = self.adapter.predict_source(torch.cat([share.of(view) for view in views]))
        p, *shuffled = (self._samples(z, share) for z in logits.tensor_split(len(views)))
        if len(some) >= SMALL:
            least = torch.stack([content(p, q) for q in shuffled]).amin()
            seen, lacking = torch.stack([least, 1 - diversity(p)]).tolist()
            self._signal(content=seen, skew=seen * lacking)
        return entropy(p.clamp(min=1e-12).log()), len(some) >= SMALL

    def compare(
        self, x: Tensor, logits: Tensor, statistics: Statistics | None = None, looked: Tensor | None = None
    ) -> bool:
        """Compare a prediction with the source's; return whether there were enough samples to measure the signals."""
        reference = self._reference(x, logits, statistics)
        self._collect(ours=self._samples(logits), source=self._samples(reference))
        if self.probe is not None:
            if looked is None:
                looked = self.world.gather(entropy(reference[: max(0, _LOOK - self.share.offset)]))
            self.probe.gauge.update(looked[:_LOOK], self.random)
        if len(self.window["ours"]) < ENOUGH:
            return False
        self._measure()
        self._try(x)
        self.health.note()
        self.window.clear()
        return True

    @property
    def healthy(self) -> bool:
        """Whether the last check has found neither more forgotten than is tolerated, nor a loss on the stream."""
        share, gain = self.health.signals.probe, self.health.signals.gain
        kept = self.probe is None or (share or 0.0) <= self.probe.test.tolerated
        return kept and (gain is None or gain >= 0)

    def unhealthy(self, x: Tensor, statistics: Statistics | None = None) -> bool:
        """Return whether the adapter as it is now would be damaged or collapsed."""
        if self.probe is not None and self.probe.damaged(self.adapter, self.random):
            return True
        if self.trial is not None:
            before = self.trial.passes
            gain = self.trial.gain()
            self.health.passes += self.trial.passes - before
            return gain < 0
        try:
            ours = self.adapter.predict_only(x, statistics=statistics)
        except DivergenceError:
            return True
        reference = self._reference(x, ours, statistics)
        lost = float(diversity(self._samples(reference)) - diversity(self._samples(ours)))
        return any(p.concerns(Signals(collapse=lost)) for p in self.policies if p.signal == "collapse")

    def _reference(self, x: Tensor, logits: Tensor, statistics: Statistics | None) -> Tensor:
        """Return what the method would predict with the source's parameters, in the resolution of its prediction."""
        self.health.passes += self.share.total
        reference = self.adapter.predict_source(x, statistics=statistics)
        return reference if logits.dim() == 2 else resized(reference, logits)

    def _draw(self, x: Tensor) -> Tensor:
        """Return some images of the batch at random; every rank receives them."""
        drawn = torch.randperm(self.share.total, generator=self.random)[:_LOOK]
        inside = drawn.sort().values - self.share.offset
        mine = inside[(inside >= 0) & (inside < len(x))]
        return self.world.gather(x[mine.to(x.device)])[drawn.argsort().argsort().to(x.device)]

    def _samples(self, logits: Tensor, share: Share | None = None) -> Tensor:
        """Return the probabilities of the samples of all ranks."""
        return self.world.gather(per_sample(logits, share or self.share))

    def _collect(self, **values: Tensor) -> None:
        longer = {n: torch.cat([self.window[n], value]) if n in self.window else value for n, value in values.items()}
        self.window = longer  # at once, so that an interrupt finds both or none

    def _measure(self) -> None:
        """Read all signals at once."""
        ours, source = self.window["ours"], self.window["source"]
        values = torch.stack(
            [
                diversity(ours).double(),
                diversity(source).double(),
                (ours.argmax(1) != source.argmax(1)).double().mean(),
                self._distance().double().to(ours.device),
            ]
        )
        mine, reference, differ, away, kept, entropies, dropped = torch.cat([values, self.totals]).tolist()
        samples, taught = max(self.samples, 1), self.taught
        self.totals.zero_()
        self.samples = self.taught = 0
        self._signal(
            kept=kept / taught if taught else None,
            entropy=entropies / samples,
            diversity=mine,
            collapse=reference - mine,
            disagreement=differ,
            distance=away,
            dropped=dropped,
        )
        if self.probe is not None:
            share, images = self.probe.check(self.adapter, self.random)
            self.health.passes += images
            self._signal(probe=share, evidence=self.probe.test.evidence, shift=self.probe.gauge.log_wealth)

    def _try(self, x: Tensor) -> None:
        """Compare both networks on held-out images in the style of the batch."""
        gain = harm = None
        self.trial = Trial.on(self.probe, self.adapter, x, self.share, self.window["source"], self.random)
        if self.trial is not None:
            gain, harm = self.trial.compare()
            self.health.passes += self.trial.passes
        self._signal(gain=gain, harm=harm)

    def _distance(self) -> Tensor:
        parameters, source = [*self.adapter.state.parameters.values()], self.adapter.state.source_parameters().values()
        if not parameters:
            return torch.zeros(())
        omega = self._importance
        fits = omega is not None and omega.numel() == sum(p.numel() for p in parameters)
        return distance(parameters, [*source], omega.to(parameters[0].device) if omega is not None and fits else None)

    def _signal(self, **values: float | None) -> None:
        self.health.signals = Signals(**{**vars(self.health.signals), "batch": self.health.batches, **values})

    # State ------------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the tensors that change between batches."""
        window = {f"window/{name}": value.clone() for name, value in self.window.items()}
        return {**window, "totals": self.totals.clone(), "generator": self.random.get_state()}

    def state(self) -> dict[str, Any]:
        """Return what else changes, as plain data."""
        return {
            "health": self.health.as_dict(_REMEMBERED),
            "probe": None if self.probe is None else self.probe.state(),
            "samples": [self.samples, self.taught],
            "streaks": [*self.streaks],
        }

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Continue from what `tensors` and `state` have returned."""
        self.health = Health.from_dict(state["health"])
        (self.samples, self.taught), self.streaks = state["samples"], [*state["streaks"]]
        if self.probe is not None:
            self.probe.load(state["probe"])
        device = self.adapter.device
        self.window = {n.removeprefix("window/"): t.to(device) for n, t in tensors.items() if n.startswith("window/")}
        self.totals = tensors["totals"].to(device, copy=True)
        self.random.set_state(tensors["generator"].cpu())
        self.trial = None

    def move(self) -> None:
        """Follow the adapter to another device."""
        self.totals = self.totals.to(self.adapter.device)
        self.window = {name: value.to(self.adapter.device) for name, value in self.window.items()}
        self.trial = None
