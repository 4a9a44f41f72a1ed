"""Saves a pipeline: every rank writes its tensors, and the first one makes a checkpoint of all files.

All ranks have to see the folder, and the files that another rank has written and closed there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hydra_ext.checkpoint import helper_state, loader_states, model_state, optimizer_state, saving
from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format import strict_json, writer
from hydra_ext.checkpoint.format.files import Files, closing
from hydra_ext.checkpoint.format.manifest import Share
from hydra_ext.checkpoint.format.tensors import Entry, bytes_of
from hydra_ext.checkpoint.format.values import Encoder
from hydra_ext.checkpoint.format.writer import Shard
from hydra_ext.checkpoint.helper_state import Stateful
from hydra_ext.checkpoint.randomness import capture as random_states
from hydra_ext.checkpoint.saving import Contents
from hydra_ext.errors import InvalidArgument, SaveFailed, StateError, UnsupportedState
from hydra_ext.pipeline.checkpoint.holdings import Holdings, agreed, held_here
from hydra_ext.pipeline.checkpoint.stage_optimizers import joined
from hydra_ext.pipeline.engine import Engine
from hydra_ext.pipeline.ranks.together import Together

_WHAT = "to save a checkpoint"


@dataclass(frozen=True)
class Wanted:
    """The arguments of one save.

    Attributes:
        extra: The user's own values.
        schedules: Learning-rate schedulers of this rank's optimizers.
        loader: Gives this rank's data; None if it reads none.
        keep: How many checkpoints stay in the folder.
    """

    extra: Any
    schedules: Sequence[Stateful]
    loader: Stateful | None
    keep: int

    def check(self) -> None:
        """
        Raises:
            InvalidArgument: ``keep`` is no count, or JSON cannot hold ``extra``.
        """
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise InvalidArgument(f"pipe.save: keep={self.keep!r}: give a number of checkpoints, 1 or more")
        reason = strict_json.why_not(self.extra, "extra")
        if reason:
            raise InvalidArgument(
                f"pipe.save: {reason}, which does not come back from JSON as it was: give None, numbers, texts, and "
                "lists and dicts of them"
            )


class Save:
    """One rank's part of saving one checkpoint.

    All ranks make one, when no microbatch or update is under way, and call :meth:`run`.
    """

    def __init__(self, engine: Engine, together: Together, path: Path, wanted: Wanted, files: Files) -> None:
        self._engine = engine
        self._together = together
        self._path = path
        self._wanted = wanted
        self._files = files
        self._sections: dict[str, list[list[Entry]]] = {}
        self._content: dict[str, Any] = {}  # of this rank, for the first one
        self._all: Contents | None = None  # on the first rank

    def run(self) -> Path:
        """Saves the checkpoint, and returns its own folder.

        Raises:
            RankFailed: Another rank has failed.
            Exception: See :meth:`hydra_ext.Pipeline.save`.
        """
        together = self._together
        together.do(_WHAT, self._check)
        holdings = agree(self._engine, together, _WHAT)
        digests = together.do(_WHAT, lambda: self._digests(holdings))
        counts = together.do(_WHAT, lambda: self._fill(holdings, digests))
        shards = self._shards(counts)
        needed = sum(together.do(_WHAT, lambda: writer.needed_bytes(shards, ())))
        contents = together.collect(_WHAT, self._content)
        with ExitStack() as stack:
            drafts: list[saving.Draft] = []  # on the first rank

            def begun() -> str:
                self._all = self._joined(holdings, contents)
                drafts.append(stack.enter_context(self._draft(self._all.step, needed)))
                return drafts[0].name

            def committed() -> None:
                if self._all is not None:
                    share = _whole(written)
                    _expect_files(drafts[0], share, self._files)
                    drafts[0].commit(share, self._all)
                    stack.close()

            name = together.first_does(_WHAT, begun)
            shares: list[Share] = []
            together.do(_WHAT, lambda: shares.append(_write(self._path, name, shards, self._files)))
            written = together.collect(_WHAT, shares[0].as_json())
            together.first_does(_WHAT, committed)
        return self._path / name

    def _draft(self, step: int, needed: int) -> AbstractContextManager[saving.Draft]:
        return saving.unfinished(
            self._path,
            step,
            needed_bytes=needed,
            keep=self._wanted.keep,
            files=self._files,
            is_left_alone=lambda: self._together.all_live,
        )

    # ---- collecting the state ---------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._wanted.check()
        for part in self._engine.assembly.parts.own:
            for name, parameter in part.parameters:
                gradient = parameter.grad
                if gradient is not None and (gradient.layout != torch.strided or bool(gradient.any())):
                    raise StateError(
                        f"pipe.save: '{name}' has a gradient that no step has used, and no checkpoint would hold it: "
                        "set it to None"
                    )

    def _digests(self, holdings: Holdings) -> dict[str, Any]:
        """Digests of the schedulers, which have to be equal, and of the buffers, which may differ between replicas."""
        found = []
        for schedule in self._wanted.schedules:
            encoder = Encoder()
            text = strict_json.write(helper_state.capture(schedule, "schedule", encoder))
            found.append(_digest(text, *(bytes_of(entry.fetch()) for entry in encoder.entries)))
        buffers = holdings.own_buffers() if self._engine.topology.replicas > 1 else {}
        return {"schedules": found, "buffers": {name: _digest(bytes_of(each)) for name, each in buffers.items()}}

    def _fill(self, holdings: Holdings, digests: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Collects this rank's state.

        Returns:
            The number of files of this rank in each section.

        Raises:
            UnsupportedState: A part of the state would be lost.
        """
        topology = self._engine.topology
        encoder = Encoder()
        loader = loader_states.capture(self._wanted.loader)  # before: it may draw a number for its state
        self._content = {"random": random_states(self._engine.device), "buffers": {}, "optimizers": [], "versions": {}}
        self._content["loader"] = loader
        self._content["schedule"] = self._schedule(digests, encoder)
        if topology.replica:
            first = digests[topology.rank_of(topology.place, 0)]["buffers"]
            own = digests[topology.rank]["buffers"]
            differing = {name: each for name, each in holdings.own_buffers().items() if own[name] != first[name]}
            self._content["buffers"] = encoder.encode(differing, f"replica {topology.replica}")
        else:
            tensors = [each for each in holdings.named if each.name in holdings.kept]
            self._sections["model"] = model_state.entries(tensors, [])
            self._sections["optimizer"] = self._optimizers(holdings)
            self._content["versions"] = self._versions(holdings, encoder)
        self._sections["training"] = [[entry] for entry in encoder.entries]
        return {section: len(writer.plan(section, groups)) for section, groups in self._sections.items()}

    def _schedule(self, digests: Sequence[dict[str, Any]], encoder: Encoder) -> dict[str, Any] | None:
        """The schedulers' state, from the first rank that has a scheduler; None from all others.

        Raises:
            UnsupportedState: The schedulers have different states.
        """
        if len({digest for each in digests for digest in each["schedules"]}) > 1:
            raise UnsupportedState(
                "schedule= is not in the same state for the optimizers of all stages: a checkpoint holds one for all "
                "of them, so that any number of stages can load it"
            )
        first = next((rank for rank, each in enumerate(digests) if each["schedules"]), None)
        if first != self._together.rank:
            return None
        return helper_state.capture(self._wanted.schedules[0], "schedule", encoder)

    def _optimizers(self, holdings: Holdings) -> list[list[Entry]]:
        groups: list[list[Entry]] = []
        for stage in self._engine.assembly.stages:
            if stage.optimizer is not None:
                owner = f"stage {stage.index} "
                state = optimizer_state.capture(stage.optimizer, holdings.name_of, only=holdings.kept, owner=owner)
                self._content["optimizers"].append([stage.index, state.content])
                groups += state.groups
        return groups

    def _versions(self, holdings: Holdings, encoder: Encoder) -> dict[str, Any]:
        """The older versions of each parameter's weights that later batches use, the latest first.

        None stands for weights that equal those of the version after.
        """
        engine, names = self._engine, holdings.name_of
        found: dict[str, Any] = {}
        for stage in engine.assembly.stages:
            older = [stage.weights.older(age) for age in range(1, engine.delay_of(stage.index, engine.batches) + 1)]
            for index, (_, parameter) in enumerate(stage.weights.parameters):
                name = names[id(parameter)]
                if older and name in holdings.kept:
                    found[name] = [
                        None if leaves is None else encoder.encode(leaves[index], f"{age} before/{name}")
                        for age, leaves in enumerate(older, 1)
                    ]
        return found

    def _shards(self, counts: Sequence[dict[str, int]]) -> list[Shard]:
        shards = []
        for section, groups in self._sections.items():
            of_ranks = [each.get(section, 0) for each in counts]
            before = sum(of_ranks[: self._together.rank])
            shards += writer.numbered(writer.plan(section, groups), before, sum(of_ranks))
        return shards

    def _joined(self, holdings: Holdings, parts: Sequence[dict[str, Any]]) -> Contents:
        """Joins the contents of all ranks, on the first one."""
        engine = self._engine
        stages = sorted((each for part in parts for each in part["optimizers"]), key=lambda each: int(each[0]))
        replicas = engine.topology.replicas
        content = {
            "optimizer": joined([state for _, state in stages], holdings.parameters),
            "extra": self._wanted.extra,
            "ranks": [part["random"] for part in parts],
            "loaders": loader_states.joined([part["loader"] for part in parts]),
            "buffers": [_merged(parts[replica::replicas], "buffers") for replica in range(replicas)],
            "schedule": next((part["schedule"] for part in parts if part["schedule"]), None),
            "scaler": None,
            "versions": _merged(parts, "versions"),
            "pipeline": Encoder().encode(engine.progress.as_dict(), "pipeline"),
        }
        texts = {} if engine.assembly.parts.model is None else model_state.texts(engine.assembly.parts.model)
        return Contents(engine.batches, {}, holdings.ties, content, texts)


def agree(engine: Engine, together: Together, what: str) -> Holdings:
    """Agrees on which rank holds which tensors. All ranks have to call it.

    Raises:
        RankFailed: Another rank has failed.
        UnsupportedState: The model has tensors that no checkpoint can hold.
    """
    here: list[Any] = []

    def said() -> list[list[Any]]:
        here.append(held_here(engine.assembly.parts))
        return [] if engine.topology.replica else [held.as_json() for held in here[0][0]]

    everyone = together.do(what, said)
    held, known = here[0]
    return agreed(held, known, everyone, engine.topology)


def _digest(*data: bytes | memoryview) -> str:
    summed = hashlib.sha256()
    for each in data:
        summed.update(each)
    return summed.hexdigest()


def _merged(parts: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part[key].items()}


# ---- writing it -----------------------------------------------------------------------------------------------------


def _write(path: Path, name: str, shards: Sequence[Shard], files: Files) -> Share:
    try:
        with (
            closing(files, files.open_folder(path)) as folder,
            closing(files, files.open_folder_in(name, inside=folder)) as step,
        ):
            if manifests.UNFINISHED not in files.names(step):
                raise FileNotFoundError(f"{path / name} is not the one that rank 0 has made")
            written = writer.Writer(files, step)
            for shard in shards:
                written.write_shard(shard)
            files.sync(step)
    except FileNotFoundError as error:
        raise SaveFailed(
            f"{path / name}, which rank 0 has made, does not exist on this rank ({error}): give a folder that all "
            "ranks see",
            path=path,
        ) from error
    except OSError as error:
        raise saving.failed(path, error) from error
    return Share(written.files, written.tensors)


def _whole(written: Sequence[dict[str, Any]]) -> Share:
    files: dict[str, manifests.FileRecord] = {}
    tensors: dict[str, dict[str, manifests.TensorRecord]] = {}
    for share in map(Share.of_json, written):
        files.update(share.files)
        for section, records in share.tensors.items():
            known = tensors.setdefault(section, {})
            twice = known.keys() & records.keys()
            if twice:
                raise UnsupportedState(f"'{min(twice)}' names two tensors of the {section}")
            known.update(records)
    return Share(files, tensors)


def _expect_files(draft: saving.Draft, share: Share, files: Files) -> None:
    for name, record in share.files.items():
        with closing(files, files.open(name, inside=draft.descriptor)) as file:
            if files.status(file).st_size != record.nbytes:
                raise SaveFailed(
                    f"{draft.path / name} does not have the {record.nbytes} bytes that a rank has written: give a "
                    "folder that all ranks see",
                    path=draft.path.parent,
                )
