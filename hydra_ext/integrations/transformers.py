"""transformers' ``Trainer`` for models bigger than the GPU."""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.activations.choice import PlannedChoice
from hydra_ext.errors import InvalidArgument
from hydra_ext.integrations.logs import logged
from hydra_ext.integrations.versions import expect_version
from hydra_ext.offload import offload
from hydra_ext.policy import SimulatedDevice
from hydra_ext.runtime.placement import devices
from hydra_ext.runtime.reporting.figures import StepFigures
from hydra_ext.runtime.run import Run
from hydra_ext.state.randomness import generators

expect_version("transformers", "4.56", what="hydra_ext.integrations.transformers")

from transformers import Trainer

from hydra_ext.integrations import accelerate

logger = logging.getLogger(__name__)

_OWN = ("checkpoints", "rounds", "others")  # of the arguments
_CHECKPOINTS = "hydra_ext"  # folder in each checkpoint of the Trainer
# Optimizers whose steps are made in backward, or whose state is of a kind that only a GPU has.
_REFUSED_OPTIMIZERS = ("8bit", "4bit", "bnb", "paged", "lomo", "layerwise")


@dataclass(frozen=True, kw_only=True)
class HydraArguments:
    """How a Trainer's model is offloaded.

    Attributes:
        budget: As of :class:`hydra_ext.offload`.
        device: As there, and so are the next three.
        host_budget: Bytes, or None.
        spill_dir: Folder, or None.
        activations: ``"auto"``, or a policy.
        checkpoints: Whether the Trainer's checkpoints hold weights, optimizer, schedule and random states as
            :meth:`hydra_ext.Run.save` writes them, durable and verified on loading. They lie beside the model that the
            Trainer saves. By default the optimizer is saved as by transformers.
        rounds: Whether ``gradient_accumulation_steps`` run in rounds, as :meth:`hydra_ext.Run.step` makes them: a block
            moves once for all of them. None takes rounds if a step draws no random numbers, so that it has the bits of
            the plain Trainer. With True a microbatch that draws, such as in dropout, has a seed of its own.
        others: Other arguments of :class:`hydra_ext.offload`, such as ``{"param_dtype": torch.bfloat16}``.
    """

    budget: int | str
    device: SimulatedDevice | devices.PlaceMaker | devices.Place | torch.device | str | None = None
    host_budget: int | str | None = None
    spill_dir: str | os.PathLike[str] | None = None
    activations: PlannedChoice | None = "auto"
    checkpoints: bool = False
    rounds: bool | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def for_offload(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _OWN}
        return {**own, **self.others}


class HydraMixin:
    """Makes any subclass of ``Trainer`` train its model inside :class:`hydra_ext.offload`.

    ``class HydraSFTTrainer(HydraMixin, SFTTrainer): pass`` is trl's SFTTrainer with one more argument, ``hydra=``. The
    model stays on the host. Training has a context of its own, from the creation of the optimizer to the end of
    ``train()``; ``evaluate()`` and ``predict()`` outside of it have one, too. Losses, gradients and weights are those
    of the plain Trainer, bit for bit. With several ranks under torchrun, gradients are averaged without
    ``DistributedDataParallel``. What is logged has figures of the last step beside the Trainer's own, as
    ``hydra/seconds``.

    Attributes:
        hydra: How the model is offloaded.
        run: The run of the context, or of the last one, for its report; None before the first.

    Raises:
        InvalidArgument: FSDP, DeepSpeed, evaluation in another dtype, or an optimizer that steps in backward or keeps
            its state on a GPU is configured as well; or the Trainer works on another kind of device.
    """

    # What a Trainer has; it is the other base.
    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, *args: Any, hydra: HydraArguments, **kwargs: Any) -> None:
        self.hydra = hydra
        self.run: Run | None = None
        self._training: ExitStack | None = None  # while train() runs
        self._figures: StepFigures | None = None
        self._weights: str | None = None  # checkpoint whose weights are read when the parameters have memory
        self._microbatches: list[Any] = []  # of the step
        self._losses = deque[Tensor]()  # of those that have run and are to be told
        self._draws: bool | None = None  # whether microbatches draw random numbers; None until one was watched
        self._in_rounds = False  # this step
        super().__init__(*args, **kwargs)
        _expect_compatible(self.args)
        if hydra.rounds and self._is_overridden():
            raise InvalidArgument(
                f"rounds=True of the HydraArguments, and {type(self).__name__} has a training_step() or "
                "get_batch_samples() above HydraMixin's, which a round would not call: put it into a class below, as "
                "in class Mine(HydraMixin, TrainerWithMyStep)"
            )
        if self.args.n_gpu > 1:  # the others have ranks of their own, under torchrun
            self.args._n_gpu = 1
            self._train_batch_size = self.args.train_batch_size

    # ---- the model stays on the host --------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerate.adopt(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing is moved: the context brings weights to the device."""

    # ---- its context ------------------------------------------------------------------------------------------------

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            self._training = stack
            try:
                return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
            finally:
                self._training = None

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Called when the optimizer has been made, and nothing has been prepared yet."""
        if training and self._training is not None:
            self._training.enter_context(self._offloaded(self.optimizer))
        return super()._wrap_model(model, training=training, dataloader=dataloader)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._offloaded(None):
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _offloaded(self, optimizer: Any) -> Iterator[None]:
        """Has no effect inside itself."""
        if self.run is not None and not self.run.closed:
            yield
            return
        with offload(self.model, optimizer, **self.hydra.for_offload()) as run:
            _expect_device(run.device, self.args.device)
            if optimizer is not None:
                run.on_step(self._note)
            self.run = run
            yield

    # ---- steps ------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Called once for each step."""
        self._microbatches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        asked = self.hydra.rounds is True or (self.hydra.rounds is None and self._draws is False)
        self._in_rounds = asked and len(self._microbatches) > 1 and not self._is_overridden()
        self._losses.clear()
        self.accelerator.defers_averaging = not self._in_rounds
        return self._microbatches, items

    def _is_overridden(self) -> bool:
        """Whether the class of an object, or the object, has steps of its own, which know one microbatch at a time."""
        names = ("training_step", "get_batch_samples")
        return any(name in vars(self) or getattr(type(self), name) is not vars(HydraMixin)[name] for name in names)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """One microbatch; in rounds, the first one makes all of the step."""
        plain = super().training_step  # type: ignore[misc]
        if not self._in_rounds or self.run is None:
            with self._watched():
                return plain(model, inputs, *args, **kwargs)  # type: ignore[no-any-return]
        if not self._losses:

            def loss_of(microbatch: Any) -> tuple[Tensor, Tensor]:
                with self.accelerator.taking_losses() as taken, self._watched():
                    told = plain(model, microbatch, *args, **kwargs)
                return taken[0], told

            # Not of the global generator, from which samplers and collators draw.
            seeds = torch.Generator().manual_seed(self.args.seed + self.state.global_step)
            output = self.run.step(
                self._microbatches,
                loss_of,
                reduction="sum",
                scaler=self.accelerator.scaler,
                seeds=torch.randint(2**62, (len(self._microbatches),), generator=seeds).tolist(),
                update=False,
            )
            self._losses.extend(output.metrics)
        return self._losses.popleft()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes whether random numbers are drawn, in which case a step in rounds is not that of the plain Trainer."""
        sources = [] if self.run is None else generators(self.run.device)
        states = [each.get_state() for each in sources]
        yield
        draws = any(not torch.equal(old, each.get_state()) for old, each in zip(states, sources, strict=True))
        if draws and self._in_rounds and self.hydra.rounds is None and not self._draws:
            logger.warning(
                "microbatches draw random numbers from now on: in this step each has a seed of its own, unlike in a "
                "plain Trainer; later steps run without rounds. HydraArguments(rounds=True) or rounds=False says which"
            )
        self._draws = bool(self._draws) or draws

    # ---- figures and checkpoints ------------------------------------------------------------------------------------

    def _note(self, figures: StepFigures) -> None:
        self._figures = figures

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._figures is not None and "loss" in logs:
            logs |= logged(self._figures)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """What an earlier training has saved there is of another kind, or of other weights."""
        if self.args.should_save:
            shutil.rmtree(Path(output_dir) / _CHECKPOINTS, ignore_errors=True)
            for name in ("optimizer.pt", "scheduler.pt"):
                (Path(output_dir) / name).unlink(missing_ok=True)
        if self.run is not None and not self.run.closed and self.hydra.checkpoints:
            self.run.save(Path(output_dir) / _CHECKPOINTS, schedule=self.lr_scheduler)
        else:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Called before there is a context: parameters on meta have no memory for what is loaded."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            self._weights = resume_from_checkpoint
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        weights, self._weights = self._weights, None
        if weights is not None:
            super()._load_from_checkpoint(weights)  # type: ignore[misc]
        if checkpoint is not None and self.run is not None and (folder := Path(checkpoint) / _CHECKPOINTS).exists():
            self.run.load(folder, schedule=self.lr_scheduler)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


class HydraTrainer(HydraMixin, Trainer):
    """transformers' ``Trainer`` with one more argument: ``HydraTrainer(..., hydra=HydraArguments(budget="8GiB"))``."""


def _expect_compatible(args: Any) -> None:
    sharding = [name for name in ("fsdp", "deepspeed") if getattr(args, name, None)]
    if sharding:
        raise InvalidArgument(
            f"{sharding[0]}= of the TrainingArguments moves weights itself, as hydra= does: leave out one of them"
        )
    evaluated = [name for name in ("fp16_full_eval", "bf16_full_eval") if getattr(args, name, False)]
    if evaluated:
        raise InvalidArgument(
            f"{evaluated[0]}=True of the TrainingArguments would make new weights: give "
            "HydraArguments(others={'param_dtype': torch.bfloat16}), or autocast with bf16=True"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(part in optimizer for part in _REFUSED_OPTIMIZERS):
        raise InvalidArgument(
            f"optim={optimizer!r} of the TrainingArguments steps in backward, or keeps its state on a GPU: inside "
            "offload, state is on the host. Give optim='adamw_torch', or "
            "optimizer_cls_and_kwargs=(hydra_ext.optim.AdamW, {'lr': ...})"
        )


def _expect_device(found: torch.device, trained_on: torch.device) -> None:
    if found.type != trained_on.type:
        what = "use_cpu=True" if found.type == "cpu" else "use_cpu=False"
        raise InvalidArgument(
            f"the model is offloaded from {found}, and the Trainer works on {trained_on}: give {what} in the "
            "TrainingArguments, or another device= in the HydraArguments"
        )
