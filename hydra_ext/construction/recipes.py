"""``materialize`` builds a model without memory; ``fill`` gives chosen parameters theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hydra_ext.construction.building import Built, build_part, move_to_meta, refuse_held, replace_contents
from hydra_ext.construction.operations import give_back_freed
from hydra_ext.construction.surroundings import Surroundings
from hydra_ext.construction.weight_files import Rename, WeightFiles
from hydra_ext.errors import BuildDiffers, InvalidArgument, InvalidDevice, ModelChanged, StateError


@dataclass(frozen=True)
class _Recipe:
    """How a model was built. Kept beside the model's parameters, for :func:`fill`."""

    build: Callable[[], nn.Module]
    surroundings: Surroundings
    built: Built  # without its model, which it would keep alive
    files: WeightFiles | None
    stored: Mapping[str, str]


@dataclass(frozen=True)
class _Source:
    """Where a parameter's numbers come from: it has this name in the model that was built."""

    recipe: _Recipe
    name: str


# Bytes of parameters that one run of the constructor fills when a model is filled part by part.
GROUP_BYTES = 2 * 2**30
_FREED_BYTES = 64 * 2**20  # most freed memory that has not been returned to the system yet

_sources: MutableMapping[torch.Tensor, _Source] = WeakIdKeyDictionary()  # by parameter, wherever it is now


def materialize(
    build: Callable[[], nn.Module],
    *,
    weights: str | os.PathLike[str] | None = None,
    rename: Rename | None = None,
    cast: bool = False,
) -> nn.Module:
    """Builds a model whose parameters have no memory yet.

    :class:`hydra_ext.offload` gives them memory block by block. :class:`hydra_ext.Pipeline` gives it to the parameters
    of a rank's own stages, and :func:`fill` to parameters by name.

    The constructor runs as always, but a parameter's memory is freed as soon as the next parameter is worked on. In
    the end parameters are on meta. They stay the same objects when they are filled: tied ones stay tied, and optimizers
    may be made at once. Buffers are real and have their ordinary values, except for random ones as below.

    Without ``weights``, all random numbers are drawn, and all generators end in the same state as after the ordinary
    constructor. That takes as long as the constructor, and the memory of its largest parameter. With ``weights``, they
    stay as they are, and initialisation on which nothing depends is left out. Values that the constructor draws and
    that are in no file are random, but not those of the ordinary constructor.

    Args:
        build: Function without arguments that makes the whole model anew, on the CPU, and changes nothing outside.
            It is called here and by every :func:`fill`. Its captured variables must not change afterwards, and no other
            thread may draw from the global generators meanwhile. :class:`~hydra_ext.errors.BuildDiffers` reports a
            difference.
        weights: A safetensors file, or a folder with one or with an index and its shards. Persistent buffers are read
            at once. In a checkpoint's folder each tensor is compared with its checksum in the manifest as it is read.
        rename: Function from a tensor's name in the files to its name in the model. None leaves the tensor out.
        cast: Whether floating tensors of another dtype than the model's are rounded to it, as ``tensor.to()`` does.

    Returns:
        The model. Values that the constructor takes from parameters (buffers, branches, attributes, other parameters)
        are right: the constructor is run again with those parameters kept, as often as necessary.

    Raises:
        InvalidArgument: ``build`` cannot be called.
        UnsupportedModel: A parameter is lazy, on another device, or was made before; two parameters lie in the same
            memory; or another tensor shares a parameter's memory.
        WeightsError: The tensors in ``weights`` are not the model's, or are damaged, or two names of one parameter
            have different numbers.
    """
    if not callable(build):
        raise InvalidArgument(
            f"materialize(build={build!r}): give a function that builds the model, as in "
            "materialize(lambda: MyModel(config))"
        )
    files = None if weights is None else WeightFiles(weights, rename, cast=cast)
    surroundings = Surroundings.now()
    built = build_part(build, surroundings, draw=files is None)
    model = built.model
    stored: dict[str, str] = {}
    if files is None:
        built.end.restore()
    else:
        stored = files.find(model)
        files.read({stored[name]: buffer for name, buffer in model.named_buffers() if name in stored})
    recipe = _Recipe(build, surroundings, _without_model(built), files, stored)
    _sources.update({parameter: _Source(recipe, name) for name, parameter in model.named_parameters()})
    return model


def fill(model: nn.Module, names: Iterable[str] | None = None, *, device: torch.device | str = "cpu") -> None:
    """Gives parameters of a model made by :func:`materialize` their memory and their values.

    Without ``weights`` the values are, bit for bit, those of the ordinary constructor in the random state in which
    materialize() was called. The constructor is run once more from that state, and all generators are put back.

    This takes the memory of the filled parameters, of those that they are computed from, of the largest other parameter
    and of the buffers. Each call draws all numbers, so fill all wanted parameters with one call. In a
    module around several models they are filled one after the other: an error leaves those before it filled.

    Args:
        model: Model that :func:`materialize` returned, a part of it, or a module around it.
        names: Names as in ``named_parameters()``, tied parameters under any of theirs; None for all. Parameters that
            have memory already stay as they are.
        device: Device of the memory. Values are made on the CPU.

    Raises:
        StateError: The model was not made by materialize(), or the call comes from inside a constructor.
        InvalidDevice: ``device`` is not a device, or is meta.
        InvalidArgument: The model has no parameter of such a name. Nothing was filled.
        ModelChanged: A parameter has another shape or dtype than the one that was built. Nothing was filled.
        BuildDiffers: The constructor made another model than before. Nothing was filled.
        UnsupportedModel: A parameter has hooks already, or is part of a graph.
        WeightsError: A file cannot be read any more, has changed, or its bytes do not have the checkpoint's checksums.
            Nothing was filled.
    """
    _expect_materialized(model)
    target = _device(device)
    with torch.inference_mode(False):
        for recipe, wanted in _wanted(model, names):
            if recipe.files is not None:
                _fill_from_files(recipe.files, recipe.stored, wanted, target)
            else:
                _fill_from_constructor(recipe, wanted, target)


def has_source(parameter: torch.Tensor) -> bool:
    """Whether :func:`materialize` made this parameter, so that :func:`fill` can fill it."""
    return parameter in _sources


def check_fillable(model: nn.Module) -> None:
    """Checks that :func:`fill` can fill all parameters without memory. Reads only the headers of files.

    Raises:
        StateError, ModelChanged, UnsupportedModel, WeightsError: As fill().
    """
    _expect_materialized(model)
    for recipe, wanted in _wanted(model, None):
        for name, parameter in wanted.items():
            refuse_held(parameter, name)
        if recipe.files is not None:
            recipe.files.check({recipe.stored[name]: parameter for name, parameter in wanted.items()})


def in_groups(model: nn.Module, parts: Sequence[Sequence[str]], *, room: int | None = None) -> list[list[str]]:
    """Names to give to :func:`fill` before each part of a model, so that few values wait for their part's turn.

    From files a part gets its own parameters. The constructor draws all numbers at each run, so it is run once for a
    group of parts: the first part of a group gets the parameters of all of them. A group is parts of
    :data:`GROUP_BYTES` together, or of ``room`` bytes if that is less, or one larger part.

    Args:
        model: Model that :func:`materialize` returned.
        parts: Names of parameters, for each part.
        room: Bytes of values that may wait; None for :data:`GROUP_BYTES`.

    Returns:
        Names, for each part.
    """
    _expect_materialized(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    draws = any(_sources[each].recipe.files is None for each in parameters.values() if each.is_meta)
    most = 0 if not draws else GROUP_BYTES if room is None else min(GROUP_BYTES, room)
    groups: list[list[str]] = []
    latest, size = 0, 0
    for index, part in enumerate(parts):
        lacking = [name for name in part if parameters[name].is_meta]
        more = sum(parameters[name].nbytes for name in lacking)
        groups.append([])
        if index == 0 or size + more > most:
            latest, size = index, 0
        groups[latest] += lacking
        size += more
    return groups


def _expect_materialized(model: nn.Module) -> None:
    if not any(parameter in _sources for parameter in model.parameters()):
        raise StateError(
            f"fill() was given a {type(model).__name__} that materialize() did not return: give the model itself, not "
            "a copy"
        )


def _device(device: torch.device | str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InvalidDevice(f"fill(device={device!r}): {error}") from error
    if target.type == "meta":
        raise InvalidDevice(f"fill(device={device!r}): tensors have no memory on meta; give a device that has memory")
    return target


def _wanted(model: nn.Module, names: Iterable[str] | None) -> list[tuple[_Recipe, dict[str, nn.Parameter]]]:
    """The parameters to fill, each under one name of the model that was built, by recipe."""
    if isinstance(names, str):
        raise InvalidArgument(f"fill(names={names!r}): give a collection of names, as in [{names!r}]")
    there = dict(model.named_parameters(remove_duplicate=False))
    chosen = list(there if names is None else dict.fromkeys(names))
    unknown = [name for name in chosen if name not in there]
    if unknown:
        raise InvalidArgument(
            f"fill(names=...): the model has no parameter {unknown[0]!r}"
            + (f", nor {len(unknown) - 1} others of those given" if unknown[1:] else "")
        )
    wanted: dict[int, tuple[_Recipe, dict[str, nn.Parameter]]] = {}
    for name in chosen:
        parameter = there[name]
        if not parameter.is_meta:
            continue
        source = _sources.get(parameter)
        made = None if source is None else source.recipe.built.made[source.recipe.built.numbers[source.name]]
        if source is None or made != (parameter.shape, parameter.dtype):
            raise ModelChanged(
                f"{name} ({tuple(parameter.shape)}, {parameter.dtype}) is not what the constructor made: change shapes "
                "and dtypes inside it, as in materialize(lambda: MyModel(config).to(torch.bfloat16)), or after fill()"
            )
        wanted.setdefault(id(source.recipe), (source.recipe, {}))[1][source.name] = parameter
    return list(wanted.values())


def _fill_from_files(
    files: WeightFiles, stored: Mapping[str, str], wanted: Mapping[str, nn.Parameter], device: torch.device
) -> None:
    data = {
        name: torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
        for name, parameter in wanted.items()
    }
    files.read({stored[name]: data[name] for name in wanted})
    for name, parameter in wanted.items():  # after all reads: a parameter with memory counts as filled
        replace_contents(parameter, data.pop(name), name)


def _fill_from_constructor(recipe: _Recipe, wanted: Mapping[str, nn.Parameter], device: torch.device) -> None:
    own = frozenset(recipe.built.numbers[name] for name in wanted)
    needed = frozenset().union(*(recipe.built.needs[number] for number in own))
    with ExitStack() as entered:
        for generator, state in recipe.built.generators:
            entered.callback(generator.set_state, generator.get_state())
            generator.set_state(state)
        again = build_part(recipe.build, recipe.surroundings, own=own, needed=needed)
    _compare(recipe.built, again)
    values = dict(again.model.named_parameters(remove_duplicate=False))
    freed = 0
    for name, parameter in wanted.items():
        data = values[name].data
        dense = torch.empty_like(data, device="meta").stride() == data.stride()
        if (dense and again.numbers[name] in again.born) or data.untyped_storage().nbytes() > data.nbytes:
            # Copied: an arena cannot take a storage that has had a Python object, and this run made one for each.
            data = data.to(device, copy=True)
        move_to_meta(values[name], name)
        replace_contents(parameter, data.to(device), name)
        freed += parameter.nbytes
        if freed > _FREED_BYTES:
            give_back_freed()
            freed = 0
    give_back_freed()


def _compare(first: Built, again: Built) -> None:
    """Raises BuildDiffers unless two runs of the constructor made the same model."""
    if first.numbers != again.numbers:
        differing = set(first.numbers.items()) ^ set(again.numbers.items())
        what = f"parameters differ: {min(name for name, _ in differing)} is new, gone, or made at another time"
    elif first.made != again.made:
        number = next(
            (i for i, pair in enumerate(zip(first.made, again.made, strict=False)) if pair[0] != pair[1]), None
        )
        name = next((name for name, other in first.numbers.items() if other == number), "a parameter made on the way")
        what = f"shapes or dtypes differ, first of {name}"
    elif not first.end.equals_in_torch(again.end):
        what = "other random numbers were drawn"
    else:
        return
    raise BuildDiffers(
        f"the constructor does not build the same model at each call: {what}. Its captured variables must not change, "
        "and it must draw from torch's, Python's or numpy's global generators"
    )


def _without_model(built: Built) -> Built:
    return replace(built, model=nn.Module())
