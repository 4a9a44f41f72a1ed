"""vDNN's dynamic policy: trials decide which tensors leave the device (Rhu et al., MICRO 2016, section 3.3)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from hydra_ext import _C

_TIMED = 2  # timed passes of each candidate, after one pass that warms up


class DynamicOffload:
    """Chooses the policy of the next forward by the times of the passes before.

    Args:
        budget: Device bytes for saved tensors.

    Attributes:
        chosen: Name of the chosen candidate; None while candidates are tried.
    """

    def __init__(self, core: _C.Stash, budget: int) -> None:
        self._core = core
        self._budget = budget
        self._treatments = {
            "keep": _C.Treatment.keep(),
            "conv": _C.Treatment.move_convolution_inputs(),
            "all": _C.Treatment.move(),
        }
        self._candidate = "all"
        self._trial = self._try_out()
        self._lock = threading.Lock()
        self._ended = _C.StashPass()  # the last pass that has ended
        self.chosen: str | None = None

    def treatment(self) -> _C.Treatment:
        """The policy of a forward that begins now."""
        with self._lock:
            ended = self._core.last_pass()
            if self.chosen is None and ended is not None and ended.number != self._ended.number:
                self._ended = ended
                self._candidate = next(self._trial)
            return self._treatments[self._candidate]

    def _try_out(self) -> Iterator[str]:
        """Yields the candidate of the next pass; resumed after each pass that has ended."""
        if self._ended.saved_bytes <= self._budget:
            self.chosen = "keep"
            yield self.chosen
        seconds = {}
        for candidate in ("all", "conv"):
            if candidate != self._candidate:
                yield candidate  # to warm up
            times = []
            for _ in range(_TIMED):
                begin = time.perf_counter()
                yield candidate
                times.append(time.perf_counter() - begin)
            if candidate == "all" or self._ended.peak_bytes <= self._budget:
                seconds[candidate] = min(times)
        self.chosen = min(seconds, key=seconds.__getitem__)
        yield self.chosen
