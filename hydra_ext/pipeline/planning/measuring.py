"""A model's chain of blocks as this machine computes it, for each size of microbatches that a plan may take.

All ranks make the same calls of ``fn``. The first rank's times count, so that all ranks plan alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hydra_ext.pipeline.ranks.watch import Watch
from hydra_ext.pipeline.stages.splitting import compare, timed
from hydra_ext.plan.pipelines.chains import Chain
from hydra_ext.profile import dry_run
from hydra_ext.profile.cards import Speed
from hydra_ext.split import Rehearsal, rehearse, time_events
from hydra_ext.split.chains import chain_of
from hydra_ext.state.arguments import tensors_in

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

    def chain(self, microbatch: Any, samples: int, rehearsal: Rehearsal) -> Chain:
        """The chain for a microbatch of so many samples."""

        def measure() -> list[float]:
            return time_events(self._model, self._fn, microbatch, rehearsal, seed=self._seed, device=self._device)

        seconds = timed(measure, self._watch, where=f"of microbatches of {samples}")
        profile = dry_run(self._model, microbatch, self._fn, speed=_ANY_SPEED) if self._counts_bytes else None
        return chain_of(
            self._model,
            rehearsal,
            seconds,
            samples=samples,
            profile=profile,
            input_bytes=sum(tensor.nbytes for tensor in tensors_in(microbatch)),
        )

    def common(self, where: str, numbers: Sequence[float]) -> list[float]:
        """The first rank's numbers."""
        found: list[float] = self._watch.meet(where, list(numbers))[0]
        return found
