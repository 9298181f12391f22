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
from ..parts.fisher import Fisher, Images, image_batches
from ..parts.sharing import exclusive
from .betting import ProbeTest, ShiftGauge
from .policy import POLICIES, Alarm, Health, Policy, Signals
from .signals import content, distance, diversity, per_sample, shuffle_patches

__all__ = ["Guard"]

_FIRST = 2  # batches between checks at first, and after an alarm
_LOOK = 16  # images that the source network looks at for their content
_DRAW = 32  # held-out images per check
_ENOUGH = 48  # samples for a judgement; smaller batches are collected
_SMALL = 8  # batches of fewer images have no statistics worth learning with
_PRIOR = 16  # images that the source's statistics count for in such a batch
_GRIDS = (4, 16)  # how finely images are shuffled to see whether the source network looks at their content
_LASTING = ("source", "blend", "skip")
_WEALTHY = 256  # images that the importance of parameters is estimated on


class Guard(nn.Module):
    """Watch an adapter. It is called as the adapter is, and has the adapter's attributes and methods.

    >>> net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    >>> model = Guard(Tent(net), probe=torch.rand(64, 4))
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

    def __init__(
        self,
        adapter: Adapter,
        *,
        probe: Images | None = None,
        policies: Sequence[Policy] = POLICIES,
        every: int = 32,
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
        self.adapter, self.policies, self.every, self.tolerated = adapter, tuple(policies), every, tolerated
        self.risk, self.ring, self.pause, self._seed = risk, ring, pause, seed
        self.random = Generator().manual_seed(seed)
        """The guard's own generator, so that the adapter's is as without a guard."""
        self.probe: Tensor | None
        held_out = None if probe is None else torch.cat([*image_batches(probe)]).to(adapter.device)
        self.register_buffer("probe", held_out, persistent=False)
        self.test: ProbeTest | None = None
        self.gauge: ShiftGauge | None = None
        self._importance = self._estimate_importance()
        if self.probe is not None:
            answers = torch.cat([adapter.predict_source(x).argmax(1) for x in torch.split(self.probe, _WEALTHY)])
            self.register_buffer("_answers", answers, persistent=False)
            self._start_tests(self.probe)
        self._begin()

    def _start_tests(self, probe: Tensor) -> None:
        """Measure what is normal before anything is learned."""
        if len(probe) < _DRAW:
            raise ValueError(f"probe= has {len(probe)} images, and each check draws {_DRAW}: give a few hundred")
        before = [value for _ in range(8) for value in self._disagreements()]
        self.test = ProbeTest(min(0.99, sum(before) / len(before) + self.tolerated), risk=self.risk)
        self.gauge = ShiftGauge(
            torch.cat([entropy(self.adapter.predict_source(x)) for x in torch.split(probe, _WEALTHY)])
        )

    def _estimate_importance(self) -> Tensor | None:
        own = getattr(self.adapter, "regulariser", None)
        if isinstance(own, Fisher) and own.importance is not None:
            return own.importance
        if self.probe is None or not self.adapter.adapted:
            return None
        return Fisher.estimate(self.adapter, self.probe[:_WEALTHY]).importance

    def _begin(self) -> None:
        """Start to watch, from the adapter as it is."""
        self._health = Health()
        self._interval = self._first_interval
        self._next = 0
        self._pause = self.pause
        self._quiet = 0  # checks without the signal of a lasting action
        self._streaks = [0] * len(self.policies)
        self._window: dict[str, Tensor] = {}
        self._totals = torch.zeros(4, dtype=torch.float64, device=self.adapter.device)  # kept, entropy, samples, drops
        self._ring: list[Snapshot] = [self.adapter.state.copy(light=True)]
        self._last: Step | None = None

    @property
    def _first_interval(self) -> int:
        return min(_FIRST, self.every)

    # For users --------------------------------------------------------------------------------------------------------

    @exclusive
    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch, and learn from it if that is safe; return logits without a graph.

        Images with NaN or infinity are not shown to the network; their logits are zero.
        """
        try:
            return self._serve(x)
        except DivergenceError:
            self._alarm(Alarm(self._health.batches, "collapse", 1.0, "roll back"), x)
            return self._serve(x)
        except ValueError:
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2 or not len(x):
                raise
            fine = x.isfinite().flatten(1).all(1)
            if bool(fine.all()):
                return self._serve(x)  # the error was that of an earlier batch, told late; or it is raised again
            return self._serve_some(x, fine)

    def predict_only(self, x: Tensor, *, statistics: Statistics | None = None) -> Tensor:
        """Return the logits of x as they would be predicted now. Nothing is learned, counted or changed."""
        if self._health.doing == "source" and statistics is None:
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
        self._do("frozen" if frozen else "learning")

    @exclusive
    def rollback(self) -> None:
        """Restore the last healthy snapshot, and pause learning."""
        self._roll_back()
        self._start_pause()

    @exclusive
    def reset(self) -> None:
        """Restore the source, and forget what was watched."""
        self.adapter.reset()
        self.random.manual_seed(self._seed)
        if self.test is not None:
            self.test.restart()
        if self.gauge is not None:
            self.gauge = ShiftGauge(self.gauge.entropies)
        self._begin()

    @exclusive
    def snapshot(self) -> Snapshot:
        """Return a copy of everything that changes between batches, of the adapter and of the guard."""
        own = self.adapter.snapshot()
        tensors = {
            **own.tensors,
            **{f"guard/window/{name}": value.clone() for name, value in self._window.items()},
            **{f"guard/ring/{i}/{n}": t for i, each in enumerate(self._ring) for n, t in each.tensors.items()},
            "guard/totals": self._totals.clone(),
            "guard/generator": self.random.get_state(),
        }
        memory = {
            "health": self._health.as_dict(),
            "ring": [dict(each.settings) for each in self._ring],
            "test": None if self.test is None else self.test.state(),
            "gauge": None if self.gauge is None else self.gauge.state(),
            "counts": [self._interval, self._next, self._pause, self._quiet],
            "streaks": [*self._streaks],
            "frozen": self.adapter.frozen,
        }
        return Snapshot(tensors, {**own.settings, "guard": memory})

    @exclusive
    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot. The same batches then give the same results as before, bit for bit."""
        memory = snapshot.settings.get("guard")
        alike = memory is not None and len(memory["streaks"]) == len(self.policies)
        if memory is None or not alike or (memory["test"] is None) != (self.test is None):
            raise StateError("the state was not saved by a Guard with the same policies, and with a probe as this one")
        mine = {name: t for name, t in snapshot.tensors.items() if name.startswith("guard/")}
        own = {name: value for name, value in snapshot.settings.items() if name != "guard"}
        self.adapter.restore(Snapshot({n: t for n, t in snapshot.tensors.items() if n not in mine}, own))
        self._health = Health.from_dict(memory["health"])
        self._interval, self._next, self._pause, self._quiet = memory["counts"]
        self._streaks = [*memory["streaks"]]
        self.adapter.frozen = memory["frozen"]
        if self.test is not None:
            self.test.load(memory["test"])
        if self.gauge is not None:
            self.gauge.load(memory["gauge"])
        device = self.adapter.device
        self._window = {n.split("/")[2]: t.to(device) for n, t in mine.items() if n.startswith("guard/window/")}
        self._ring = [
            Snapshot({n.split("/", 3)[3]: t for n, t in mine.items() if n.startswith(f"guard/ring/{i}/")}, settings)
            for i, settings in enumerate(memory["ring"])
        ]
        self._totals = mine["guard/totals"].to(device, copy=True)
        self.random.set_state(mine["guard/generator"].cpu())

    def save(self, path: str | Path, snapshot: Snapshot | None = None) -> None:
        """Write adapter and guard to one safetensors file, completely or not at all."""
        self.adapter.save(path, snapshot or self.snapshot())

    def load(self, path: str | Path) -> None:
        """Continue from a saved state. A file of another model, method or version, or a damaged one, raises."""
        self.restore(self.adapter.read(path))

    # One batch --------------------------------------------------------------------------------------------------------

    def _serve(self, x: Tensor) -> Tensor:
        health = self._health
        if health.until is not None and health.batches >= health.until:
            self._do("learning")
        due = health.batches >= self._next and not self.frozen
        looked = self._look(x) if due and self.adapter.coupled else None
        learn = health.doing == "learning" and self._statistics(len(x)) is None
        logits = self._learn(x) if learn else self._hold(x)
        if due and health.doing != "source":
            logits = self._compare(x, logits, looked)
        health.batches += 1
        if due:
            self._next = health.batches + self._interval - 1
        return logits

    def _learn(self, x: Tensor) -> Tensor:
        logits: Tensor = self.adapter(x)
        step = self.adapter.last
        self._last = None
        taken = step.kept.float().mean() if step.kept is not None else 1.0 * step.taken
        self._add(logits, taken, step.dropped)
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
        n = len(logits)
        values = (n * kept, entropy(logits).mean() * n, n, dropped)
        device = self._totals.device
        self._totals += torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])

    def _statistics(self, size: int) -> Statistics | None:
        """Return other statistics than the method's, where those of the batch cannot be trusted."""
        if self._health.doing == "blend":
            return 0.5
        if self.adapter.coupled and size < _SMALL:
            return size / (size + _PRIOR)
        return None

    def _serve_some(self, x: Tensor, fine: Tensor) -> Tensor:
        """Answer images that are not finite with a uniform prediction."""
        self._health.rejected += int((~fine).sum())
        some = self._serve(x[fine]) if bool(fine.any()) else self.predict_only(torch.zeros_like(x[:1]))[:0]
        logits = some.new_zeros(len(x), *some.shape[1:])
        logits[fine] = some
        if not bool(fine.any()):
            self._last = Step(len(x), logits=logits)
        return logits

    # Checks -----------------------------------------------------------------------------------------------------------

    def _look(self, x: Tensor) -> Tensor:
        """Let the source network look at some images, and judge whether their labels are alike; return entropies."""
        some = x[torch.randperm(len(x), generator=self.random)[:_LOOK].to(x.device)]
        views = torch.cat([some, *(shuffle_patches(some, self.random, grid) for grid in _GRIDS)])
        p, *shuffled = (per_sample(z) for z in self.adapter.predict_source(views).chunk(1 + len(_GRIDS)))
        if len(some) >= _SMALL:
            least = torch.stack([content(p, q) for q in shuffled]).amin()
            seen, few = torch.stack([least, 1 - diversity(p)]).tolist()
            self._signal(content=seen, skew=seen * few)
            self._judge(x, ("skew", "content"))
        return entropy(p.clamp(min=1e-12).log())

    def _compare(self, x: Tensor, logits: Tensor, looked: Tensor | None) -> Tensor:
        """Compare the prediction of a batch with the source's; return the logits after what had to be done."""
        reference = self.adapter.predict_source(x, statistics=self._statistics(len(x)))
        self._collect(ours=per_sample(logits), source=per_sample(reference))
        if self.gauge is not None:
            self.gauge.update((entropy(reference) if looked is None else looked)[:_LOOK], self.random)
        if len(self._window["ours"]) < _ENOUGH:
            return logits
        self._measure()
        self._health.note()
        done = self._judge(x, [policy.signal for policy in self.policies if policy.signal not in ("skew", "content")])
        self._window.clear()
        if done:
            return self._hold(x)
        if self._health.doing == "learning" and not self._damaged():
            self._keep_snapshot()
        self._interval = min(2 * self._interval, self.every)
        if self._interval == self.every:
            self._pause = max(self.pause, self._pause // 2)
        return logits

    def _collect(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._window[name] = torch.cat([self._window[name], value]) if name in self._window else value

    def _measure(self) -> None:
        """Read all signals at once."""
        ours, source = self._window["ours"], self._window["source"]
        theirs = [*self.adapter.state.source_parameters().values()]
        parameters = [*self.adapter.state.parameters.values()]
        away = distance(parameters, theirs, self._fitting(parameters)) if parameters else torch.zeros(())
        values = torch.stack(
            [
                diversity(ours).double(),
                diversity(source).double(),
                (ours.argmax(1) != source.argmax(1)).double().mean(),
                away.double().to(ours.device),
            ]
        )
        mine, reference, differ, away_, kept, entropies, samples, dropped = torch.cat([values, self._totals]).tolist()
        self._totals.zero_()
        self._signal(
            kept=kept / max(samples, 1),
            entropy=entropies / max(samples, 1),
            diversity=mine,
            collapse=reference - mine,
            disagreement=differ,
            distance=away_,
            dropped=dropped,
        )
        if self.test is not None:
            found = self._disagreements()
            self.test.update(found)
            self._signal(probe=sum(found) / len(found), evidence=self.test.evidence)
        if self.gauge is not None:
            self._signal(shift=self.gauge.log_wealth)

    def _fitting(self, parameters: Sequence[Tensor]) -> Tensor | None:
        importance = self._importance
        fits = importance is not None and importance.numel() == sum(p.numel() for p in parameters)
        return importance.to(parameters[0].device) if importance is not None and fits else None

    def _disagreements(self) -> list[float]:
        """Draw held-out images, and return where adapted and source network disagree.

        With BatchNorm images of a batch depend on each other, so that its mean is one draw.
        """
        assert self.probe is not None  # noqa: S101
        drawn = torch.randint(len(self.probe), (_DRAW,), generator=self.random).to(self.probe.device)
        differ = self.adapter.predict_only(self.probe[drawn]).argmax(1) != self._answers[drawn]
        per_image = differ.float().view(_DRAW, -1).mean(1)
        return [float(per_image.mean())] if self.adapter.coupled else per_image.tolist()

    def _signal(self, **values: float) -> None:
        self._health.signals = replace(self._health.signals, batch=self._health.batches, **values)

    # Actions ----------------------------------------------------------------------------------------------------------

    def _judge(self, x: Tensor, signals: Sequence[str]) -> bool:
        """Act on the policies of these signals; return whether the adapter or its mode has changed."""
        acted = False
        for place, policy in enumerate(self.policies):
            if policy.signal not in signals:
                continue
            self._streaks[place] = self._streaks[place] + 1 if policy.concerns(self._health.signals) else 0
            value: float = getattr(self._health.signals, policy.signal) or 0.0
            if self._streaks[place] >= policy.times:
                acted |= self._alarm(Alarm(self._health.batches, policy.signal, value, policy.action), x)
            elif self._health.doing == policy.action and policy.action in _LASTING:
                self._quiet += 1
                if self._quiet >= 2:
                    self._do("learning")
        return acted

    def _alarm(self, alarm: Alarm, x: Tensor) -> bool:
        health = self._health
        self._interval, self._quiet = self._first_interval, 0
        if alarm.action in _LASTING:
            if health.doing in ("learning", "paused"):
                health.alarms.append(alarm)
                self._do(alarm.action)
            return False
        health.alarms.append(alarm)
        if len(health.alarms) == 1:
            warn(f"batch {alarm.batch}: {alarm.signal} is {alarm.value:.3g}, so: {alarm.action}. `health` has the rest")
        if alarm.action == "reset":
            del self._ring[1:]
        if alarm.action == "partial reset":
            self._move_half()
        else:
            self._roll_back()
            while len(self._ring) > 1 and (self._damaged(again=True) or self._collapsed(x)):
                self._roll_back()
        if self.test is not None:
            self.test.restart()
        if alarm.action == "freeze":
            self.frozen = True
        else:
            self._start_pause()
        return True

    def _damaged(self, *, again: bool = False) -> bool:
        """Return whether more held-out images than tolerated are predicted differently; `again` looks anew."""
        if self.test is None:
            return False
        found = self._disagreements() if again else [self._health.signals.probe or 0.0]
        return sum(found) / len(found) > self.test.tolerated

    def _collapsed(self, x: Tensor) -> bool:
        """Return whether a policy would find a batch that is predicted now as collapsed."""
        ours, theirs = self.predict_only(x), self.adapter.predict_source(x, statistics=None)
        lost = float(diversity(per_sample(theirs)) - diversity(per_sample(ours)))
        return any(p.concerns(Signals(collapse=lost)) for p in self.policies if p.signal == "collapse")

    def _do(self, what: str) -> None:
        health = self._health
        if health.doing != what:
            health.doing, health.since, health.until = what, health.batches, None

    def _start_pause(self) -> None:
        self._do("paused")
        self._health.until = self._health.batches + self._pause
        self._pause = min(2 * self._pause, 4096)

    def _keep_snapshot(self) -> None:
        self._ring.append(self.adapter.state.copy(light=True))
        if len(self._ring) > self.ring + 1:
            del self._ring[1]  # the first is the source, the last resort

    def _roll_back(self) -> None:
        """Restore the newest snapshot, and forget it: another alarm goes further back."""
        snapshot = self._ring.pop() if len(self._ring) > 1 else self._ring[0]
        self.adapter.restore(self.adapter.state.completed(snapshot))
        self._health.rollbacks += 1

    def _move_half(self) -> None:
        now, source = self.adapter.snapshot(), self.adapter.state.source()
        half = {n: t.lerp(source.tensors[n], 0.5) for n, t in now.tensors.items() if n.startswith("parameter/")}
        calm = {n: torch.zeros_like(t) for n, t in now.tensors.items() if n.startswith("optimizer/")}
        self.adapter.restore(Snapshot({**now.tensors, **half, **calm}, now.settings))

    # As an adapter ----------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the adapter."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "adapter":
                raise
            return getattr(self.adapter, name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the adapter and the held-out images."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._totals = self._totals.to(self.adapter.device)
        self._window.clear()
        return self

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuse, as an adapter does: use `load`."""
        return self.adapter.load_state_dict()

    def __repr__(self) -> str:
        """Return the call that builds this guard."""
        return f"Guard({self.adapter!r}{'' if self.probe is None else f', probe={len(self.probe)} images'})"
