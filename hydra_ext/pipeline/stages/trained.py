"""The parameters that a rank trains: they are fixed when the pipeline begins."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hydra_ext.errors import StateError, UnsupportedModel
from hydra_ext.pipeline.stages.parts import Part
from hydra_ext.schedule import Schedule


class Trained:
    """Checks that the trained parameters stay those of the beginning.

    Versions, sums over ranks and updates are made for these parameters only.

    Raises:
        UnsupportedModel: A parameter with several versions has hooks.
    """

    def __init__(self, parts: Sequence[Part], schedule: Schedule) -> None:
        self._settled = [(name, each, each.requires_grad) for part in parts for name, each in part.parameters]
        self._versioned = [
            (name, each) for part in parts for name, each in part.trained if schedule.versions[part.stage] > 1
        ]
        self._refuse_hooks()

    def check(self) -> None:
        """
        Raises:
            StateError: A parameter was frozen, or made trainable, since the beginning.
            UnsupportedModel: A parameter with several versions has hooks.
        """
        for name, parameter, trained in self._settled:
            if parameter.requires_grad != trained:
                change = "frozen" if trained else "made trainable"
                raise StateError(
                    f"'{name}' was {change} after the pipeline began, which has made versions and an optimizer for "
                    "the parameters that were trained then: close it, and make a new one"
                )
        self._refuse_hooks()

    def _refuse_hooks(self) -> None:
        for name, parameter in self._versioned:
            if _has_hooks(parameter):
                raise UnsupportedModel(
                    f"'{name}' has hooks, which this schedule's versions of the weights would not run: remove them, or "
                    "use schedule='1f1b'"
                )


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
