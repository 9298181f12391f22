"""Guard: an adapter that is watched, so that it cannot run away.

    model = acclimate.Guard(acclimate.EATAC(net, source=clean), probe=held_out)
    logits = model(x)          # predicts; learns if that is safe
    print(model.health)        # signals, alarms, what was done about them, since when

Now and then a batch is checked: it is also predicted by the source network, and the two predictions are compared
(`judge`). Policies say what follows from that (`policy`, `actions`). Checks come every second batch at first and after
an alarm, and then less and less often, up to one in `every`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from ..checks import DivergenceError
from ..core.adapter import Adapter, Statistics
from ..core.snapshot import Snapshot, StateError
from ..core.step import Step
from ..parts.fisher import Images
from ..parts.sharing import exclusive
from ..parts.world import Share
from .actions import Actions
from .judge import ENOUGH, SMALL, Judge
from .policy import POLICIES, Alarm, Health, Policy
from .probe import Probe

__all__ = ["GUARD_OPTIONS", "Guard"]

GUARD_OPTIONS = ("every", "familiar", "tolerated", "risk", "ring", "pause")
"""Numbers that a command line can set."""

_FIXED = ("tolerated", "risk", "ring", "pause")
_FIRST = 2  # batches between checks at first, and after an alarm
_GROWTH = 8  # later, an eighth of the batches since then
_PRIOR = 16  # images that the source's statistics count for in such a batch


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
        familiar: a batch whose novelty is below this looks like the held-out images, for which it is about 1. Once the
            adapted network has forgotten some of those, the source network answers such batches; the adapted one still
            learns from them. With batch statistics, which fit such images worse than the source's, the source network
            always answers them, and nothing is learned. 0 turns this off.
        tolerated: the share of held-out images on which adapted and source network may disagree, in addition to those
            on which they do before anything is learned.
        risk: the probability that the first player of the probe test ever rings falsely; `ProbeTest` has a second one.
        ring: how many healthy snapshots are kept.
        pause: for how many batches of 48 images learning pauses after the first rollback.
        seed: the seed of what the guard draws at random.
    """

    adapter: Adapter
    probe: Probe | None

    @torch.inference_mode(False)
    def __init__(
        self,
        adapter: Adapter,
        *,
        probe: Images | None = None,
        policies: Sequence[Policy] = POLICIES,
        every: int = 128,
        familiar: float = 4.0,
        tolerated: float = 0.1,
        risk: float = 0.01,
        ring: int = 4,
        pause: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(adapter, Adapter):
            raise TypeError(f"a Guard watches an adapter, such as EATA(net), not a {type(adapter).__name__}")
        for name, value in (("every", every), ("ring", ring), ("pause", pause), ("familiar", familiar)):
            _check(name, value)
        if not 0 <= tolerated < 1 or not 0 < risk < 1:
            raise ValueError(f"Guard: tolerated={tolerated} and risk={risk} must be between 0 and 1")
        _check("policies", policies)
        self.every, self.familiar, self.probe = every, familiar, None
        self.adapter = adapter  # after what has the same name in some adapters, which is the guard's then
        self._most, self._pause, self._seed = ring, pause, seed
        self._options = dict(zip(GUARD_OPTIONS, (every, familiar, tolerated, risk, ring, pause), strict=True))
        random = Generator().manual_seed(seed)  # its own, so that the adapter's is as without a guard
        adapter.world.same("guard", str((probe is None, policies, *self._options.values(), seed)))
        self.probe = None if probe is None else Probe(adapter, probe, tolerated, risk, random)
        self._judge = Judge(adapter, self.probe, policies, random)
        self._dense: bool | None = None  # whether the network is a segmenter, once that is known
        self._begin()

    def _begin(self) -> None:
        """Start to watch, from the adapter as it is."""
        self._judge.random.manual_seed(self._seed)
        self._judge.begin()
        self._clock = 0  # images so far; of each batch at most as many as a judgement needs
        self._next = self._calm = self._left = 0  # the next check, and since when all is calm, or left to the source
        self._stretch = 1  # so many batches are enough for a judgement
        self._known = False  # whether the last batch was familiar, so that the source network answers
        self._gathered: Tensor | None = None
        self._actions = Actions(self.adapter, self._health, self._most, self._pause)
        self._last: Step | None = None

    @property
    def _health(self) -> Health:
        return self._judge.health

    @property
    def _size(self) -> int:
        """The number of images of the current batch, on all ranks."""
        return self._judge.share.total

    # For users --------------------------------------------------------------------------------------------------------

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Predict a batch, and learn from it if that is safe; return logits without a graph.

        Images with NaN or infinity are not shown to the network; their logits are zero.
        """
        x, self._judge.share = self.adapter.admit(x)
        self._judge.trial = None
        try:
            return self._answer(x)
        except DivergenceError:
            raise
        except ValueError:
            fine = _finite(x)
            if bool(self.world.all(fine)):
                return self._answer(x)  # the error was that of an earlier batch, or it is raised again
            return self._answer_some(x, fine)

    @exclusive
    def predict_only(self, x: Tensor, *, statistics: Statistics | None = None) -> Tensor:
        """Return the logits of x as they would be predicted now. Nothing is learned, counted or changed.

        Images with NaN or infinity have zeros. Where the source network answers, it does so whatever `statistics` say.
        """
        x, share = self.adapter.admit(x)
        try:
            return self._look_at(x, share, statistics)
        except DivergenceError:
            raise
        except ValueError:
            fine = _finite(x)
            if bool(self.world.all(fine)):
                raise
            return self._of_finite(lambda some: self._look_at(*self.adapter.admit(some), statistics), x, fine)

    def _look_at(self, x: Tensor, share: Share, statistics: Statistics | None) -> Tensor:
        """Return the logits of finite images without learning."""
        self._find_dense(x, share)
        leave = self._judge.leaves or self._is_known(self._read_novelty(x, share))
        return self._predict(x, share, statistics, leave=leave)

    @exclusive
    def preview(self, x: Tensor) -> Tensor:
        """Return the logits that a call would return, unless it finds something. Nothing is learned or changed."""
        x, share = self.adapter.admit(x)
        fine = _finite(x)
        if not bool(self.world.all(fine)):
            return self._of_finite(self.preview, x, fine)
        self._find_dense(x, share)
        if self._health.doing != "learning" or self._statistics(share.total) is not None or self._gathers(share):
            return self.predict_only(x)
        leave = self._judge.leaves or self._is_known(self._read_novelty(x, share) if self._reads_novelty else None)
        return self.adapter.predict_source(x) if leave else self.adapter.preview(x)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """What to do when."""
        return self._judge.policies

    @policies.setter
    @exclusive
    def policies(self, policies: Sequence[Policy]) -> None:
        _check("policies", policies)
        self._judge.policies = tuple(policies)
        if self._actions.lacks(policies):
            self._resume()

    @property
    def health(self) -> Health:
        """The last signals, all alarms, what is done about them, and since when."""
        health = self._health
        return replace(health, left=self._leaves, alarms=[*health.alarms], history=[*health.history])

    @property
    def last(self) -> Step:
        """The record of the last batch."""
        return self.adapter.last if self._last is None else self._last

    @property
    def frozen(self) -> bool:
        """Set this to True to predict without learning, until it is False again."""
        return self.adapter.frozen

    @frozen.setter
    @exclusive
    def frozen(self, frozen: bool) -> None:
        self.adapter.frozen, self._actions.froze = frozen, False
        self._judge.begin_streaks()  # while frozen, no check would end what is left to the source
        self._resume()

    @exclusive
    @torch.inference_mode(False)
    def rollback(self) -> bool:
        """Restore the last healthy snapshot, and pause learning; return whether there was one besides the source."""
        self._actions.start_pause()
        self._judge.changed()
        self._judge.window.clear()
        return self._actions.back()

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
            **{f"guard/{name}": tensor for name, tensor in self._judge.tensors().items()},
            **{f"guard/ring/{name}": tensor for name, tensor in self._actions.ring.tensors().items()},
            **({} if self._gathered is None else {"guard/gathered": self._gathered.clone()}),
        }
        memory = {
            **self._judge.state(),
            "ring": self._actions.ring.settings(),
            "counts": [self._clock, self._next, self._calm, self._stretch, self._dense, self._known, self._left],
            "actions": [self._actions.pause, self._actions.quiet, self._actions.cause],
            "froze": self._actions.froze,
            "policies": [asdict(policy) for policy in self.policies],
        }
        return Snapshot(tensors, {**own.settings, "guard": memory})

    @exclusive
    @torch.inference_mode(False)
    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot. The same batches then give the same results as before, bit for bit.

        Whether you have set `frozen` is not part of it.
        """
        memory = snapshot.settings.get("guard")
        alike = memory is not None and memory.get("policies") == [asdict(policy) for policy in self.policies]
        if memory is None or not alike or (memory["probe"] is None) != (self.probe is None):
            raise StateError("the state was not saved by a Guard with the same policies, and with a probe as this one")
        mine = {name.removeprefix("guard/"): t for name, t in snapshot.tensors.items() if name.startswith("guard/")}
        theirs = {name: t for name, t in snapshot.tensors.items() if not name.startswith("guard/")}
        self.adapter.restore(Snapshot(theirs, {n: v for n, v in snapshot.settings.items() if n != "guard"}))
        self._judge.load(mine, memory)
        actions = self._actions
        counts = memory["counts"]
        self._clock, self._next, self._calm, self._stretch, self._dense, self._known, self._left = counts
        actions.pause, actions.quiet, actions.cause = memory["actions"]
        actions.health = self._health
        if memory["froze"] or actions.froze:
            self.adapter.frozen = actions.froze = memory["froze"]
        if self.adapter.frozen != (self._health.doing == "frozen"):
            actions.resume()
        self._gathered = mine["gathered"].to(self.adapter.device, copy=True) if "gathered" in mine else None
        actions.ring.load(_within("ring", mine), memory["ring"])
        self._last = None

    def save(self, path: str | Path, snapshot: Snapshot | None = None) -> None:
        """Write adapter and guard to one safetensors file, completely or not at all."""
        self.world.same("guard", sha256(str(self._judge.state()).encode()).hexdigest())
        self.adapter.save(path, snapshot or self.snapshot())

    def load(self, path: str | Path) -> None:
        """Continue from a saved state. A file of another model, method or version, or a damaged one, raises."""
        self.restore(self.adapter.read(path))

    # One batch --------------------------------------------------------------------------------------------------------

    def _answer(self, x: Tensor) -> Tensor:
        """Answer a batch. One that is refused changes nothing; if the adapted network alone diverges, roll back."""
        before = self._noted()
        try:
            return self._serve(x)
        except DivergenceError:
            self._put_back(before)
            self.adapter.predict_source(x, statistics=None)  # raises if the images are at fault
            self._alarm(Alarm(self._health.batches, "collapse", 1.0, "roll back"), x)
            return self._serve(x)
        except ValueError:
            self._put_back(before)
            raise

    def _answer_some(self, x: Tensor, fine: Tensor) -> Tensor:
        """Answer images that are not finite with a uniform prediction."""
        whole, self._judge.share = self._judge.share, self.world.share(int(fine.sum()))
        some = self._judge.share.total
        self._last = None
        logits = self._of_finite(self._answer, x, fine)
        self._health.rejected += whole.total - some
        step = self.last if some else Step(0)
        kept = fine.clone() if step.kept is None else step.kept.new_zeros(len(x), *step.kept.shape[1:])
        if step.kept is not None:
            kept[fine] = step.kept
        self._last = replace(step, size=len(x), share=whole, logits=logits, kept=kept)
        return logits

    def _of_finite(self, predict: Callable[[Tensor], Tensor], x: Tensor, fine: Tensor) -> Tensor:
        """Return a prediction for the finite images, and zeros for the others."""
        nothing = not self.world.share(int(fine.sum())).total
        some = self.adapter.predict_source(torch.zeros_like(x[:1]))[:0] if nothing else predict(x[fine])
        logits = some.new_zeros(len(x), *some.shape[1:])
        logits[fine] = some
        return logits

    def _noted(self) -> dict[str, Any]:
        """Return what a batch may change before the adapter has taken it."""
        own = {name: getattr(self, name) for name in ("_clock", "_next", "_calm", "_left", "_stretch", "_known")}
        actions = {name: getattr(self._actions, name) for name in ("pause", "quiet", "cause", "froze")}
        return {"guard": own, "actions": actions, "health": {**vars(self._health)}, "judge": self._judge.noted()}

    def _put_back(self, before: dict[str, Any]) -> None:
        """Undo that, unless learning was undone meanwhile."""
        if self._health.rollbacks == before["health"]["rollbacks"]:
            vars(self).update(before["guard"])
            vars(self._actions).update(before["actions"])
            vars(self._health).update(before["health"])
            self._judge.put_back(before["judge"])

    def _serve(self, x: Tensor) -> Tensor:
        self._find_dense(x, self._judge.share)
        judged = ENOUGH if self._dense else max(1, min(ENOUGH, self._size))
        self._stretch = -(-ENOUGH // judged)
        logits = self._gather(x) if self._gathers(self._judge.share) else self._take(x)
        self._health.batches += 1
        self._clock += judged
        return logits

    def _find_dense(self, x: Tensor, share: Share) -> None:
        """Find whether the network is a segmenter, before it is given the first small batch."""
        if self._dense is None and share.total < SMALL:
            self._dense = self.adapter.predict_source(x[:1]).dim() > 2

    def _gathers(self, share: Share) -> bool:
        """Return whether a batch is so small that images are gathered before the method learns from them."""
        small = share.total < SMALL and not self._dense
        return small and not (self.adapter.coupled or self.adapter.episodic or self.frozen)

    def _gather(self, x: Tensor) -> Tensor:
        """Predict at once, and learn from all images since the last time if they are enough."""
        logits = self.predict_only(x)
        if self._leaves:
            self._count_left()
        answered = Step(len(x), logits=logits, forwards=len(x))
        self.adapter.passes.add(answered, self.world)
        x = self.world.gather(x)
        earlier = self._gathered
        if earlier is None or (earlier.shape[1:], earlier.dtype) != (x.shape[1:], x.dtype):
            earlier = x[:0]  # images of another kind cannot be in one batch
        self._gathered = torch.cat([earlier, x])
        if len(self._gathered) >= ENOUGH:
            batch, self._gathered = self._gathered, None
            self._take_gathered(batch)
        self._last = answered
        return logits

    def _take_gathered(self, batch: Tensor) -> None:
        """Learn from images that all ranks have, each from a part of them."""
        share, self._judge.share = self._judge.share, Share.even(len(batch), self.world.rank, self.world.size)
        try:
            self._take(self._judge.share.of(batch), answered=True)
        finally:
            self._judge.share = share

    def _take(self, x: Tensor, *, answered: bool = False) -> Tensor:
        """Predict a batch, check it if that is due, and learn from it if that is safe."""
        health = self._health
        if health.doing == "paused" and health.batches >= (health.until or 0):
            self._resume()
        due = self._clock >= self._next and not self.frozen
        self._judge.see(x, novelty=due or self._reads_novelty)
        known, self._known = self._known, self._is_known(health.signals.novelty)
        if known and not self._known and not self.frozen:
            due = True
        if self._rests:
            self._judge.window.clear()
        if not self.frozen and health.signals.repeated is not None:
            self._act(x, ["repeated"])
        looked = self._look(x) if due and self.adapter.coupled and not self._rests else None
        learn = health.doing == "learning" and self._statistics(self._size) is None and not self._rests
        before = self.adapter.state.copy(light=True) if due and learn else None
        logits = self._learn(x, due=due) if learn else self._hold(x, due=due)
        if due and (checked := self._to_check(x, logits)) is not None and self._compare(x, checked, looked, before):
            logits = self._hold(x)
        if due and not self._judge.window:  # otherwise small batches are still being collected
            self._next = self._clock + self._interval()
        return self._leave(x, logits) if self._leaves and not answered else logits

    @property
    def _rests(self) -> bool:
        """Whether there is nothing to learn: batch statistics fit familiar images worse than the source's."""
        return self._known and self.adapter.coupled

    @property
    def _leaves(self) -> bool:
        """Whether the source network answers what is learned from."""
        return (self._known or self._judge.leaves) and self._health.doing != "source"

    @property
    def _reads_novelty(self) -> bool:
        """Whether novelty is read with every batch."""
        return self._known or self.frozen or self._judge.forgotten

    def _interval(self) -> int:
        """Return the time until the next check: short at first, after an alarm, and when the source takes over."""
        since = self._left if self._judge.leaves else self._calm
        passed = (self._clock - since) // ENOUGH
        return 1 + ENOUGH * (min(max(_FIRST, passed // _GROWTH), self.every) - 1)

    def _learn(self, x: Tensor, *, due: bool) -> Tensor:
        logits: Tensor = self.adapter(x)
        step, self._last = self.adapter.last, None
        self._dense = logits.dim() > 2
        self._judge.count_dropped(step.dropped)
        if due:
            self._judge.add(logits, step.kept.double().mean() if step.kept is not None else 1.0 * step.taken)
        return logits

    def _leave(self, x: Tensor, logits: Tensor) -> Tensor:
        """Leave the answer to the source network, which does better on these images."""
        self._count_left()
        if self._rests:
            return logits
        self._health.passes += self._size
        logits = self.adapter.predict_source(x)
        self._last = replace(self.last, logits=logits)
        return logits

    def _count_left(self) -> None:
        self._health.familiar += self._size if self._known else 0
        self._health.worse += 0 if self._known else self._size

    def _hold(self, x: Tensor, *, due: bool = False) -> Tensor:
        """Predict without learning."""
        logits = self._predict(x, self._judge.share, leave=self._rests)
        self._last = Step(len(x), logits=logits, forwards=len(x))
        self.adapter.passes.add(self._last, self.world)
        self._dense = logits.dim() > 2
        if due:
            self._judge.add(logits, None)
        return logits

    def _predict(self, x: Tensor, share: Share, statistics: Statistics | None = None, *, leave: bool) -> Tensor:
        """Return logits of the source network where it answers, and otherwise of the adapted one."""
        if leave or self._health.doing == "source":
            return self.adapter.predict_source(x)
        if statistics is None:
            statistics = self._statistics(share.total)
        return self.adapter.predict_only(x, statistics=statistics)

    def _read_novelty(self, x: Tensor, share: Share) -> Tensor | None:
        return self._judge.novelty(x, share) if self.adapter.coupled or self._judge.forgotten else None

    def _is_known(self, novelty: float | Tensor | None) -> bool:
        """Return whether the source network should answer: the batch is familiar, and some such images are forgotten.

        With batch statistics, also if none are. A batch that was not judged is as the last one.
        """
        if self.probe is None or not (self.adapter.coupled or self.probe.forgotten):
            return False
        return self._known if novelty is None else bool(novelty < self.familiar)

    def _statistics(self, size: int) -> Statistics | None:
        """Return other statistics than the method's, where those of the batch cannot be trusted."""
        if self._health.doing == "blend":
            return 0.5
        if self.adapter.coupled and self.adapter.statistics == "batch" and size < SMALL and not self._dense:
            return size / (size + _PRIOR)
        return None

    # Checks -----------------------------------------------------------------------------------------------------------

    def _look(self, x: Tensor) -> Tensor:
        """Let the source network look at some images, and act; return entropies."""
        entropies, enough = self._judge.look(x)
        if enough:
            self._act(x, self._judge.early)
        return entropies

    def _to_check(self, x: Tensor, logits: Tensor) -> Tensor | None:
        """Return the adapter's own prediction; while the source answers, only if that ends by another signal."""
        if self._rests:
            return None
        if self._health.doing != "source":
            return logits
        others = any(policy.action == "source" and policy.signal in self._judge.late for policy in self.policies)
        return self.adapter.predict_only(x) if others else None

    def _compare(self, x: Tensor, logits: Tensor, looked: Tensor | None, before: Snapshot | None) -> bool:
        """Compare a prediction with the source's, and act; return whether the adapter has changed.

        `before` is the state that has made the prediction: if it is healthy, it is kept.
        """
        left = self._judge.leaves
        if not self._judge.compare(x, logits, self._statistics(self._size), looked):
            return False
        if self._act(x, self._judge.late):
            return True
        if self._judge.leaves and not left:
            self._left = self._clock
        if self._health.doing == "learning":
            if before is not None and self._judge.healthy:
                self._actions.ring.keep(before)
            self._actions.calm(self._stretch)
        return False

    # Actions ----------------------------------------------------------------------------------------------------------

    def _act(self, x: Tensor, signals: Sequence[str]) -> bool:
        """Act on the policies of these signals, at most on one that undoes; return whether the adapter has changed."""
        for policy, rings in self._judge.rulings(signals):
            value: float = getattr(self._health.signals, policy.signal) or 0.0
            if rings and policy.action != "leave":
                if self._alarm(Alarm(self._health.batches, policy.signal, value, policy.action), x):
                    return True
            elif self._actions.is_quiet(policy):
                self._resume()
        return False

    def _alarm(self, alarm: Alarm, x: Tensor) -> bool:
        """Do what an alarm asks for; return whether the adapter has changed."""
        self._calm = self._clock
        self._judge.window.clear()
        unhealthy = partial(self._judge.unhealthy, x, self._statistics(self._size))
        return self._actions.alarm(alarm, unhealthy, self._stretch, before=self._judge.changed)

    def _resume(self) -> None:
        if self._actions.resume():
            self._next = self._calm = self._clock

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
        if name in _FIXED:
            raise AttributeError(f"{name} is set when a guard is built: Guard(adapter, {name}={value!r})")
        if name.startswith("_") and not isinstance(value, nn.Module):
            object.__setattr__(self, name, value)  # quickly, as every batch does
            return
        if name in ("every", "familiar"):
            _check(name, value)
        known = name.startswith("_") or name in vars(self) or name in self._modules or hasattr(type(self), name)
        if not known and "adapter" in self._modules and hasattr(self.adapter, name):
            setattr(self.adapter, name, value)
        else:
            super().__setattr__(name, value)

    @exclusive
    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    @exclusive
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the adapter, the held-out images and the snapshots."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._actions.cast(fn)
        self._judge.move()
        self._gathered = None if self._gathered is None else fn(self._gathered)
        return self

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refuse, as an adapter does: use `load`."""
        return self.adapter.load_state_dict()

    def __repr__(self) -> str:
        """Return the call that builds this guard."""
        usual = {name: each.default for name, each in signature(Guard).parameters.items()}
        other: dict[str, Any] = {n: value for n, value in self._options.items() if value != usual[n]}
        if self.policies != usual["policies"]:
            other["policies"] = self.policies
        probe = {} if self.probe is None else {"probe": f"<{len(self.probe.images)} images>"}
        return (
            f"Guard({', '.join([repr(self.adapter), *(f'{name}={value}' for name, value in (probe | other).items())])})"
        )


def _check(name: str, value: Any) -> None:
    """Refuse what an option of a guard cannot be."""
    if name == "policies":
        if not isinstance(value, Sequence) or not all(isinstance(policy, Policy) for policy in value):
            raise TypeError("Guard: policies= takes acclimate.Policy objects, such as those of acclimate.POLICIES")
    elif name == "familiar":
        if not isinstance(value, (int, float)) or not value >= 0:
            raise ValueError(f"Guard: familiar={value!r} must be a number that is not negative")
    elif not isinstance(value, int) or value < 1:
        raise ValueError(f"Guard: {name}={value!r} must be a whole number of at least 1")


def _finite(x: Tensor) -> Tensor:
    """Return which images have no NaN and no infinity."""
    return x.isfinite().flatten(1).all(1)


def _within(folder: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{folder}/"): t for name, t in tensors.items() if name.startswith(f"{folder}/")}
