"""Loads a checkpoint into a pipeline: all ranks check that they can load it, then each reads its own tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hydra_ext.checkpoint import choosing, loading, model_state
from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.checkpoint.format.header import is_count
from hydra_ext.checkpoint.format.reader import Reader
from hydra_ext.checkpoint.format.values import BadValue, decode
from hydra_ext.checkpoint.helper_state import Stateful
from hydra_ext.checkpoint.loader_states import SavedLoader
from hydra_ext.checkpoint.loading import Loaded
from hydra_ext.checkpoint.saved_state import SavedState, decoded
from hydra_ext.errors import CheckpointError
from hydra_ext.pipeline.checkpoint.holdings import Holdings
from hydra_ext.pipeline.checkpoint.saving import agree
from hydra_ext.pipeline.checkpoint.stage_optimizers import StageState
from hydra_ext.pipeline.engine import Engine, Progress
from hydra_ext.pipeline.microbatches import OwnStage
from hydra_ext.pipeline.ranks.together import Together
from hydra_ext.pipeline.updates import Update

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_WHAT = "to load a checkpoint"


@dataclass(frozen=True)
class Helpers:
    """What is loaded beside this rank's stages: schedulers of its optimizers, and what gives its data, if it does."""

    schedules: Sequence[Stateful]
    loader: Stateful | None


def load(
    engine: Engine, together: Together, path: Path, given: Helpers, *, strict: bool, files: Files
) -> Loaded | None:
    """Loads the newest checkpoint. All ranks have to call it, when no microbatch or update is under way.

    Returns:
        What was loaded; None if there is no checkpoint.

    Raises:
        RankFailed: Another rank has failed.
        Exception: See :meth:`hydra_ext.Pipeline.load`.
    """
    agreed: list[Holdings] = []
    restored: list[Restored] = []

    def hold(reader: Reader) -> None:
        restored[:] = [Restored(engine, agreed[-1], reader, given)]
        restored[0].hold()

    with choosing.newest(
        path,
        files,
        hold,
        strict=strict,
        everywhere=partial(_sound, together),
        before_holding=lambda: agreed.append(agree(engine, together, _WHAT)),
        rank=together.rank,
    ) as reader:
        if reader is None:
            logger.info("there is no checkpoint in %s: the training begins at step %d", path, engine.batches)
            return None
        differences = [line for lines in _sound(together, lambda: restored[0].differences) for line in lines]
        loading.expect_none(reader, list(dict.fromkeys(differences)))
        _sound(together, restored[0].check)
        together.do(_WHAT, restored[0].put)
        return loading.loaded(reader)


def _sound(together: Together, work: Callable[[], Result]) -> list[Result]:
    """Runs ``work`` as :meth:`Together.do` does. A checkpoint that one rank finds damaged is damaged for all.

    Raises:
        CheckpointError: A rank has found the checkpoint damaged. All ranks raise the error of the first such rank.
    """
    own: list[CheckpointError] = []

    def looked() -> dict[str, Any]:
        try:
            return {"result": work()}
        except CheckpointError as error:
            own.append(error)
            return {"fault": [str(error), str(error.file), error.tensor]}

    answers = together.do(_WHAT, looked)
    rank = next((rank for rank, answer in enumerate(answers) if "fault" in answer), None)
    if rank is None:
        return [answer["result"] for answer in answers]
    if rank == together.rank:
        raise own[0]
    message, file, tensor = answers[rank]["fault"]
    raise CheckpointError(f"{message} (found by rank {rank})", file=Path(file), tensor=tensor)


class Restored:
    """A checkpoint that was compared with this rank's part of the pipeline, and is not loaded into it yet.

    Attributes:
        differences: Differences between the checkpoint and this rank's part, a line each.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """

    def __init__(self, engine: Engine, holdings: Holdings, reader: Reader, given: Helpers) -> None:
        self._engine = engine
        self._holdings = holdings
        self._reader = reader
        trains = any(stage.optimizer is not None for stage in engine.assembly.stages)
        schedules: list[Stateful | None] = [*given.schedules] or [None] * trains
        topology = engine.topology
        with decoded(reader):
            self._saved = SavedState(reader, holdings.named, {"schedule": schedules, "scaler": [None]})
            self._loader = SavedLoader(
                reader, given.loader, rank=topology.rank, ranks=topology.world, replicas=topology.replicas
            )
            if not isinstance(self._saved.content.get("versions", {}), dict):
                raise BadValue("the older versions of the weights are no table")
            self._progress = self._saved_progress()
            self._optimizers = self._stage_states()
            self.differences = self._differences()
            self._saved.choose(rank=topology.rank, replica=topology.replica)

    # ---- looking at it ----------------------------------------------------------------------------------------------

    def _stage_states(self) -> list[StageState]:
        names, saved = self._holdings.name_of, self._saved.content.get("optimizer")
        read = partial(self._reader.read, "optimizer")
        return [
            StageState(s.optimizer, names, saved, read) for s in self._engine.assembly.stages if s.optimizer is not None
        ]

    def _differences(self) -> list[str]:
        manifest, holdings, saved = self._reader.manifest, self._holdings, self._saved.content.get("optimizer")
        lines = model_state.differences_of_some(holdings.named, manifest)
        lines += model_state.differences_of_names(holdings.names, holdings.ties, manifest)
        for state in self._optimizers:
            lines += state.differences
        trained = {name for state in self._optimizers for name in state.names}
        for name in sorted((saved or {"state": {}})["state"].keys() & holdings.own.keys() - trained):
            lines.append(f"{name!r} was trained, and is in no optimizer now")
        lines += self._saved.helper_differences() + self._loader.differences
        for stage in self._engine.assembly.stages:
            lines += self._differing_versions(stage)
        return lines

    def _saved_progress(self) -> Progress:
        """The saved progress. A run that is no pipeline has none: then each of its steps counts as a batch."""
        step, saved = self._reader.manifest.step, self._saved.content.get("pipeline")
        if saved is None:
            return Progress(step, 0, self._engine.progress.seed, [])
        try:
            counts = {name: saved[name] for name in ("batches", "evaluations", "seed")}
            updates = [Update(**decode(update, self._saved.stand_in)) for update in saved["updates"]]
        except (KeyError, TypeError) as error:
            raise BadValue(f"the training's progress cannot be read: {error!r:.200}") from error
        are_counts = all(is_count(count) for count in (*counts.values(), *(update.batch for update in updates)))
        are_norms = all(update.norm is None or isinstance(update.norm, float) for update in updates)
        if counts["batches"] != step or not are_counts or not are_norms:
            raise BadValue("the training's progress has impossible numbers")
        return Progress(**counts, updates=updates)

    def _older(self, name: str) -> list[Any]:
        """The saved references to a parameter's older versions, the latest first."""
        older = self._saved.content.get("versions", {}).get(name, [])
        if not isinstance(older, list):
            raise BadValue(f"the older versions of {name!r:.200} are no list")
        return older

    def _differing_versions(self, stage: OwnStage) -> list[str]:
        needed = self._engine.delay_of(stage.index, self._progress.batches)
        for name, parameter in self._trained(stage):
            older = self._older(name)
            if len(older) != needed:
                return [
                    f"the step after the checkpoint uses weights of {name!r:.200} that are {len(older)} steps old "
                    f"while this pipeline's schedule uses weights that are {needed} steps old (give the schedule= and "
                    "cuts= of the saved run, since chosen cuts depend on times; or load only the newest weights, with "
                    "hydra_ext.load_model, before you make the pipeline)"
                ]
            for age, each in enumerate(older, 1):
                if each is not None:
                    self._saved.stored(each, parameter, f"an older version of {name!r:.200}", f"{age} before/{name}")
        return []

    def _trained(self, stage: OwnStage) -> list[tuple[str, Tensor]]:
        names = self._holdings.name_of
        return [(names[id(parameter)], parameter) for _, parameter in stage.weights.parameters]

    def hold(self) -> None:
        """Opens the files that this rank will read.

        Raises:
            CheckpointRemoved: The checkpoint was removed.
            TooManyFiles: The process cannot open so many files.
        """
        self._reader.hold(manifests.SECTIONS, self._only())

    def check(self) -> None:
        """Reads every byte that this rank will load, and checks that its optimizers can use the saved state.

        Raises:
            CheckpointError: The checkpoint is damaged.
        """
        with decoded(self._reader):
            for state in self._optimizers:
                state.check(partial(self._reader.described, "optimizer"))
        self._reader.check(manifests.SECTIONS, self._only())

    def _only(self) -> dict[str, Collection[str]]:
        optimizer = {name for state in self._optimizers for name in state.tensors}
        return {"model": self._holdings.own.keys(), "optimizer": optimizer, "training": self._saved.wanted}

    # ---- taking it --------------------------------------------------------------------------------------------------

    def put(self) -> None:
        """Loads the checkpoint into this rank's part of the pipeline.

        Raises:
            CheckpointError: A file has changed since :meth:`check`; the training is partly loaded.
        """
        parameters = [parameter for part in self._engine.assembly.parts.own for _, parameter in part.parameters]
        self._loader.restore()
        self._saved.put(self._put_optimizers, parameters, self._engine.device)
        self._engine.resume(self._progress)

    def _put_optimizers(self) -> None:
        for stage in self._engine.assembly.stages:
            self._put_versions(stage)
        for state in self._optimizers:
            state.restore()

    def _put_versions(self, stage: OwnStage) -> None:
        older = [self._older(name) for name, _ in self._trained(stage)]

        def weights(age: int) -> Callable[[int], Tensor | None]:
            def of(index: int) -> Tensor | None:
                reference = older[index][age]
                return None if reference is None else self._saved.read(reference["name"])

            return of

        count = self._engine.delay_of(stage.index, self._progress.batches) if older else 0
        same = [all(each[age] is None for each in older) for age in range(count)]
        stage.weights.restore(self._progress.batches, [None if same[age] else weights(age) for age in range(count)])
