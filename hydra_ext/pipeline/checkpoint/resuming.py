"""Loads a checkpoint into a pipeline: every rank reads what it holds, once all have found that they can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hydra_ext.checkpoint import choosing, helper_state, loading, model_state, optimizer_state
from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.checkpoint.format.header import is_count
from hydra_ext.checkpoint.format.reader import Reader
from hydra_ext.checkpoint.format.values import BadValue, decode
from hydra_ext.checkpoint.helper_state import Stateful
from hydra_ext.checkpoint.loading import Loaded
from hydra_ext.checkpoint.randomness import BadRandomness, Randomness
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
        self._schedules = schedules
        self._content: Mapping[str, Any] = reader.manifest.content
        self._wanted: set[str] = set()  # tensors of the training that will be read
        try:
            self._check_values()
            self._progress = self._saved_progress()
            self._optimizers = self._stage_states()
            self.differences = self._differences()
            self._random = self._own_randomness()
            self._buffers = self._own_buffers()
        except (BadValue, BadRandomness) as error:
            raise CheckpointError(f"{reader.path}: {error}", file=reader.path) from error

    # ---- looking at it ----------------------------------------------------------------------------------------------

    def _check_values(self) -> None:
        """Everything that is to be decoded can be."""
        content = self._content
        if content.get("optimizer") is not None:
            optimizer_state.check(content["optimizer"], lambda name: self._stand_in("optimizer", name))
        for name in ("schedule", "scaler"):
            helper_state.check(content.get(name), name, self._wanted_stand_in)
        if not all(isinstance(content.get(name), list) and content[name] for name in ("ranks", "buffers")):
            raise BadValue("what each rank had is no list")
        if not isinstance(content.get("versions", {}), dict):
            raise BadValue("older versions of the weights are no table")

    def _stage_states(self) -> list[StageState]:
        names, saved = self._holdings.name_of, self._content.get("optimizer")
        read = partial(self._read, "optimizer")
        return [StageState(s.optimizer, names, saved, read) for s in self._engine.stages if s.optimizer is not None]

    def _stand_in(self, section: str, name: str) -> Tensor:
        self._reader.manifest.tensors[section][name]  # KeyError where there is none
        return torch.empty(0, device="cpu")

    def _wanted_stand_in(self, name: str) -> Tensor:
        self._wanted.add(name)
        return self._stand_in("training", name)

    def _differences(self) -> list[str]:
        manifest, holdings, saved = self._reader.manifest, self._holdings, self._content.get("optimizer")
        lines = model_state.differences_of_some(holdings.named, manifest)
        lines += model_state.differences_of_names(holdings.names, holdings.ties, manifest)
        for state in self._optimizers:
            lines += state.differences
        trained = {name for state in self._optimizers for name in state.names}
        for name in sorted((saved or {"state": {}})["state"].keys() & holdings.own.keys() - trained):
            lines.append(f"{name!r} was trained, and is in no optimizer now")
        if self._optimizers:
            given: list[Stateful | None] = [*self._schedules] or [None]
            for schedule in given:
                lines += helper_state.differences(schedule, "schedule", self._content.get("schedule"))
        lines += helper_state.differences(None, "scaler", self._content.get("scaler"))
        for stage in self._engine.stages:
            lines += self._differing_versions(stage)
        return lines

    def _saved_progress(self) -> Progress:
        """Without one, of a run of another kind: as if each of its steps had been a batch."""
        step, saved = self._reader.manifest.step, self._content.get("pipeline")
        if saved is None:
            return Progress(step, 0, self._engine.progress.seed, [])
        try:
            counts = {name: saved[name] for name in ("batches", "evaluations", "seed")}
            updates = [Update(**decode(update, self._wanted_stand_in)) for update in saved["updates"]]
        except (KeyError, TypeError) as error:
            raise BadValue(f"how far the training had come cannot be read: {error!r:.200}") from error
        are_counts = all(is_count(count) for count in (*counts.values(), *(update.batch for update in updates)))
        are_norms = all(update.norm is None or isinstance(update.norm, float) for update in updates)
        if counts["batches"] != step or not are_counts or not are_norms:
            raise BadValue("how far the training had come is not said in numbers that can be")
        return Progress(**counts, updates=updates)

    def _older(self, name: str) -> list[Any]:
        """What is said of a parameter's older versions, the latest first."""
        older = self._content.get("versions", {}).get(name, [])
        if not isinstance(older, list):
            raise BadValue(f"the older versions of {name!r:.200} are no list")
        return older

    def _stored(self, reference: Any, like: Tensor, what: str, place: str | None = None) -> str:
        """The name of the tensor that a reference stands for."""
        if isinstance(decode(reference, self._wanted_stand_in, place), Tensor):
            name = str(reference["name"])
            if self._reader.manifest.tensors["training"][name].span.shape == tuple(like.shape):
                return name
        raise BadValue(f"{what} is no tensor of its shape")

    def _differing_versions(self, stage: OwnStage) -> list[str]:
        needed = self._engine.delay_of(stage.index, self._progress.batches)
        for name, parameter in self._trained(stage):
            older = self._older(name)
            if len(older) != needed:
                return [
                    f"the step after it uses weights that are {len(older)} steps old for {name!r:.200}, and the "
                    f"schedule of this pipeline {needed} steps old ones (with the schedule that it was made with it "
                    "goes on; with another one the newest weights can be taken alone: hydra_ext.load_model before the "
                    "pipeline is made)"
                ]
            for age, each in enumerate(older, 1):
                if each is not None:
                    self._stored(each, parameter, f"an older version of {name!r:.200}", f"{age} before/{name}")
        return []

    def _trained(self, stage: OwnStage) -> list[tuple[str, Tensor]]:
        names = self._holdings.name_of
        return [(names[id(parameter)], parameter) for _, parameter in stage.weights.parameters]

    def _own_randomness(self) -> Randomness | None:
        ranks, rank = self._content["ranks"], self._engine.topology.rank
        return Randomness.of(ranks[rank]) if rank < len(ranks) else None

    def _own_buffers(self) -> dict[str, str]:
        """Those of this replica that differ from the first one's: tensors of the training by the buffers' names."""
        buffers, replica = self._content["buffers"], self._engine.topology.replica
        found = buffers[replica] if replica < len(buffers) else {}
        if not isinstance(found, dict):
            raise BadValue(f"the buffers of replica {replica} are no table")
        own = self._holdings.own
        return {
            name: self._stored(reference, own[name], f"the buffer {name!r:.200} of replica {replica}")
            for name, reference in found.items()
            if name in own
        }

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
        try:
            for state in self._optimizers:
                state.check(partial(self._reader.described, "optimizer"))
        except BadValue as error:
            raise CheckpointError(f"{self._reader.path}: {error}", file=self._reader.path) from error
        self._reader.check(manifests.SECTIONS, self._only())

    def _only(self) -> dict[str, Collection[str]]:
        optimizer = {name for state in self._optimizers for name in state.tensors}
        return {"model": self._holdings.own.keys(), "optimizer": optimizer, "training": self._wanted}

    # ---- taking it --------------------------------------------------------------------------------------------------

    def put(self) -> None:
        """Weights before the optimizers, whose state adds to them; random states last.

        Raises:
            CheckpointError: a file has changed since it was looked at; the training is partly loaded.
        """
        engine, own, read = self._engine, self._holdings.own, self._read
        with loading.half_done():
            for schedule in self._schedules:
                helper_state.restore(schedule, self._content.get("schedule"), lambda name: read("training", name))
            loading.put_model(self._reader, self._holdings.named)
            for name, stored in self._buffers.items():
                model_state.put(own[name], read("training", stored))
            for stage in engine.stages:
                self._put_versions(stage)
            for state in self._optimizers:
                state.restore()
        for part in engine.parts.own:
            for _, parameter in part.parameters:
                parameter.grad = None
        engine.resume(self._progress)
        self._put_randomness()

    def _read(self, section: str, name: str) -> Tensor:
        return self._reader.read(section, name)

    def _put_versions(self, stage: OwnStage) -> None:
        older = [self._older(name) for name, _ in self._trained(stage)]

        def weights(age: int) -> Callable[[int], Tensor | None]:
            def of(index: int) -> Tensor | None:
                reference = older[index][age]
                return None if reference is None else self._read("training", reference["name"])

            return of

        count = self._engine.delay_of(stage.index, self._progress.batches) if older else 0
        same = [all(each[age] is None for each in older) for age in range(count)]
        stage.weights.restore(self._progress.batches, [None if same[age] else weights(age) for age in range(count)])

    def _put_randomness(self) -> None:
        if self._random is None:
            logger.warning(
                "%s has no random states of rank %d, as fewer ranks were there: it keeps its own",
                self._reader.path,
                self._engine.topology.rank,
            )
        elif not self._random.restore(self._engine.device):
            logger.warning("%s has no random state of a GPU: that of this one stays", self._reader.path)
