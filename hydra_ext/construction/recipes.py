"""``materialize`` and ``fill``: a model without memory, and memory for the parts of it that are wanted."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from hydra_ext.construction.building import Built, build_part, move_to_meta, refuse_held, replace_contents
from hydra_ext.construction.operations import give_back_freed
from hydra_ext.construction.surroundings import Surroundings
from hydra_ext.construction.weight_files import WeightFiles
from hydra_ext.errors import BuildDiffers, InvalidArgument, InvalidDevice, ModelChanged, StateError


@dataclass(frozen=True)
class _Recipe:
    """How a model was built, kept beside it."""

    build: Callable[[], nn.Module]
    surroundings: Surroundings
    built: Built  # without its model, which would be kept alive
    files: WeightFiles | None
    stored: Mapping[str, str]


# Of parameters that one run of the constructor fills, where a model is filled part by part.
GROUP_BYTES = 2 * 2**30
_FREED_BYTES = 64 * 2**20  # so much may be free at a time, and not the system's yet

_recipes: weakref.WeakKeyDictionary[nn.Module, _Recipe] = weakref.WeakKeyDictionary()


def materialize(build: Callable[[], nn.Module], *, weights: str | os.PathLike[str] | None = None) -> nn.Module:
    """Builds a model whose parameters have no memory yet: :class:`hydra_ext.offload` gives it to them block by block,
    :class:`hydra_ext.Pipeline` to those of a rank's own stages, and :func:`fill` to those that are named.

    The constructor runs as always, but the memory of a parameter is given back as soon as the next one is worked on.
    Parameters end on meta, each an object of its own that it stays when it is filled (tied ones stay tied, optimizers
    may be made at once); buffers are real and hold what they always do (but see below for random ones).

    Without ``weights``, all random numbers are drawn: torch's CPU generator, Python's ``random`` and numpy's end where
    the ordinary constructor leaves them. That takes its time, and the memory of its largest parameter. With
    ``weights``, they stay where they are, and initialising is left out where nothing depends on it: what the
    constructor draws for something that is in no file (a buffer that is not persistent, an attribute) is random all
    the same, but not the numbers that it would have drawn after initialising everything.

    Args:
        build: called without arguments, here and by every :func:`fill`; it makes the whole model anew, on the CPU,
            and changes nothing outside. What it captures must not change afterwards, and no other thread may draw from
            the global generators meanwhile (:class:`~hydra_ext.errors.BuildDiffers` says so).
        weights: a safetensors file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json`` and
            its shards, that parameters are filled from; persistent buffers are read at once. In a checkpoint's folder
            every tensor is compared with its checksum in the manifest while it is read.

    Returns:
        The model. Values that the constructor takes from parameters (buffers, branches, attributes, other parameters)
        are right; the constructor is run again, and again, with those parameters kept meanwhile.

    Raises:
        InvalidArgument: ``build`` cannot be called.
        UnsupportedModel: lazy parameters; parameters on another device; some that were there before; two of them in
            the same memory; something else that shares a parameter's memory.
        WeightsError: what is in ``weights`` is not what the model has, is damaged, or has two names of one parameter
            with different numbers.
    """
    if not callable(build):
        raise InvalidArgument(
            f"materialize(build={build!r}): a function that builds the model is needed, as in "
            "materialize(lambda: MyModel(config))"
        )
    files = None if weights is None else WeightFiles(weights)
    surroundings = Surroundings.now()
    built = build_part(build, surroundings, draw=files is None)
    model = built.model
    stored: dict[str, str] = {}
    if files is None:
        built.end.restore()
    else:
        stored = files.find(model)
        files.read({stored[name]: buffer for name, buffer in model.named_buffers() if name in stored})
    _recipes[model] = _Recipe(build, surroundings, _without_model(built), files, stored)
    return model


def fill(model: nn.Module, names: Iterable[str] | None = None, *, device: torch.device | str = "cpu") -> None:
    """Gives parameters of a model made by :func:`materialize` their memory and their values.

    Without ``weights`` these are, bit for bit, those of the ordinary constructor in the random state of the call of
    materialize(): it is run once more, from that state; all generators are put back afterwards. Takes the memory of
    what is filled (and of parameters that it is computed from), of the largest other parameter and of the buffers; all
    numbers are drawn at each call, so fill what is wanted with one.

    Args:
        names: as in ``named_parameters()``, tied ones under any of their names; None for all. What has memory already
            stays as it is.
        device: where the memory is to be. Values are made on the CPU.

    Raises:
        StateError: the model was not made by materialize(), or this is called inside a constructor.
        InvalidDevice: ``device`` is none, or is meta.
        InvalidArgument: a name that the model has not. Nothing was filled.
        ModelChanged: a parameter has another shape or dtype than the one that was built. Nothing was filled.
        BuildDiffers: the constructor made something else than before. Nothing was filled.
        UnsupportedModel: a parameter has hooks already, or is part of a graph.
        WeightsError: a file cannot be read any more, is not what it was, or its bytes are not those that a checkpoint
            was written with. Nothing was filled.
    """
    recipe = _recipe_of(model)
    target = _device(device)
    wanted = _wanted(model, recipe, names)
    if not wanted:
        return
    with torch.inference_mode(False):
        if recipe.files is not None:
            _fill_from_files(recipe.files, recipe.stored, wanted, target)
        else:
            _fill_from_constructor(recipe, wanted, target)


def was_materialized(model: nn.Module) -> bool:
    """Whether this is a model that :func:`materialize` has returned, and :func:`fill` knows."""
    return model in _recipes


def check_fillable(model: nn.Module) -> None:
    """That :func:`fill` will find what it needs for all parameters without memory. Of files only headers are read.

    Raises:
        StateError, ModelChanged, UnsupportedModel, WeightsError: as fill().
    """
    recipe = _recipe_of(model)
    wanted = _wanted(model, recipe, None)
    for name, parameter in wanted.items():
        refuse_held(parameter, name)
    if recipe.files is not None:
        recipe.files.check({recipe.stored[name]: parameter for name, parameter in wanted.items()})


def in_groups(model: nn.Module, parts: Sequence[Sequence[str]], *, room: int | None = None) -> list[list[str]]:
    """What to give to :func:`fill` before each of a model's parts, so that few numbers wait for their part's turn.

    From files a part's own parameters. From the constructor, which draws all numbers at each call, at the first part
    of a group those of the whole group: parts of :data:`GROUP_BYTES` together, or of ``room`` bytes if there are fewer,
    or one larger part. It is so run once for each group.

    Args:
        parts: names of parameters.

    Returns:
        Names, for every part.
    """
    recipe = _recipe_of(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    most = 0 if recipe.files is not None else GROUP_BYTES if room is None else min(GROUP_BYTES, room)
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


def _recipe_of(model: nn.Module) -> _Recipe:
    recipe = _recipes.get(model)
    if recipe is None:
        raise StateError(
            f"a {type(model).__name__} was to be filled that materialize() did not return; copies of such a "
            "model, and modules around it, are none either"
        )
    return recipe


def _device(device: torch.device | str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InvalidDevice(f"fill(device={device!r}): {error}") from error
    if target.type == "meta":
        raise InvalidDevice(f"fill(device={device!r}): there is no memory on meta")
    return target


def _wanted(model: nn.Module, recipe: _Recipe, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """The parameters that are to be filled, each under one name."""
    if isinstance(names, str):
        raise InvalidArgument(f"fill(names={names!r}): a collection of names is needed, as in [{names!r}]")
    there = dict(model.named_parameters(remove_duplicate=False))
    chosen = list(there if names is None else dict.fromkeys(names))
    unknown = [name for name in chosen if name not in there]
    if unknown:
        raise InvalidArgument(
            f"fill(names=...): the model has no parameter {unknown[0]!r}"
            + (f", nor {len(unknown) - 1} others of those given" if unknown[1:] else "")
        )
    wanted: dict[str, nn.Parameter] = {}
    seen: set[nn.Parameter] = set()
    for name in chosen:
        parameter = there[name]
        if not parameter.is_meta or parameter in seen:
            continue
        seen.add(parameter)
        number = recipe.built.numbers.get(name)
        if number is None or recipe.built.made[number] != (parameter.shape, parameter.dtype):
            raise ModelChanged(
                f"{name} ({tuple(parameter.shape)}, {parameter.dtype}) is not what the constructor made: change shapes "
                "and dtypes inside it, as in materialize(lambda: MyModel(config).to(torch.bfloat16)), or after fill()"
            )
        wanted[name] = parameter
    return wanted


def _fill_from_files(
    files: WeightFiles, stored: Mapping[str, str], wanted: Mapping[str, nn.Parameter], device: torch.device
) -> None:
    data = {
        name: torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
        for name, parameter in wanted.items()
    }
    files.read({stored[name]: data[name] for name in wanted})
    for name, parameter in wanted.items():  # none if a file fails: a parameter with memory counts as filled
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
            # What an object of Python's has stood for, as in every run, no arena can take.
            data = data.to(device, copy=True)
        move_to_meta(values[name], name)
        replace_contents(parameter, data.to(device), name)
        freed += parameter.nbytes
        if freed > _FREED_BYTES:
            give_back_freed()
            freed = 0
    give_back_freed()


def _compare(first: Built, again: Built) -> None:
    """Raises BuildDiffers unless two runs of the constructor made the same."""
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
        f"the constructor does not build the same model at each call: {what}. What it captures must not change, and "
        "what it draws must come from torch's, Python's or numpy's global generators"
    )


def _without_model(built: Built) -> Built:
    return replace(built, model=nn.Module())
