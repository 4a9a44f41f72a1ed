"""A strategy of Lightning for modules bigger than the GPU.

Fabric needs none: offload what ``fabric.setup(module, optimizer, move_to_device=False)`` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from hydra_ext.errors import InvalidArgument
from hydra_ext.integrations.logs import logged
from hydra_ext.integrations.versions import expect_version
from hydra_ext.offload import offload
from hydra_ext.runtime.reporting.figures import StepFigures
from hydra_ext.runtime.run import Run

expect_version("lightning", "2.4", what="hydra_ext.integrations.lightning")

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn


class OffloadStrategy(SingleDeviceStrategy):
    """``Trainer(strategy=OffloadStrategy(budget="8GiB"), devices=1)`` trains its module inside offload.

    The module stays on the host. Each of ``fit``, ``validate``, ``test`` and ``predict`` has a context of its own. It
    begins when the optimizer has been made. Losses, gradients and weights are those of Lightning on one device, bit for
    bit. Loggers get figures of the last step, as ``hydra/seconds``.

    Args:
        budget: As of :class:`hydra_ext.offload`.
        device: As of :class:`hydra_ext.offload`; it has to be of the Trainer's ``accelerator=``.
        options: Other arguments of :class:`hydra_ext.offload`.

    Attributes:
        run: The run of the context, or of the last one, for its report; None before the first.

    Raises:
        InvalidArgument: On setting up: the module has several optimizers.
    """

    def __init__(self, *, budget: int | str, device: Any = None, **options: Any) -> None:
        has_gpu = torch.cuda.is_available() if device is None else str(device).startswith("cuda")
        super().__init__(device=torch.device("cuda" if device is None else str(device)) if has_gpu else "cpu")
        self._options: Mapping[str, Any] = {"budget": budget, "device": device, **options}
        self._context = ExitStack()
        self.run: Run | None = None

    def model_to_device(self) -> None:
        """Nothing is moved: the context brings weights to the device."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and len(self.optimizers) != 1:
            raise InvalidArgument(
                f"{type(self.lightning_module).__name__}.configure_optimizers() makes {len(self.optimizers)} "
                "optimizers, and an offload context has one: give each network a context in a loop of your own"
            )
        run = self._context.enter_context(
            offload(self.lightning_module, self.optimizers[0] if fits else None, **self._options)
        )
        if fits:
            run.on_step(lambda figures: _log(trainer, figures))
        self.run = run

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The state is on the host, where the parameters are."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        self._context.close()
        super().teardown()


def _log(trainer: Trainer, figures: StepFigures) -> None:
    if trainer.global_step % trainer.log_every_n_steps == 0:
        for logger in trainer.loggers:
            logger.log_metrics(logged(figures), step=trainer.global_step)
