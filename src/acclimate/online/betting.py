"""Tests by betting: the wealth of a player who bets against a hypothesis, so that a large one is evidence against it.

    test = ProbeTest(tolerated=0.1)
    test.update(disagreed)          # 0 or 1 per held-out image, or values between
    test.evidence >= 1              # time to act

The probe test is exact at any time, however often it is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Generator, Tensor

__all__ = ["ProbeTest", "ShiftGauge"]

_BETS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""λ as a share of 1/m₀, the largest bet that cannot lose everything."""


class ProbeTest:
    """Does the adapted network disagree with the source on held-out images more often than is tolerated?

    For draws X in [0, 1] of mean at most m₀, K = mean_λ Π (1 + λ(X − m₀)) is the wealth of a fair or losing game, so by
    Ville's inequality it ever reaches 1/`risk` with probability at most `risk`, whatever the stream does: the
    randomness is in the draws. M ← (1 + M)(1 + λ(X − m₀)) starts a new player with each draw and so finds changes that
    come late; between two false alarms of M ≥ `gap` lie at least `gap` draws on average.

    >>> test = ProbeTest(tolerated=0.1)
    >>> test.update([0.0] * 50)
    >>> test.evidence < 0.5
    True
    >>> test.update([1.0] * 20)
    >>> test.evidence >= 1
    True
    """

    def __init__(self, tolerated: float, *, risk: float = 0.01, gap: float = 10_000) -> None:
        if not 0 < tolerated < 1 or not 0 < risk < 1 or not gap > 1:
            raise ValueError(
                f"a probe test tolerates a share between 0 and 1, not {tolerated}; risk={risk} lies between 0 and 1, "
                f"and gap={gap} above 1"
            )
        self.tolerated, self.risk, self.gap = tolerated, risk, gap
        self.bets = torch.tensor(_BETS, dtype=torch.float64) / tolerated
        self.restart()

    def restart(self) -> None:
        """Start with new players, after something was done about an alarm."""
        self.log_wealth = torch.zeros(len(self.bets), dtype=torch.float64)
        self.log_restarted = torch.full((len(self.bets),), -math.inf, dtype=torch.float64)

    def update(self, draws: Iterable[float]) -> None:
        """Add draws, one after another."""
        for draw in draws:
            gain = torch.log1p(self.bets * (draw - self.tolerated))
            self.log_wealth = self.log_wealth + gain
            self.log_restarted = torch.logaddexp(torch.zeros(()), self.log_restarted) + gain

    @property
    def wealth(self) -> float:
        """K, the wealth of the players who have bet from the start."""
        return float(self.log_wealth.exp().mean())

    @property
    def evidence(self) -> float:
        """How near an alarm is: ln K / ln(1/risk), or ln M / ln(gap) if that is larger. One is an alarm."""
        size = math.log(len(self.bets))
        kept, restarted = (float(logs.logsumexp(0)) - size for logs in (self.log_wealth, self.log_restarted))
        return max(0.0, kept / -math.log(self.risk), restarted / math.log(self.gap))

    def state(self) -> dict[str, Any]:
        """Return what changes, as plain numbers."""
        finite = self.log_restarted.clamp(min=-1e9)
        return {"log_wealth": self.log_wealth.tolist(), "log_restarted": finite.tolist()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned."""
        self.log_wealth, self.log_restarted = (
            torch.tensor(state[name], dtype=torch.float64) for name in ("log_wealth", "log_restarted")
        )


class ShiftGauge:
    """Do the source's entropies on the stream differ from those on held-out images (Bar et al., 2024)?

    u = F(H), with the distribution F of the held-out entropies, is uniform on [0, 1] without a shift. The wealth
    Π (1 + ε(u − ½)) then stays small. ε follows the gradient, |ε| < 2. Fog raises it as well as an attack does, and F
    is an estimate, which a long stream finds out by itself. So it is shown, and nothing is done about it.
    """

    def __init__(self, entropies: Tensor) -> None:
        self.entropies = entropies.flatten().double().cpu().sort().values
        self.log_wealth, self.bet, self._squares = 0.0, 0.0, 1.0

    def update(self, entropies: Tensor, generator: Generator) -> None:
        """Add entropies of the source network on images of the stream."""
        values = entropies.flatten().double().cpu()
        below, upto = (torch.searchsorted(self.entropies, values, side=side) for side in ("left", "right"))
        ties = torch.rand(len(values), generator=generator, dtype=torch.float64)
        for u in ((below + ties * (upto - below + 1)) / (len(self.entropies) + 1)).tolist():
            self.log_wealth += math.log1p(self.bet * (u - 0.5))
            slope = (u - 0.5) / (1 + self.bet * (u - 0.5))
            self._squares += slope**2
            self.bet = max(-1.8, min(1.8, self.bet + slope / self._squares))

    def state(self) -> dict[str, Any]:
        """Return what changes, as plain numbers."""
        return {"log_wealth": self.log_wealth, "bet": self.bet, "squares": self._squares}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` has returned."""
        self.log_wealth, self.bet, self._squares = state["log_wealth"], state["bet"], state["squares"]
