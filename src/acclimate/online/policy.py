"""What the guard does when: a policy is a signal, a threshold and an action.

guard = acclimate.Guard(adapter, policies=(*acclimate.POLICIES, Policy("distance", "reset", above=5.0)))
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from ..checks import no_such

__all__ = ["LASTING", "POLICIES", "Action", "Alarm", "Health", "Policy", "Signals"]

Action: TypeAlias = Literal["leave", "source", "blend", "skip", "roll back", "partial reset", "reset", "freeze"]
"""What can be done. The first four last until the signal is gone, `freeze` until the user lifts it:

- `leave`: leave the answer to the source network, and learn as usual. This is no alarm.
- `source`: answer with the source network, and do not learn.
- `blend`: answer with BatchNorm statistics that are half the source's, and do not learn.
- `skip`: answer as usual, and do not learn.
- `roll back`: restore the last healthy snapshot; one further back if that is not healthy either. Then pause learning.
  If it rings again without a long healthy stretch, restore the source, and pause for twice as long.
- `partial reset`: move the parameters half of the way to the source, again until they are healthy. Then pause.
- `reset`: restore the source, and pause.
- `freeze`: restore the last healthy snapshot, and learn no more.
"""

LASTING = ("source", "blend", "skip")
"""Actions that learning waits for, until their signal is gone."""


@dataclass(frozen=True)
class Signals:
    """What a check has found. None where it cannot be measured: without a probe, or without BatchNorm.

    >>> Signals(batch=32, collapse=0.02).collapse
    0.02
    """

    batch: int = 0
    """When it was measured."""
    kept: float | None = None
    """The share of samples learned from, of the batches that were checked."""
    entropy: float | None = None
    """The mean entropy of the predictions in nats, of the batches that were checked."""
    diversity: float | None = None
    """The entropy of the mean prediction, as a share of the largest possible."""
    collapse: float | None = None
    """How much of that diversity is lost against the parameters of the source on the same images."""
    content: float | None = None
    """The confidence that the source network loses when patches are shuffled: whether it sees what is in the images."""
    skew: float | None = None
    """That times the diversity which the source's predictions lack: it sees well, and sees few classes in a batch."""
    novelty: float | None = None
    """How unlike the held-out images a batch is, by simple statistics of its pixels; about 1 if it is not. It is read
    with each check, and with every batch once some of those images are forgotten or recognised."""
    repeated: float | None = None
    """The share of images in a batch that equal the one before. It is read with every batch."""
    gain: float | None = None
    """By how much more held-out images in the style of the batch are predicted right than by the source network."""
    harm: float | None = None
    """By how much fewer, at least: two standard errors are subtracted. Only where samples are independent. A little
    above zero without a gain, if the method answers otherwise than `predict_only`."""
    disagreement: float | None = None
    """The share of images on which adapted and source network disagree."""
    distance: float | None = None
    """The distance from the source, in Fisher norm if the guard has a probe or the method has an importance."""
    probe: float | None = None
    """The share of held-out source images on which adapted and source network disagree."""
    evidence: float | None = None
    """How sure it is that this share is above what is tolerated; 1 is an alarm (`acclimate.online.betting`)."""
    shift: float | None = None
    """The log-wealth of the bet that the stream is shifted. Honest fog raises it, so no policy should use it."""
    dropped: float | None = None
    """Steps that were dropped since the last check because of a gradient that was not finite."""


@dataclass(frozen=True)
class Policy:
    """An action for a signal above or below a threshold, in `times` checks in a row.

    >>> Policy("collapse", "roll back", above=0.15).concerns(Signals(collapse=0.4))
    True
    """

    signal: str
    action: Action
    above: float | None = None
    below: float | None = None
    times: int = 1
    unless: str | None = None
    """A signal that decides instead, where it is known."""

    def __post_init__(self) -> None:
        known = [each.name for each in fields(Signals) if each.name != "batch"]
        for signal in (self.signal, *([] if self.unless is None else [self.unless])):
            if signal not in known:
                raise ValueError(no_such("signal", signal, known))
        if self.action not in get_args(Action):
            raise ValueError(no_such("action", self.action, get_args(Action)))
        if (self.above is None) == (self.below is None) or self.times < 1:
            raise ValueError(f"a policy for {self.signal} needs above= or below=, not both, and times= of at least 1")

    def concerns(self, signals: Signals) -> bool:
        """Return whether the signal has crossed the threshold."""
        if self.unless is not None and getattr(signals, self.unless) is not None:
            return False
        value: float | None = getattr(signals, self.signal)
        if value is None or math.isnan(value):
            return False
        return value > self.above if self.above is not None else value < (self.below or 0.0)


POLICIES = (
    Policy("repeated", "source", above=0.5),
    Policy("skew", "source", above=0.28),
    Policy("harm", "leave", above=0.0),
    Policy("harm", "roll back", above=0.3),
    Policy("collapse", "roll back", above=0.2, unless="harm"),
    Policy("evidence", "partial reset", above=1.0),
)
"""The default: a stuck camera, correlated labels, harm or else collapse, and damage to what the network knew.

`benchmarks/guard_thresholds.py` has chosen the thresholds."""


@dataclass(frozen=True)
class Alarm:
    """What rang, when, and what was done."""

    batch: int
    signal: str
    value: float
    action: str


@dataclass
class Health:
    """How an adapter is: its last signals, all alarms, what is done about them now, and since when."""

    batches: int = 0
    doing: str = "learning"
    """`learning`, or what is done instead."""
    left: bool = False
    """Whether the source network answers meanwhile: because the images are familiar, or by a policy."""
    since: int = 0
    """The batch at which that began."""
    until: int | None = None
    """The batch at which a pause ends."""
    rollbacks: int = 0
    """How often learning was undone, in whole or in part."""
    passes: int = 0
    """Samples that checks have run through the network, in addition to the method's own passes."""
    familiar: int = 0
    """Images that look like the held-out ones, and that the source network has answered therefore."""
    worse: int = 0
    """Images that a policy has left to the source network, because the adapted network seemed to be worse."""
    probed: bool = True
    """Whether there are held-out images. Without them, damage that leaves the predictions diverse is not noticed."""
    rejected: int = 0
    """Images with NaN or infinity, which were answered with a uniform prediction."""
    signals: Signals = field(default_factory=Signals)
    alarms: list[Alarm] = field(default_factory=list)
    """The last alarms, at most 512."""
    alarm_count: int = 0
    """All alarms so far."""
    history: list[Signals] = field(default_factory=list)
    """The signals of the last checks, at most 512."""

    def note(self) -> None:
        """Add the signals to the history."""
        self.history = [*self.history[-511:], self.signals]

    def ring(self, alarm: Alarm) -> None:
        """Add an alarm."""
        self.alarms = [*self.alarms[-511:], alarm]
        self.alarm_count += 1

    def alarms_since(self, before: Health | None) -> list[Alarm]:
        """Return the alarms that this record has, and an earlier one has not."""
        new = self.alarm_count - (0 if before is None else before.alarm_count)
        return self.alarms[-new:] if new > 0 else []

    def as_dict(self, most: int = 512) -> dict[str, Any]:
        """Return plain data, for JSON, with at most so many of the last checks and alarms."""
        listed = {name: [{**vars(each)} for each in getattr(self, name)[-most:]] for name in ("alarms", "history")}
        return {**vars(self), "signals": {**vars(self.signals)}, **listed}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Health:
        """Read what `as_dict` has returned."""
        return cls(
            **{
                **content,
                "signals": Signals(**content["signals"]),
                "alarms": [Alarm(**alarm) for alarm in content["alarms"]],
                "history": [Signals(**signals) for signals in content["history"]],
            }
        )

    def __str__(self) -> str:
        pause = f", until batch {self.until}" if self.doing == "paused" else ""
        doing = f"{self.doing} since batch {self.since}{pause}{', the source answers' if self.left else ''}"
        known = {name: value for name, value in asdict(self.signals).items() if value is not None and name != "batch"}
        images = f"{self.rejected} images rejected, {self.familiar + self.worse} left to the source"
        lines = [f"{self.batches:,} batches: {doing}; {self.rollbacks} rollbacks, {images}"]
        lines += [f"  {name:13} {value:.3g}" for name, value in known.items()]
        lines += [] if self.probed else ["  without held-out images, only a collapse of the predictions is noticed"]
        lines += [f"  batch {a.batch}: {a.signal} = {a.value:.3g}, so {a.action}" for a in self.alarms[-5:]]
        return "\n".join(lines)
