"""Guard: an adapter that is watched, so that it cannot run away.

    model = acclimate.Guard(acclimate.EATAC(net, source=clean), probe=held_out)
    logits = model(x)          # predicts; learns if that is safe
    print(model.health)        # signals, alarms, what was done about them, since when

Now and then a batch is checked: it is also predicted by the source network, and the two predictions are compared
(`signals`). Policies say what follows from that (`policy`). Checks come every few batches at first and after an alarm,
and then less and less often, up to one in `every`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..checks import DivergenceError, warn
from ..core.adapter import Adapter, Statistics
from ..core.snapshot import Snapshot, StateError
from ..core.step import Step
from ..functional import entropy
from ..parts.fisher import Fisher, Images
from ..parts.multiscale import resized
from ..parts.sharing import exclusive
from .policy import LASTING, POLICIES, Alarm, Health, Policy, Signals
from .probe import Probe
from .ring import Ring
from .signals import content, distance, diversity, per_sample, shuffle_patches

__all__ = ["Guard"]

_FIRST = 2  # batches between checks at first, and after an alarm
_LOOK = 16  # images that the source network looks at for their content
_GRIDS = (4, 16)  # how finely they are shuffled
_LOOKED = ("skew", "content")  # signals that are known before the prediction
_ENOUGH = 48  # samples for a judgement; smaller batches are collected
_SMALL = 8  # batches of fewer images have no statistics worth learning with
_PRIOR = 16  # images that the source's statistics count for in such a batch
_LONGEST = 4096  # batches of a pause


class Guard(nn.Module):
    """Watch an adapter. It is called as the adapter is, and has the adapter's attributes and methods.

    >>> import acclimate
    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    >>> model = acclimate.Guard(acclimate.Tent(net), probe=torch.rand(64, 4))
    >>> model(torch.rand(8, 4)).shape
    torch.Size([8, 3])
    >>> model.health.doing
    'learning'

    Args:
        adapter: any adapter.
        probe: held-out images like the training images, a few hundred, without labels. They show damage to what the
            network knew, with a guarantee (`ProbeTest`). Without them there is less protection.
        policies: what to do when. `POLICIES` needs no tuning.
        every: the number of batches between checks, at most.
        tolerated: the share of held-out images on which adapted and source network may disagree, in addition to those
            on which they do before anything is learned.
        risk: the probability of a false alarm of the probe test, until the first alarm.
        ring: how many healthy snapshots are kept.
        pause: for how many batches learning pauses after the first rollback.
        seed: the seed of what the guard draws at random.
    """

    adapter: Adapter
    probe: Probe | None

    def __init__(
        self,
        adapter: Adapter,
        *,
        probe: Images | None = None,
        policies: Sequence[Policy] = POLICIES,
        every: int = 64,
        tolerated: float = 0.1,
        risk: float = 0.01,
        ring: int = 4,
        pause: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(adapter, Adapter):
            raise TypeError(f"a Guard watches an adapter, such as EATA(net), not a {type(adapter).__name__}")
        if every < 1 or ring < 1 or pause < 1:
            raise ValueError(f"Guard: every={every}, ring={ring} and pause={pause} must be at least 1")
        self.policies, self.every, self.pause, self.probe = tuple(policies), every, pause, None
        self.adapter = adapter  # after what has the same name in some adapters, which is the guard's then
        self._most, self._seed = ring, seed
        self._random = Generator().manual_seed(seed)  # its own, so that the adapter's is as without a guard
        self.probe = None if probe is None else Probe(adapter, probe, tolerated, risk, self._random)
        self._importance = self._estimate_importance()
        self._dense = False  # whether the network is a segmenter
        self._begin()

    def _estimate_importance(self) -> Tensor | None:
        own = getattr(self.adapter, "regulariser", None)
        if isinstance(own, Fisher) and own.importance is not None:
            return own.importance
        if self.probe is None or not self.adapter.adapted:
            return None
        return Fisher.estimate(self.adapter, self.probe.images[:256]).importance

    def _begin(self) -> None:
        """Start to watch, from the adapter as it is."""
        self._random.manual_seed(self._seed)
        self._health = Health(doing="frozen" if self.adapter.frozen else "learning")
        self._interval, self._next, self._pause = self._first_interval, 0, self.pause
        self._quiet = 0  # checks without the signal of a lasting action
        self._streaks = [0] * len(self.policies)
        self._window: dict[str, Tensor] = {}
        self._totals = torch.zeros(3, dtype=torch.float64, device=self.adapter.device)  # kept, entropy, drops
        self._samples = 0
        self._ring = Ring(self.adapter, self._most)
        self._last: Step | None = None

    @property
    def _first_interval(self) -> int:
        return min(_FIRST, self.every)

    # For users --------------------------------------------------------------------------------------------------------

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch, and learn from it if that is safe; return logits without a graph.

        Images with NaN or infinity are not shown to the network; their logits are zero.
        """
        try:
            return self._answer(x)
        except ValueError:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2 or not len(x):
                raise
            fine = x.isfinite().flatten(1).all(1)
            if bool(fine.all()):
                return self._answer(x)  # the error was that of an earlier batch, or it is raised again
            return self._answer_some(x, fine)

    def predict_only(self, x: Tensor, *, statistics: Statistics | None = None) -> Tensor:
        """Return the logits of x as they would be predicted now. Nothing is learned, counted or changed.

        While the source network answers, it does so whatever `statistics` say.
        """
        if self._health.doing == "source":
            return self.adapter.predict_source(x)
        return self.adapter.predict_only(x, statistics=self._statistics(len(x)) if statistics is None else statistics)

    @property
    def health(self) -> Health:
        """The last signals, all alarms, what is done about them, and since when."""
        return replace(self._health, alarms=[*self._health.alarms], history=[*self._health.history])

    @property
    def last(self) -> Step:
        """The record of the last batch."""
        return self.adapter.last if self._last is None else self._last

    @property
    def frozen(self) -> bool:
        """Set this to True to predict without learning, until it is False again."""
        return self.adapter.frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self.adapter.frozen = frozen
        self._resume()

    @exclusive
    @torch.inference_mode(False)
    def rollback(self) -> None:
        """Restore the last healthy snapshot, and pause learning."""
        self._back()
        self._start_pause()

    @exclusive
    @torch.inference_mode(False)
    def reset(self) -> None:
        """Restore the source, and forget what was watched."""
        self.adapter.reset()
        if self.probe is not None:
            self.probe.restart()
        self._begin()

    @exclusive
    @torch.inference_mode(False)
    def snapshot(self) -> Snapshot:
        """Return a copy of everything that changes between batches, of the adapter and of the guard."""
        own = self.adapter.snapshot()
        tensors = {
            **own.tensors,
            **{f"guard/window/{name}": value.clone() for name, value in self._window.items()},
            **{f"guard/ring/{name}": tensor for name, tensor in self._ring.tensors().items()},
            "guard/totals": self._totals.clone(),
            "guard/generator": self._random.get_state(),
        }
        memory = {
            "health": self._health.as_dict(),
            "ring": self._ring.settings(),
            "probe": None if self.probe is None else self.probe.state(),
            "counts": [self._interval, self._next, self._pause, self._quiet, self._samples, self._dense],
            "streaks": [*self._streaks],
            "frozen": self.adapter.frozen,
        }
        return Snapshot(tensors, {**own.settings, "guard": memory})

    @exclusive
    @torch.inference_mode(False)
    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot. The same batches then give the same results as before, bit for bit."""
        memory = snapshot.settings.get("guard")
        alike = memory is not None and len(memory["streaks"]) == len(self.policies)
        if memory is None or not alike or (memory["probe"] is None) != (self.probe is None):
            raise StateError("the state was not saved by a Guard with the same policies, and with a probe as this one")
        mine = {name.removeprefix("guard/"): t for name, t in snapshot.tensors.items() if name.startswith("guard/")}
        theirs = {name: t for name, t in snapshot.tensors.items() if not name.startswith("guard/")}
        self.adapter.restore(Snapshot(theirs, {n: v for n, v in snapshot.settings.items() if n != "guard"}))
        self.adapter.frozen = memory["frozen"]
        self._health = Health.from_dict(memory["health"])
        self._interval, self._next, self._pause, self._quiet, self._samples, self._dense = memory["counts"]
        self._streaks = [*memory["streaks"]]
        if self.probe is not None:
            self.probe.load(memory["probe"])
        self._ring.load(_within("ring", mine), memory["ring"])
        self._window = {name: t.to(self.adapter.device) for name, t in _within("window", mine).items()}
        self._totals = mine["totals"].to(self.adapter.device, copy=True)
        self._random.set_state(mine["generator"].cpu())
        self._last = None

    def save(self, path: str | Path, snapshot: Snapshot | None = None) -> None:
        """Write adapter and guard to one safetensors file, completely or not at all."""
        self.adapter.save(path, snapshot or self.snapshot())

    def load(self, path: str | Path) -> None:
        """Continue from a saved state. A file of another model, method or version, or a damaged one, raises."""
        self.restore(self.adapter.read(path))

    # One batch --------------------------------------------------------------------------------------------------------

    def _answer(self, x: Tensor) -> Tensor:
        try:
            return self._serve(x)
        except DivergenceError:
            self._alarm(Alarm(self._health.batches, "collapse", 1.0, "roll back"), x)
            return self._serve(x)

    def _answer_some(self, x: Tensor, fine: Tensor) -> Tensor:
        """Answer images that are not finite with a uniform prediction."""
        some = self._answer(x[fine]) if bool(fine.any()) else self.adapter.predict_source(torch.zeros_like(x[:1]))[:0]
        logits = some.new_zeros(len(x), *some.shape[1:])
        logits[fine] = some
        self._health.rejected += int((~fine).sum())
        if not bool(fine.any()):
            self._last = Step(len(x), logits=logits)
        return logits

    def _serve(self, x: Tensor) -> Tensor:
        health = self._health
        if health.doing == "paused" and health.batches >= (health.until or 0):
            self._resume()
        due = health.batches >= self._next and not self.frozen
        looked = self._look(x) if due and self.adapter.coupled else None
        learn = health.doing == "learning" and self._statistics(len(x)) is None
        before = self.adapter.state.copy(light=True) if due and learn else None
        logits = self._learn(x) if learn else self._hold(x)
        if due and (checked := self._to_check(x, logits)) is not None and self._compare(x, checked, looked, before):
            logits = self._hold(x)
        health.batches += 1
        if due and not self._window:  # otherwise small batches are still being collected
            self._next = (
                health.batches + (self._interval - self._first_interval) * _stretch(x) + self._first_interval - 1
            )
        return logits

    def _learn(self, x: Tensor) -> Tensor:
        logits: Tensor = self.adapter(x)
        step, self._last = self.adapter.last, None
        self._add(logits, step.kept.float().mean() if step.kept is not None else 1.0 * step.taken, step.dropped)
        return logits

    def _hold(self, x: Tensor) -> Tensor:
        """Predict without learning."""
        logits = self.predict_only(x)
        self._last = Step(len(x), logits=logits, forwards=len(x))
        self.adapter.passes.add(self._last)
        self._add(logits, 0.0, 0)
        return logits

    def _add(self, logits: Tensor, kept: float | Tensor, dropped: int | Tensor) -> None:
        """Add up what the next check reads."""
        n, self._dense = len(logits), logits.dim() > 2
        self._samples += n
        for total, value in zip(self._totals.unbind(), (n * kept, n * entropy(logits).mean(), dropped), strict=True):
            total.add_(value)  # without a copy from the host

    def _statistics(self, size: int) -> Statistics | None:
        """Return other statistics than the method's, where those of the batch cannot be trusted."""
        if self._health.doing == "blend":
            return 0.5
        if self.adapter.coupled and size < _SMALL and not self._dense:
            return size / (size + _PRIOR)
        return None

    # Checks -----------------------------------------------------------------------------------------------------------

    def _look(self, x: Tensor) -> Tensor:
        """Let the source network look at some images, and judge whether their labels are alike; return entropies."""
        some = x[torch.randperm(len(x), generator=self._random)[:_LOOK].to(x.device)]
        views = torch.cat([some, *(shuffle_patches(some, self._random, grid) for grid in _GRIDS)])
        p, *shuffled = (per_sample(z) for z in self.adapter.predict_source(views).chunk(1 + len(_GRIDS)))
        if len(some) >= _SMALL:
            least = torch.stack([content(p, q) for q in shuffled]).amin()
            seen, lacking = torch.stack([least, 1 - diversity(p)]).tolist()
            self._signal(content=seen, skew=seen * lacking)
            self._judge(x, [name for name in self._signals() if name in _LOOKED])
        return entropy(p.clamp(min=1e-12).log())

    def _signals(self) -> list[str]:
        return [policy.signal for policy in self.policies]

    def _to_check(self, x: Tensor, logits: Tensor) -> Tensor | None:
        """Return the adapter's own prediction; while the source answers, only if that ends by another signal."""
        if self._health.doing != "source":
            return logits
        others = any(policy.action == "source" and policy.signal not in _LOOKED for policy in self.policies)
        return self.adapter.predict_only(x) if others else None

    def _compare(self, x: Tensor, logits: Tensor, looked: Tensor | None, before: Snapshot | None) -> bool:
        """Compare a prediction with the source's, and act; return whether the adapter has changed.

        `before` is the state that has made the prediction: if it is healthy, it is kept.
        """
        reference = self._reference(x, logits)
        self._collect(ours=per_sample(logits), source=per_sample(reference))
        if self.probe is not None:
            self.probe.gauge.update((entropy(reference) if looked is None else looked)[:_LOOK], self._random)
        if len(self._window["ours"]) < _ENOUGH:
            return False
        self._measure()
        self._health.note()
        self._window.clear()
        if self._judge(x, [name for name in self._signals() if name not in _LOOKED]):
            return True
        self._interval = min(self._interval + _FIRST, self.every)
        share = self._health.signals.probe
        if self._health.doing == "learning":
            if before is not None and (self.probe is None or (share or 0.0) <= self.probe.test.tolerated):
                self._ring.keep(before)
            if self._health.batches - self._health.since >= 4 * self._pause:
                self._pause = max(self.pause, self._pause // 2)
        return False

    def _reference(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return what the method would predict with the source's parameters, in the resolution of its prediction."""
        reference = self.adapter.predict_source(x, statistics=self._statistics(len(x)))
        return reference if logits.dim() == 2 else resized(reference, logits)

    def _collect(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._window[name] = torch.cat([self._window[name], value]) if name in self._window else value

    def _measure(self) -> None:
        """Read all signals at once."""
        ours, source = self._window["ours"], self._window["source"]
        values = torch.stack(
            [
                diversity(ours).double(),
                diversity(source).double(),
                (ours.argmax(1) != source.argmax(1)).double().mean(),
                self._distance().double().to(ours.device),
            ]
        )
        mine, reference, differ, away, kept, entropies, dropped = torch.cat([values, self._totals]).tolist()
        samples = max(self._samples, 1)
        self._totals.zero_()
        self._samples = 0
        self._signal(
            kept=kept / samples,
            entropy=entropies / samples,
            diversity=mine,
            collapse=reference - mine,
            disagreement=differ,
            distance=away,
            dropped=dropped,
        )
        if self.probe is not None:
            found = self.probe.disagreements(self.adapter, self._random)
            self.probe.test.update(found)
            self._signal(
                probe=sum(found) / len(found),
                evidence=self.probe.test.evidence,
                shift=self.probe.gauge.log_wealth,
            )

    def _distance(self) -> Tensor:
        parameters, source = [*self.adapter.state.parameters.values()], self.adapter.state.source_parameters().values()
        if not parameters:
            return torch.zeros(())
        omega = self._importance
        fits = omega is not None and omega.numel() == sum(p.numel() for p in parameters)
        return distance(parameters, [*source], omega.to(parameters[0].device) if omega is not None and fits else None)

    def _signal(self, **values: float) -> None:
        self._health.signals = replace(self._health.signals, batch=self._health.batches, **values)

    # Actions ----------------------------------------------------------------------------------------------------------

    def _judge(self, x: Tensor, signals: Sequence[str]) -> bool:
        """Act on the policies of these signals, at most on one that undoes; return whether the adapter has changed."""
        for place, policy in enumerate(self.policies):
            if policy.signal not in signals:
                continue
            self._streaks[place] = self._streaks[place] + 1 if policy.concerns(self._health.signals) else 0
            value: float = getattr(self._health.signals, policy.signal) or 0.0
            if self._streaks[place] >= policy.times:
                if self._alarm(Alarm(self._health.batches, policy.signal, value, policy.action), x):
                    return True
            elif self._health.doing == policy.action and policy.action in LASTING:
                self._quiet += 1
                if self._quiet >= 2:
                    self._resume()
        return False

    def _alarm(self, alarm: Alarm, x: Tensor) -> bool:
        """Do what an alarm asks for; return whether the adapter has changed."""
        health = self._health
        self._interval, self._quiet = self._first_interval, 0
        self._window.clear()
        if alarm.action in LASTING and health.doing not in ("learning", "paused"):
            return False
        if not health.alarms:
            warn(f"batch {alarm.batch}: {alarm.signal} is {alarm.value:.3g}, so: {alarm.action}. `health` has the rest")
        health.alarms.append(alarm)
        if alarm.action in LASTING:
            self._do(alarm.action)
            return False
        if alarm.action == "reset":
            self._ring.forget()
        if alarm.action == "partial reset":
            self._ring.halve()
        else:
            self._back()
            while len(self._ring) > 1 and self._unhealthy(x):
                self._back()
        if self.probe is not None:
            self.probe.test.restart()
        if alarm.action == "freeze":
            self.frozen = True
        else:
            self._start_pause(_stretch(x))
        return True

    def _unhealthy(self, x: Tensor) -> bool:
        """Return whether the adapter as it is now would be damaged or collapsed."""
        if self.probe is not None and self.probe.damaged(self.adapter, self._random):
            return True
        try:
            ours = self.adapter.predict_only(x, statistics=self._statistics(len(x)))
        except DivergenceError:
            return True
        lost = float(diversity(per_sample(self._reference(x, ours))) - diversity(per_sample(ours)))
        return any(p.concerns(Signals(collapse=lost)) for p in self.policies if p.signal == "collapse")

    def _do(self, what: str) -> None:
        health = self._health
        if health.doing != what:
            health.doing, health.since = what, health.batches

    def _resume(self) -> None:
        """Go on after a pause or a lasting action: learn, unless a pause or the user says otherwise."""
        health = self._health
        paused = health.until is not None and health.batches < health.until
        if not paused:
            health.until, self._interval = None, self._first_interval
        self._do("frozen" if self.frozen else "paused" if paused else "learning")

    def _start_pause(self, stretch: int = 1) -> None:
        self._health.until = self._health.batches + self._pause * stretch
        self._do("frozen" if self.frozen else "paused")
        self._pause = min(2 * self._pause, _LONGEST)

    def _back(self) -> None:
        self._ring.back()
        self._health.rollbacks += 1

    # As an adapter ----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the adapter."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "adapter":
                raise
            return getattr(self.adapter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; one that only the adapter has is set there."""
        known = name.startswith("_") or name in vars(self) or name in self._modules or hasattr(type(self), name)
        if not known and "adapter" in self._modules and hasattr(self.adapter, name):
            setattr(self.adapter, name, value)
        else:
            super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the adapter, the held-out images and the snapshots."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._ring.cast(fn)
        self._totals = self._totals.to(self.adapter.device)
        self._window.clear()
        return self

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuse, as an adapter does: use `load`."""
        return self.adapter.load_state_dict()

    def __repr__(self) -> str:
        """Return the call that builds this guard."""
        return f"Guard({self.adapter!r}{'' if self.probe is None else f', probe={len(self.probe.images)} images'})"


def _stretch(x: Tensor) -> int:
    """Return how many such batches are enough for a judgement: times between checks and pauses grow with it."""
    return max(1, -(-_ENOUGH // len(x)))


def _within(folder: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{folder}/"): t for name, t in tensors.items() if name.startswith(f"{folder}/")}
