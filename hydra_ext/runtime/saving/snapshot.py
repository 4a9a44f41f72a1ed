"""Captures everything that a run's next step depends on for a checkpoint, and restores it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.checkpoint import helper_state, loader_states, loading, model_state, optimizer_state, optimizer_values
from hydra_ext.checkpoint.format import strict_json
from hydra_ext.checkpoint.format.reader import Reader
from hydra_ext.checkpoint.format.tensors import Entry, bytes_of, empty
from hydra_ext.checkpoint.format.values import Encoder
from hydra_ext.checkpoint.helper_state import Stateful
from hydra_ext.checkpoint.loader_states import SavedLoader
from hydra_ext.checkpoint.randomness import capture as random_states
from hydra_ext.checkpoint.saved_state import SavedState, decoded
from hydra_ext.checkpoint.saving import Contents
from hydra_ext.errors import InvalidArgument
from hydra_ext.runtime.placement.spilling import Spilling
from hydra_ext.runtime.replicas import Replicas


@dataclass(frozen=True)
class Training:
    """The objects of a run that a checkpoint covers, and those that give access to their bytes.

    Attributes:
        helpers: Schedule, scaler and loader of the caller, by these names; None for one that was not given.
        core: Core of the model, which reads tensors at home on the disk; None without an offload context.
        spilling: Plan for tensors whose home is the disk; None if there are none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    layout: Layout
    device: torch.device
    replicas: Replicas | None
    helpers: dict[str, Stateful | None]
    core: _C.PagedModel | None
    spilling: Spilling | None

    @property
    def rank(self) -> int:
        return 0 if self.replicas is None else self.replicas.rank

    @property
    def alike(self) -> dict[str, Stateful | None]:
        """The helpers that all ranks have in one state."""
        return {name: self.helpers.get(name) for name in ("schedule", "scaler")}

    @property
    def loader(self) -> Stateful | None:
        """Gives this rank's data."""
        return self.helpers.get("loader")


# ---- capture --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passing:
    """State that may change between a step and the save after it.

    Attributes:
        random: Random states of this process.
        loader: State of the loader, as JSON; None without one.
    """

    random: dict[str, Any]
    loader: dict[str, Any] | None


def randomness(training: Training) -> dict[str, Any]:
    """The present random states of this process.

    Raises:
        UnsupportedState: a generator was replaced by one that cannot be saved.
    """
    return random_states(training.device)


def passing(training: Training) -> Passing:
    """The present state of this process.

    Raises:
        UnsupportedState: as by :func:`randomness`, or no checkpoint can hold the loader's state.
    """
    loader = loader_states.capture(training.loader)
    return Passing(randomness(training), loader)  # in this order: a loader may draw a number for its state


def take(training: Training, passing: Passing, *, step: int, extra: Any) -> Contents:
    """Captures this rank's state, as if there were no other ranks.

    Args:
        step: Number of steps made.
        extra: Additional data of the caller.

    Raises:
        UnsupportedState: a checkpoint cannot represent part of the state.
        InvalidArgument: JSON does not preserve ``extra``.
    """
    reason = strict_json.why_not(extra, "extra")
    if reason:
        raise InvalidArgument(
            f"run.save: {reason}, which does not come back from JSON as it was: give None, numbers, texts, and lists "
            "and dicts of them"
        )
    tensors = model_state.named_tensors(training.model)
    blocks = [[parameter for _, parameter in block.parameters] for block in training.layout.blocks]
    sections = {"model": model_state.entries(tensors, blocks)}
    content: dict[str, Any] = {"optimizer": None, "extra": extra, "ranks": [passing.random], "buffers": [{}]}
    content["loaders"] = loader_states.joined([passing.loader])
    if training.optimizer is not None:
        names = {id(named.tensor): named.name for named in tensors}
        state = optimizer_state.capture(training.optimizer, names)
        content["optimizer"] = state.content
        sections["optimizer"] = state.groups
    encoder = Encoder()
    for name, helper in training.alike.items():
        content[name] = helper_state.capture(helper, name, encoder)
    sections["training"] = [[entry] for entry in encoder.entries]
    found = {section: [_where_it_is(group, training) for group in groups] for section, groups in sections.items()}
    return Contents(step, found, model_state.ties(tensors), content, model_state.texts(training.model))


def _where_it_is(group: Sequence[Entry], training: Training) -> list[Entry]:
    """The entries, changed to read a tensor whose home is the disk from there at its turn, without moving it."""
    core, spilling = training.core, training.spilling
    if core is None:
        return list(group)

    def fetched(fetch: Callable[[], Tensor]) -> Tensor:
        tensor = fetch()
        copy = None if spilling is None else spilling.copy_of_table(tensor)
        copy = core.moves.read_from_disk(tensor) if copy is None else copy
        return tensor if copy is None else copy

    return [replace(entry, fetch=partial(fetched, entry.fetch)) for entry in group]


def with_ranks(contents: Contents, training: Training) -> Contents:
    """Adds the state that the other ranks have of their own.

    It is the random states, the loaders, and buffers that differ from rank 0's.
    """
    replicas = training.replicas
    if replicas is None:
        return contents
    loaders = contents.content["loaders"]
    own = strict_json.write([contents.content["ranks"][0], loaders and loaders["states"][0]])
    every = [strict_json.read(each) for each in replicas.gather(own)]
    encoder = Encoder()
    buffers = [
        encoder.encode(differing, f"rank {rank}") for rank, differing in enumerate(_differing(replicas, training.model))
    ]
    more = [*contents.sections["training"], *([entry] for entry in encoder.entries)]
    return replace(
        contents,
        sections={**contents.sections, "training": more},
        content={
            **contents.content,
            "ranks": [random for random, _ in every],
            "loaders": loader_states.joined([loader for _, loader in every]),
            "buffers": buffers,
        },
    )


def _differing(replicas: Replicas, model: nn.Module) -> list[dict[str, Tensor]]:
    """The buffers that differ from rank 0's, by name, for each rank."""
    buffers = [named for named in model_state.named_tensors(model) if not isinstance(named.tensor, nn.Parameter)]
    digests = b"".join(hashlib.sha256(bytes_of(named.tensor)).digest() for named in buffers)
    every = replicas.gather(digests)
    found: list[dict[str, Tensor]] = [{} for _ in every]
    size = hashlib.sha256().digest_size
    for number, named in enumerate(buffers):
        of_each = [digests[number * size : (number + 1) * size] for digests in every]
        if any(digest != of_each[0] for digest in of_each):
            for rank, data in enumerate(replicas.gather(bytes(bytes_of(named.tensor)))):
                if of_each[rank] != of_each[0]:
                    found[rank][named.name] = empty(named.tensor.dtype, tuple(named.tensor.shape))
                    bytes_of(found[rank][named.name])[:] = data
    return found


# ---- restore --------------------------------------------------------------------------------------------------------


class Return:
    """A checkpoint that was compared with a training and is ready to be restored by :meth:`put`.

    Raises:
        CheckpointError: the checkpoint is damaged.
        CheckpointMismatch: it belongs to another model, optimizer or set of helpers.
        UnsupportedState: a checkpoint cannot represent part of the training's state.
    """

    def __init__(self, training: Training, reader: Reader) -> None:
        self._training = training
        self._reader = reader
        tensors = model_state.named_tensors(training.model)
        self._names = {id(named.tensor): named.name for named in tensors}
        with decoded(reader):
            self._saved = SavedState(reader, tensors, {name: [helper] for name, helper in training.alike.items()})
            ranks = 1 if training.replicas is None else training.replicas.size
            self._loader = SavedLoader(reader, training.loader, rank=training.rank, ranks=ranks, replicas=ranks)
            found = model_state.differences(tensors, reader.manifest)
            loading.expect_none(reader, [*found, *self._other_differences()])
            self._check_optimizer()
            self._saved.choose(rank=training.rank, replica=training.rank)
        reader.check(("model", "optimizer", "training"))

    def _check_optimizer(self) -> None:
        if self._training.optimizer is not None:
            described = partial(self._reader.described, "optimizer")
            saved = self._saved.content["optimizer"]
            optimizer_values.check(self._training.optimizer, self._names, saved, described)

    def _other_differences(self) -> list[str]:
        lines = []
        optimizer, saved = self._training.optimizer, self._saved.content.get("optimizer")
        if (optimizer is None) != (saved is None):
            lines.append(
                f"there was {'no' if saved is None else 'an'} optimizer, and there is {_article(optimizer)} now"
            )
        elif optimizer is not None:
            lines += optimizer_state.differences(optimizer, self._names, saved)
        lines += self._saved.helper_differences() + self._loader.differences
        if self._saved.content.get("versions"):
            lines.append(
                "its next step uses older weights, as its pipeline's schedule says, and a run's the newest (which "
                "alone hydra_ext.load_model loads)"
            )
        return lines

    def put(self) -> None:
        """Restores the training.

        Raises:
            CheckpointError: a file has changed since it was checked; the training is partly restored.
        """
        training = self._training
        self._loader.restore()
        with _moving_on(training) as put:

            def overwrite(tensor: Tensor) -> None:
                put(tensor)
                if training.spilling is not None:
                    training.spilling.overwrite_table(tensor)

            parameters = training.model.parameters()
            self._saved.put(lambda: self._put_optimizer(put), parameters, training.device, put=overwrite)

    def _put_optimizer(self, put: Callable[[Tensor], None]) -> None:
        optimizer, reader = self._training.optimizer, self._reader
        if optimizer is not None:
            saved = self._saved.content["optimizer"]
            optimizer_state.restore(optimizer, self._names, saved, lambda name: reader.read("optimizer", name), put=put)


@contextmanager
def _moving_on(training: Training) -> Iterator[Callable[[Tensor], None]]:
    """Yields a function to call after each tensor that is restored, with the parameter that it belongs to.

    When the next block begins, the previous block's tensors move to the disk if that is their home.
    """
    blocks = training.layout.blocks
    block_of = {id(parameter): number for number, block in enumerate(blocks) for _, parameter in block.parameters}
    latest: list[int] = []

    def put(parameter: Tensor) -> None:
        block = block_of.get(id(parameter))
        if block is not None and latest[-1:] != [block]:
            settle()
            latest.append(block)
        if training.spilling is not None:
            training.spilling.send_tables()

    def settle() -> None:
        if training.spilling is not None:
            training.spilling.settle(latest[-1:])
            training.spilling.send_tables()

    yield put
    settle()


def _article(optimizer: object) -> str:
    return "none" if optimizer is None else "one"


def pending_gradient(training: Training, *, used: bool) -> str | None:
    """The name of a parameter whose gradient no step has used, so that a checkpoint would lose it; None without one.

    Args:
        used: Whether the optimizer has stepped since the last backward.
    """
    groups: Sequence[dict[str, Any]] = [] if training.optimizer is None else training.optimizer.param_groups
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    for name, parameter in training.model.named_parameters():
        gradient = parameter.grad
        if gradient is None or (used and id(parameter) in stepped):
            continue
        if gradient.layout != torch.strided or bool(gradient.any()):
            return name
    return None
