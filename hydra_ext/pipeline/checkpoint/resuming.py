"""Loads a checkpoint into a pipeline: every rank reads what it holds, once all have found that they can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
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


def load(
    engine: Engine, together: Together, path: Path, *, strict: bool, schedules: Sequence[Stateful], files: Files
) -> Loaded | None:
    """All ranks have to, when nothing is under way.

    Raises:
        RankFailed: another rank has failed.
        Exception: see :meth:`hydra_ext.Pipeline.load`.
    """
    agreed: list[Holdings] = []
    restored: list[Restored] = []

    def hold(reader: Reader) -> None:
        restored[:] = [Restored(engine, agreed[-1], reader, schedules)]
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
    """As :meth:`Together.do`; but a checkpoint that one rank finds damaged is damaged for all.

    Raises:
        CheckpointError: it is.
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
    """A checkpoint that was compared with this rank's part, and not given to it yet.

    Attributes:
        differences: to what is here, a line each.

    Raises:
        CheckpointError: it is damaged.
    """

    def __init__(self, engine: Engine, holdings: Holdings, reader: Reader, schedules: Sequence[Stateful]) -> None:
        self._engine = engine
        self._holdings = holdings
        self._reader = reader
        trains = any(stage.optimizer is not None for stage in engine.assembly.stages)
        given: list[Stateful | None] = [*schedules] or [None] * trains
        with decoded(reader):
            self._saved = SavedState(reader, holdings.named, {"schedule": given, "scaler": [None]})
            if not isinstance(self._saved.content.get("versions", {}), dict):
                raise BadValue("older versions of the weights are no table")
            self._progress = self._saved_progress()
            self._optimizers = self._stage_states()
            self.differences = self._differences()
            self._saved.choose(rank=engine.topology.rank, replica=engine.topology.replica)

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
        lines += self._saved.helper_differences()
        for stage in self._engine.assembly.stages:
            lines += self._differing_versions(stage)
        return lines

    def _saved_progress(self) -> Progress:
        """Without one, of a run of another kind: as if each of its steps had been a batch."""
        step, saved = self._reader.manifest.step, self._saved.content.get("pipeline")
        if saved is None:
            return Progress(step, 0, self._engine.progress.seed, [])
        try:
            counts = {name: saved[name] for name in ("batches", "evaluations", "seed")}
            updates = [Update(**decode(update, self._saved.stand_in)) for update in saved["updates"]]
        except (KeyError, TypeError) as error:
            raise BadValue(f"how far the training had come cannot be read: {error!r:.200}") from error
        are_counts = all(is_count(count) for count in (*counts.values(), *(update.batch for update in updates)))
        are_norms = all(update.norm is None or isinstance(update.norm, float) for update in updates)
        if counts["batches"] != step or not are_counts or not are_norms:
            raise BadValue("how far the training had come is not said in numbers that can be")
        return Progress(**counts, updates=updates)

    def _older(self, name: str) -> list[Any]:
        """What is said of a parameter's older versions, the latest first."""
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
                    f"the step after it uses weights that are {len(older)} steps old for {name!r:.200}, and the "
                    f"schedule of this pipeline {needed} steps old ones (give the schedule and the cuts that it was "
                    "made with: cuts= too, since chosen cuts depend on times; or take the newest weights alone, by "
                    "hydra_ext.load_model before the pipeline is made)"
                ]
            for age, each in enumerate(older, 1):
                if each is not None:
                    self._saved.stored(each, parameter, f"an older version of {name!r:.200}", f"{age} before/{name}")
        return []

    def _trained(self, stage: OwnStage) -> list[tuple[str, Tensor]]:
        names = self._holdings.name_of
        return [(names[id(parameter)], parameter) for _, parameter in stage.weights.parameters]

    def hold(self) -> None:
        """Opens what will be read here.

        Raises:
            CheckpointRemoved: the checkpoint is no more.
            TooManyFiles: not so many files can be open.
        """
        self._reader.hold(manifests.SECTIONS, self._only())

    def check(self) -> None:
        """Reads every byte that will be wanted here, and sees that the optimizers can go on from it.

        Raises:
            CheckpointError: something is not as it was written.
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
        """
        Raises:
            CheckpointError: a file has changed since it was looked at; the training is partly loaded.
        """
        parameters = [parameter for part in self._engine.assembly.parts.own for _, parameter in part.parameters]
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
