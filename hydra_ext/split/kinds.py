"""The rehearsals that a stage keeps, of the kinds of microbatch that it has run lately."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from hydra_ext.split.rehearsal.record import Rehearsal

# A number in the microbatch that changes with every step makes each microbatch a kind of its own. The limit keeps such
# kinds from filling the memory.
KINDS_KEPT = 32

logger = logging.getLogger(__name__)


class KnownRehearsals(dict[Hashable, dict[str, Rehearsal]]):
    """Rehearsals by the kind of microbatch, and then by the digest of the path through the model.

    Values may decide the path, so one kind may have several. At most ``KINDS_KEPT`` kinds are kept, and at most as many
    paths of one kind. Beyond that, the kind that was not used for longest is dropped, or the path that was added
    first. It is rehearsed again when it comes back.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__({rehearsal.signature: {rehearsal.digest: rehearsal}})
        self._watched: set[tuple[Hashable, str]] = set()
        self._told = False

    def add(self, rehearsal: Rehearsal) -> None:
        ways = self.setdefault(rehearsal.signature, {})
        ways[rehearsal.digest] = rehearsal
        while len(ways) > KINDS_KEPT:
            self._forget(rehearsal.signature, next(iter(ways)))
        while len(self) > KINDS_KEPT:
            oldest = next(iter(self))
            for digest in list(self[oldest]):
                self._forget(oldest, digest)
            del self[oldest]
            self._tell()

    def use(self, rehearsal: Rehearsal) -> None:
        """Marks the kind as the last one used: a microbatch takes this path."""
        if next(reversed(self)) != rehearsal.signature:
            self[rehearsal.signature] = self.pop(rehearsal.signature)

    def is_watched(self, rehearsal: Rehearsal) -> bool:
        """Whether a microbatch that took this path has been watched to its end."""
        return (rehearsal.signature, rehearsal.digest) in self._watched

    def note_watched(self, rehearsal: Rehearsal) -> None:
        self._watched.add((rehearsal.signature, rehearsal.digest))

    def _forget(self, signature: Hashable, digest: str) -> None:
        del self[signature][digest]
        self._watched.discard((signature, digest))

    def _tell(self) -> None:
        if not self._told:
            logger.warning(
                "more than %d kinds of microbatch have been rehearsed, and each rehearsal takes at least one "
                "forward: if a Python number in the microbatch changes, make it a tensor",
                KINDS_KEPT,
            )
        self._told = True
