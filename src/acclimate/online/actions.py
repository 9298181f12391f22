"""What a guard does about alarms: answer otherwise for a while, go back to a healthy snapshot, pause learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..checks import warn
from ..core.adapter import Adapter
from .policy import LASTING, Alarm, Health, Policy
from .ring import Ring

__all__ = ["Actions"]

_LONGEST = 4096  # batches of a pause
_HALVINGS = 6  # of the way to the source


class Actions:
    """The ring of snapshots, pauses, and which lasting action is under way. `health` is the guard's record."""

    def __init__(self, adapter: Adapter, health: Health, ring: int, pause: int) -> None:
        self.adapter, self.health, self.first_pause = adapter, health, pause
        self.ring = Ring(adapter, ring)
        self.pause = pause  # batches of the next one
        self.cause, self.quiet = "", 0  # the signal of the lasting action, and checks without it
        self.froze = False  # whether a policy has frozen the adapter, and not the user

    def alarm(
        self, alarm: Alarm, unhealthy: Callable[[], bool], stretch: int = 1, before: Callable[[], None] = lambda: None
    ) -> bool:
        """Do what an alarm asks for; return whether the adapter has changed.

        `unhealthy` says whether the adapter as it is now would ring, too. A pause is `stretch` times as long. `before`
        is called if the adapter is about to change. It comes first, and the pause, so that an interrupt leaves nothing
        half done.
        """
        health = self.health
        self.quiet = 0
        if alarm.action in LASTING and health.doing not in ("learning", "paused"):
            return False
        first = not health.alarms
        health.ring(alarm)
        changed = self._carry_out(alarm, unhealthy, stretch, before)
        if first:  # last, since a warning may be an error
            warn(f"batch {alarm.batch}: {alarm.signal} is {alarm.value:.3g}, so: {alarm.action}. `health` has the rest")
        return changed

    def _carry_out(self, alarm: Alarm, unhealthy: Callable[[], bool], stretch: int, before: Callable[[], None]) -> bool:
        if alarm.action in LASTING:
            self.cause = alarm.signal
            self.do(alarm.action)
            return False
        before()
        if alarm.action == "reset" or self.again:
            self.ring.forget()
        if alarm.action == "freeze":
            self.adapter.frozen = self.froze = True
            self.resume()
        else:
            self.start_pause(stretch)
        if alarm.action == "partial reset":
            self.nearer(unhealthy)
        else:
            self.back(unhealthy)
        return True

    def lacks(self, policies: Sequence[Policy]) -> bool:
        """Return whether a lasting action is under way that none of these policies could end."""
        asked = any(policy.action == self.health.doing and policy.signal == self.cause for policy in policies)
        return self.health.doing in LASTING and not asked

    @property
    def again(self) -> bool:
        """Whether no long healthy stretch has followed the last pause."""
        return self.pause > self.first_pause

    def is_quiet(self, policy: Policy) -> bool:
        """Count a quiet check; return whether two in a row end the lasting action."""
        lasts = self.health.doing == policy.action and policy.action in LASTING and self.cause == policy.signal
        self.quiet += lasts
        return lasts and self.quiet >= 2

    def do(self, what: str) -> None:
        """Note what is done from now on."""
        if self.health.doing != what:
            self.health.doing, self.health.since = what, self.health.batches

    def resume(self) -> bool:
        """Go on after a pause or a lasting action; return whether no pause is left.

        Learn, unless a pause or the user says otherwise.
        """
        health = self.health
        paused = health.until is not None and health.batches < health.until
        if not paused:
            health.until = None
        self.do("frozen" if self.adapter.frozen else "paused" if paused else "learning")
        return not paused

    def start_pause(self, stretch: int = 1) -> None:
        """Pause learning, the next time for twice as long. What lasts until a signal is gone goes on meanwhile."""
        self.health.until = self.health.batches + self.pause * stretch
        if self.health.doing not in LASTING:
            self.do("frozen" if self.adapter.frozen else "paused")
        self.pause = min(2 * self.pause, _LONGEST)

    def nearer(self, unhealthy: Callable[[], bool]) -> None:
        """Move the parameters half of the way to the source, again until they are healthy; at last all of the way."""
        self.health.rollbacks += 1
        for _ in range(_HALVINGS):
            self.ring.halve()
            if not unhealthy():
                return
        self.ring.forget()
        self.ring.back()

    def back(self, unhealthy: Callable[[], bool] = lambda: False) -> bool:
        """Restore the newest snapshot that is healthy; at last the source. Return whether it was a snapshot."""
        self.health.rollbacks += 1
        while found := self.ring.back():
            if not unhealthy():
                break
        return found

    def calm(self, stretch: int = 1) -> None:
        """Halve the next pause after a healthy check that comes long after the last one."""
        if self.health.batches - self.health.since >= 4 * self.pause * stretch:
            self.pause = max(self.first_pause, self.pause // 2)

    def cast(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a move or a cast, as to the adapter."""
        self.ring.cast(fn)
