"""accelerate's ``Accelerator`` for models inside :func:`hydra_ext.offload`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.integrations.versions import expect_version
from hydra_ext.runtime import root
from hydra_ext.runtime.run import Run

expect_version("accelerate", "1.1", what="hydra_ext.integrations.accelerate")

import accelerate
from accelerate.utils import DistributedType

_SHARDING = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class Accelerator(accelerate.Accelerator):
    """An ``Accelerator`` that leaves models on the host. Everything else is as in accelerate.

    ``prepare`` takes models before or inside :func:`hydra_ext.offload`. They stay on the host and get no
    ``DistributedDataParallel``: the offload context brings weights to the device, and averages gradients over the ranks
    of the process group. ``accumulate`` and ``no_sync`` defer that, as with ``DistributedDataParallel``. With several
    ranks, make the Accelerator before the context, so that there is a process group.

    A model with ``device_placement=True`` in ``prepare`` is treated as accelerate does.

    Raises:
        InvalidArgument: FSDP, DeepSpeed or Megatron is configured, which move weights themselves.
    """

    defers_averaging = True  # otherwise no_sync() has no effect, because a step averages in its last microbatch
    _taking: threading.local

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(self)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As accelerate's, for a model that is or will be inside an offload context.

        Raises:
            StateError: There are several ranks, and the model's offload context began before there was a process group.
        """
        if device_placement:
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return prepared
        _expect_group(self, model)
        prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As accelerate's.

        Raises:
            StateError: There are several ranks, and a prepared model is outside an offload context, where no gradients
                are averaged.
        """
        taken: list[Tensor] | None = getattr(self._taking, "losses", None)
        if taken is not None:
            taken.append(loss / self.gradient_accumulation_steps)
            return
        if self.use_distributed:
            for model in self._models:
                _expect_averaged(self, model)
        super().backward(loss, **kwargs)

    @contextmanager
    def taking_losses(self) -> Iterator[list[Tensor]]:
        """A context in which ``backward`` appends this thread's losses to the list, and does nothing else."""
        self._taking.losses = []
        try:
            yield self._taking.losses
        finally:
            self._taking.losses = None

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As accelerate's: backwards inside accumulate this rank's own gradients."""
        run = _run_of(model)
        if not self.defers_averaging:
            yield
            return
        with super().no_sync(model) if run is None else run.no_sync():
            yield


def adopt(accelerator: accelerate.Accelerator) -> None:
    """Gives an ``Accelerator`` that another library has made the methods of ours.

    Raises:
        InvalidArgument: as :class:`Accelerator`.
    """
    if accelerator.distributed_type in _SHARDING:
        raise InvalidArgument(
            f"accelerate is configured for {accelerator.distributed_type.value}, which moves weights itself, as "
            "hydra_ext.offload() does: choose one of them. For offload, start the program with torchrun, or with "
            "accelerate launch --multi_gpu, and without a configuration of the other"
        )
    accelerator.__class__ = Accelerator
    accelerator._taking = threading.local()


def _expect_group(accelerator: accelerate.Accelerator, model: nn.Module) -> None:
    run = _run_of(model)
    if accelerator.use_distributed and run is not None and run.replicas is None:
        raise StateError(
            f"there are {accelerator.num_processes} ranks, and this model's offload context has none beside its own: "
            "make the Accelerator before the context, or initialise torch.distributed, and give no process_group=False"
        )


def _expect_averaged(accelerator: accelerate.Accelerator, model: nn.Module) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel) or not any(p.requires_grad for p in model.parameters()):
        return
    if _run_of(model) is None:
        raise StateError(
            f"there are {accelerator.num_processes} ranks, and nothing averages the gradients of a "
            f"{type(model).__name__}: call backward inside hydra_ext.offload(model, optimizer, budget=...), or prepare "
            "the model with device_placement=True"
        )
    _expect_group(accelerator, model)


def _run_of(model: nn.Module) -> Run | None:
    context = root.context_of(accelerate.utils.extract_model_from_parallel(model))
    return context if isinstance(context, Run) else None
