"""A model's chain of blocks as this machine computes it, for each size of microbatches that a plan may take.

All ranks make the same calls of ``fn``. The first rank's times count, so that all ranks plan alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hydra_ext.pipeline.ranks.gradients import ordered_means
from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.splitting import compare, timed
from hydra_ext.plan.pipelines.chains import Chain, Overheads
from hydra_ext.profile import dry_run
from hydra_ext.profile.cards import Speed
from hydra_ext.split import Rehearsal, is_absent, rehearse, time_events, time_microbatch, time_stage
from hydra_ext.split.chains import BACKWARD, chain_of
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.module_state import ModuleState

_TIMES = 4
_SUMMED = 2**20  # float32 numbers of the mean that measures a link
_STATES_AGAIN = 4.0  # copies of the modules' state that a recomputed stage takes beyond a plain one, as measured
_ANY_SPEED = Speed(flops_per_second=1.0, bytes_per_second=1.0)  # only the bytes of a dry run are read


class Measuring:
    """Measures one model.

    Args:
        model: Whole, or on meta.
        fn: Returns the loss of a microbatch.
        watch: The ranks.
        device: Where this rank computes.
        seed: The seed of all random numbers.
        counts_bytes: Whether what is saved for backward matters: it takes a call of ``fn`` on fake tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        fn: Callable[[Any], Any],
        *,
        watch: Watch,
        device: torch.device,
        seed: int,
        counts_bytes: bool,
    ) -> None:
        self._model = model
        self._fn = fn
        self._watch = watch
        self._device = device
        self._seed = seed
        self._counts_bytes = counts_bytes

    def rehearsal(self, microbatch: Any, samples: int) -> Rehearsal:
        found = rehearse(self._model, self._fn, microbatch, seed=self._seed, device=self._device)
        difference = "took another path through the model than rank 0 in its rehearsal"
        compare(found.digest, difference, self._watch, where=f"to plan microbatches of {samples}")
        return found

    def seconds(self, microbatch: Any, samples: int, rehearsal: Rehearsal, turn: int) -> list[float]:
        """What one turn has measured, for :meth:`chain`: a machine is faster at some times than at others."""

        def measure() -> list[float]:
            given = self._model, self._fn, microbatch
            options: dict[str, Any] = {"seed": self._seed, "device": self._device, "runs": 1}
            events = time_events(*given, rehearsal, **options)
            whole, state = time_microbatch(*given, **options), self._state_seconds()
            if whole is None:
                return [*events, sum(events), BACKWARD * sum(events), state, state]
            through = time_stage(*given, rehearsal, **options)
            return [*events, *whole, max(through - whole[0], 0.0), state]

        return timed(measure, self._watch, where=f"of microbatches of {samples}, turn {turn}")

    def chain(self, microbatch: Any, samples: int, rehearsal: Rehearsal, turns: Sequence[Sequence[float]]) -> Chain:
        """The chain for a microbatch of so many samples, from the shortest of each measured time."""
        *events, forward, backward, passing, state = (min(times) for times in zip(*turns, strict=True))
        events[-1] += max(forward - sum(events), 0.0)  # glue: most of it is the loss
        profile = dry_run(self._model, microbatch, self._fn, speed=_ANY_SPEED) if self._counts_bytes else None
        return chain_of(
            self._model,
            rehearsal,
            events,
            samples=samples,
            backward=backward / forward if forward else BACKWARD,
            profile=profile,
            input_bytes=sum(tensor.nbytes for tensor in tensors_in(microbatch)),
            overheads=Overheads(passing=passing, recomputing=_STATES_AGAIN * state),
        )

    def _state_seconds(self) -> float:
        """Of a copy of the modules' state."""
        found = []
        for _ in range(_TIMES):
            begin = time.perf_counter()
            ModuleState.now([self._model]).copied(apart=is_absent)
            found.append(time.perf_counter() - begin)
        return min(found)

    def link(self, world: int) -> tuple[float, float]:
        """Bytes a second between ranks, each way, and seconds of a short message: by means as replicas make them."""
        if world == 1:
            return math.inf, 0.0
        place = self._device if dist.get_backend() == "nccl" else torch.device("cpu")
        large, small = (torch.zeros(size, device=place) for size in (_SUMMED, 1))
        self._watch.meet("before the links are measured")
        sums, latency = _fastest_mean(large), _fastest_mean(small)
        found = self.common("to plan messages", [sums, latency])
        return 2 * (world - 1) / world * large.nbytes / max(found[0] - found[1], 1e-9), found[1]

    def common(self, where: str, numbers: Sequence[float]) -> list[float]:
        """The first rank's numbers."""
        found: list[float] = self._watch.meet(where, list(numbers))[0]
        return found


def _fastest_mean(values: torch.Tensor) -> float:
    found = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        (mean,) = ordered_means([values])
        mean.sum().item()  # waits for a GPU, too
        found.append(time.perf_counter() - begin)
    return min(found)
