"""When the scheduler plans again."""

from __future__ import annotations

_REST = 20  # times the seconds that a plan has taken pass before the next one, so that devices do not wait for plans


class Agenda:
    """When the next plan is made.

    Attributes:
        made: When the last one was.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self.made = 0.0
        self._due = 0.0
        self._rested = 0.0

    @property
    def next(self) -> float:
        return max(self._due, self._rested)

    def note(self, begun: float, ended: float) -> None:
        """A plan was made."""
        self.made, self._due = begun, begun + self._interval
        self._rested = ended + _REST * (ended - begun)

    def hurry(self, now: float) -> None:
        """The plan does not fit what has happened."""
        self._due = min(self._due, now)

    def insist(self, now: float) -> None:
        """The plan cannot be followed."""
        self._due = self._rested = now
