"""The parts that a model is cut into: what every rank knows of all stages, and what this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hydra_ext.errors import InvalidArgument, UnsupportedModel
from hydra_ext.pipeline.stages.chain import ChainStage
from hydra_ext.split import Rehearsal
from hydra_ext.split.stage_program import StageProgram

StageModule = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Part:
    """One stage that this rank holds.

    Attributes:
        modules: The modules that hold the stage's parameters.
        parameters: Names and parameters of the stage, each parameter once.
        around: Wraps the outermost program: the stage's own, or one that the pipeline has put around it. None for no
            wrapper.
    """

    stage: int
    program: StageProgram
    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    around: Callable[[StageProgram], StageProgram] | None = None

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.parameters if parameter.requires_grad]


@dataclass(frozen=True)
class Parts:
    """All stages of a pipeline, as this rank knows them.

    Attributes:
        own: The stages of this rank.
        shared: For each weight that several stages train, its index among each stage's trained parameters, by stage.
            All ranks have the same weights in the same order. The index may be None for another rank's stage.
        orders: For every stage, the places of its trained parameters among the model's parameters; -1 for one that an
            earlier stage counts. None if the ranks have to exchange them.
        rehearsal: The rehearsal by which a plain module was cut; None for explicit stages.
        common: For each parameter (trained or not), buffer or other tensor that several stages hold, this rank's
            tensors by stage; None for another rank's stage. All ranks have them in the same order.
        elsewhere: Names of buffers that the forward changes and that only another rank keeps up to date.
        model: The model that was cut; None for explicit stages.
    """

    own: tuple[Part, ...]
    shared: tuple[dict[int, int | None], ...] = field(default=())
    orders: dict[int, tuple[int, ...]] | None = None
    rehearsal: Rehearsal | None = None
    common: tuple[dict[int, Tensor | None], ...] = field(default=())
    elsewhere: frozenset[str] = frozenset()
    model: nn.Module | None = None


def explicit_parts(modules: Sequence[StageModule], stages: Sequence[int], device: torch.device) -> Parts:
    """Makes the parts of stages that were given as modules, or as functions that build them.

    Only this rank's stages are built and moved.

    Args:
        modules: All stages.
        stages: Numbers of this rank's stages.
        device: Where this rank's parameters are to be.

    Raises:
        InvalidArgument: A stage is no module, and does not build one.
        UnsupportedModel: A parameter or a buffer is on meta. Or a weight is in two stages of one rank. Or a module that
            gathers statistics is in two stages.
    """
    own = []
    several = _held_by_several(modules)
    for stage in stages:
        given = modules[stage]
        module = given if isinstance(given, nn.Module) or not callable(given) else given()
        if not isinstance(module, nn.Module):
            raise InvalidArgument(
                f"stages[{stage}] is a {type(given).__name__} and gave a {type(module).__name__}: give modules, or "
                "functions without arguments that build them"
            )
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_meta:
                raise UnsupportedModel(f"'{name}' of stages[{stage}] is on meta: give the stage real parameters")
        module.to(device)
        program = ChainStage(module, index=stage, last=stage == len(modules) - 1)
        named = tuple((f"{stage}.{name}", parameter) for name, parameter in module.named_parameters())
        own.append(Part(stage, program, (module,), named))
    _refuse_weights_twice_here(own)
    built = {part.stage: module for part in own for module in part.modules}
    known = {stage: each for stage, each in enumerate(modules) if isinstance(each, nn.Module)}
    _refuse_shared_statistics({**known, **built})
    here = {
        part.stage: {**dict(part.modules[0].named_parameters()), **dict(part.modules[0].named_buffers())}
        for part in own
    }
    common = tuple(
        {stage: here[stage][name] if stage in here else None for stage, name in held.items()} for held in several
    )
    return Parts(tuple(own), _shared(modules, own), common=common)


def _held_by_several(modules: Sequence[StageModule]) -> list[dict[int, str]]:
    """The names, by stage, of each parameter and buffer that several of the modules hold."""
    names: dict[Tensor, dict[int, str]] = {}
    for stage, module in enumerate(modules):
        if isinstance(module, nn.Module):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                names.setdefault(tensor, {})[stage] = name
    return [held for held in names.values() if len(held) > 1]


def _refuse_weights_twice_here(own: Sequence[Part]) -> None:
    """Refuses a weight in two stages of one rank. Each stage has an optimizer of its own: both would update it."""
    users: dict[nn.Parameter, tuple[int, str]] = {}
    for part in own:
        for name, parameter in part.trained:
            stage, other = users.setdefault(parameter, (part.stage, name))
            if stage != part.stage:
                raise UnsupportedModel(
                    f"'{other}' and '{name}' are one weight, and the stages {[stage, part.stage]} are on one rank: put "
                    "both uses into one stage, give each stage a weight of its own, or use as many ranks as stages"
                )


def _refuse_shared_statistics(stages: dict[int, nn.Module]) -> None:
    """Refuses a module that gathers statistics in two stages.

    On one rank it would gather them in another order than that of the microbatches. On two ranks each would gather only
    a part.
    """
    users: dict[nn.Module, tuple[int, str]] = {}
    for stage, root in stages.items():
        for name, module in root.named_modules():
            if isinstance(module, _NormBase) and module.running_mean is not None:
                first, other = users.setdefault(module, (stage, name))
                if first != stage:
                    raise UnsupportedModel(
                        f"'{first}.{other}' and '{stage}.{name}' are one {type(module).__name__} in two stages, which "
                        "gathers statistics over the calls of both: put both uses into one stage, or give each stage "
                        "its own"
                    )


def _shared(modules: Sequence[StageModule], own: Sequence[Part]) -> tuple[dict[int, int | None], ...]:
    """The shared weights of stages that were given as modules. A function's module is not known on other ranks."""
    users: dict[nn.Parameter, dict[int, int | None]] = {}
    for stage, module in enumerate(modules):
        if isinstance(module, nn.Module):
            for parameter in module.parameters():
                if parameter.requires_grad:
                    users.setdefault(parameter, {})[stage] = None
    several = {parameter: stages for parameter, stages in users.items() if len(stages) > 1}
    for part in own:
        for index, (_, parameter) in enumerate(part.trained):
            if parameter in several:
                several[parameter][part.stage] = index
    return tuple(several.values())
