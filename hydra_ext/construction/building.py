"""Runs a model's constructor so that only some of its parameters have memory."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hydra_ext.construction.operations import storage_of
from hydra_ext.construction.surroundings import Surroundings
from hydra_ext.construction.withholding import Missing, Withholding
from hydra_ext.errors import StateError, UnsupportedModel
from hydra_ext.state.memory import is_gone, weak
from hydra_ext.state.randomness import RandomState

_log = logging.getLogger(__name__)
_building = threading.Lock()  # a build watches nn.Parameter for the whole process
_builder: list[int] = []


@dataclass(frozen=True)
class Built:
    """Result of one run of the constructor. Parameters are numbered in the order in which they were made.

    Attributes:
        model: The model. Its parameters are on meta, except for those that were asked for; buffers are real.
        numbers: Number of each parameter by name; tied parameters have several names.
        made: Shapes and dtypes of all parameters that were made, including temporary ones.
        needs: Other parameters that have to be kept so that a parameter's values are right.
        born: Parameters whose memory this run allocated.
        end: Random states when the constructor returned.
        generators: Generators besides torch's own that the constructor drew from, with their states before.
    """

    model: nn.Module
    numbers: Mapping[str, int]
    made: tuple[tuple[torch.Size, torch.dtype], ...]
    needs: Mapping[int, frozenset[int]]
    born: frozenset[int]
    end: RandomState
    generators: tuple[tuple[torch.Generator, Tensor], ...]


def build_part(
    build: Callable[[], nn.Module],
    surroundings: Surroundings,
    *,
    own: frozenset[int] = frozenset(),
    needed: frozenset[int] = frozenset(),
    draw: bool = True,
) -> Built:
    """Runs the constructor, several times if necessary, from the same random state each time.

    Args:
        build: The constructor.
        surroundings: Random states and torch's defaults that it runs with.
        own: Numbers of the parameters that get memory and their ordinary values.
        needed: Numbers of the parameters that are known to be necessary for these values.
        draw: Whether to initialise parameters that are not kept and that nothing reads.

    Raises:
        UnsupportedModel: The constructor does not return a module, or the module has parameters that cannot be
            withheld.
        StateError: The call comes from inside a constructor.
    """
    kept = own | needed
    generators: dict[int, tuple[torch.Generator, Tensor]] = {}
    with _alone(), surroundings.restored():
        while True:
            surroundings.random.restore()
            for generator, state in generators.values():
                generator.set_state(state)
            run = Withholding(kept, draw=draw)
            outcome = _run_once(build, run, own)
            generators = {**run.generators, **generators}
            if isinstance(outcome, Built):
                return outcome
            if draw and outcome <= kept:
                raise UnsupportedModel(
                    "the constructor reads values of parameters in a way that cannot be followed: build the model "
                    "without materialize()"
                )
            if draw:
                _log.info("the constructor is run again with %d more parameters kept", len(outcome - kept))
                kept |= outcome
            draw = True


@contextmanager
def _alone() -> Iterator[None]:
    me = threading.get_ident()
    if me in _builder:
        raise StateError(
            "materialize() or fill() was called inside the constructor that one of them runs: call it outside"
        )
    with _building:
        _builder.append(me)
        try:
            yield
        finally:
            _builder.clear()


def _run_once(build: Callable[[], nn.Module], run: Withholding, own: frozenset[int]) -> Built | frozenset[int]:
    """The built model, or the numbers of parameters that have to be kept as well."""
    try:
        try:
            with run:
                model = build()
        except Missing as missing:
            return missing.parameters
        return frozenset(run.missing) or _finish(model, run, own)  # the constructor may have caught Missing
    finally:
        run.abandon()


def _finish(model: nn.Module, run: Withholding, own: frozenset[int]) -> Built | frozenset[int]:
    end = RandomState(torch.device("cpu"))
    made = tuple((parameter.shape, parameter.dtype) for parameter in run.made)
    numbers = _numbers(model, run)
    results = [run.made[number] for number in set(numbers.values()) & own]
    unknown = frozenset[int]().union(*(_unknown(run, tensor) for tensor in [*results, *model.buffers()]))
    if unknown:
        return unknown
    needs = {number: _unknown(run, run.made[number]) - {number} for number in set(numbers.values())}
    born = frozenset(number for number in set(numbers.values()) & own if _was_born(run, run.made[number]))
    held_elsewhere = _to_meta(model, run, numbers, own)
    if held_elsewhere:
        return held_elsewhere
    return Built(model, numbers, made, needs, born, end, tuple(run.generators.values()))


def _numbers(model: nn.Module, run: Withholding) -> dict[str, int]:
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"the constructor returned a {type(model).__name__}: return a torch.nn.Module")
    known = {id(parameter): number for number, parameter in enumerate(run.made)}
    numbers = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if nn.parameter.is_lazy(parameter):
            raise UnsupportedModel(
                f"{name} is lazy: its shape is known only after a forward; give the module its sizes "
                "(nn.Linear instead of nn.LazyLinear)"
            )
        if id(parameter) not in known:
            raise UnsupportedModel(
                f"{name} was made before this call: the constructor has to make the whole model anew at each call, "
                "as in materialize(lambda: MyModel(config))"
            )
        if (
            parameter.device.type != "cpu"
            or type(parameter.data) is not Tensor
            or parameter.layout is not torch.strided
        ):
            raise UnsupportedModel(
                f"{name} is made as a {type(parameter.data).__name__} ({parameter.layout}) on {parameter.device}: "
                "parameters have to be made as ordinary tensors on the CPU (not under torch.device(...), "
                "not by from_pretrained(), which materialize(..., weights=...) replaces)"
            )
        numbers[name] = known[id(parameter)]
    return numbers


def _unknown(run: Withholding, tensor: Tensor) -> frozenset[int]:
    memory = run.memory(tensor)
    return frozenset() if memory is None else frozenset(memory.unknown)


def _was_born(run: Withholding, tensor: Tensor) -> bool:
    storage = storage_of(tensor)
    return storage is not None and run.was_born(storage)


def _to_meta(model: nn.Module, run: Withholding, numbers: Mapping[str, int], own: frozenset[int]) -> frozenset[int]:
    """Moves parameters to meta, keeping their identity.

    Returns:
        Numbers of the parameters that have to be kept, because other tensors were computed from them.
    """
    _refuse_overlaps(run, numbers)
    names = {number: name for name, number in numbers.items()}
    watched = _to_be_watched(run, names, own)
    for number in names.keys() - own:
        move_to_meta(run.made[number], names[number])
    run.forget()
    return _still_held(watched)


@dataclass(frozen=True)
class _Watched:
    """Memory that should be freed once its parameters are on meta."""

    storage: StorageWeakRef
    names: tuple[str, ...]
    unknown: frozenset[int]


def _to_be_watched(run: Withholding, names: Mapping[int, str], own: frozenset[int]) -> list[_Watched]:
    watched = []
    for memory in run.memories():
        used = [names[number] for number in sorted(memory.parameters) if number in names]
        if run.was_born(memory.storage) and not memory.parameters & own and (memory.withheld or used):
            watched.append(_Watched(weak(memory.storage), tuple(used), frozenset(memory.unknown)))
    return watched


def move_to_meta(parameter: nn.Parameter, name: str) -> None:
    """Drops the parameter's memory. Raises as :func:`replace_contents`."""
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    replace_contents(parameter, empty, name)


def _still_held(watched: list[_Watched]) -> frozenset[int]:
    """Numbers of the parameters that tensors other than parameters depend on."""
    held = [each for each in watched if not is_gone(each.storage)]
    if held:
        gc.collect()
        held = [each for each in held if not is_gone(each.storage)]
    for each in held:
        if each.names:
            raise UnsupportedModel(
                f"another tensor than a parameter shares the memory of {each.names[0]} (a buffer or an attribute that "
                "is a view of it, or its .data): keep a copy, or make the view in forward"
            )
    return frozenset().union(*(each.unknown for each in held))


def _refuse_overlaps(run: Withholding, numbers: Mapping[str, int]) -> None:
    names = {number: name for name, number in numbers.items()}
    for memory in run.memories():
        spans = sorted(_span(run.made[number], name) for number, name in names.items() if number in memory.parameters)
        for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
            if begin < end:
                raise UnsupportedModel(
                    f"{first} and {second} are two parameters in the same memory: make them one Parameter that both "
                    "modules have"
                )


def _span(tensor: Tensor, name: str) -> tuple[int, int, str]:
    """Index of the first element in its storage, and of the one after the last; and the name."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1 if tensor.numel() else 0), name


def replace_contents(parameter: nn.Parameter, data: Tensor, name: str) -> None:
    """Gives ``parameter`` the memory, device and strides of ``data``. The parameter stays the same object.

    Raises:
        UnsupportedModel: As :func:`refuse_held`.
    """
    refuse_held(parameter, name)
    other = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, other)


def refuse_held(parameter: nn.Parameter, name: str) -> None:
    """Refuses a parameter that cannot be given other contents.

    Raises:
        UnsupportedModel: The parameter has hooks, or a graph or a view holds it.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise UnsupportedModel(f"{name} has hooks while it is on meta: register them once it has memory")
    # The object is one use; a graph or a view is another.
    if parameter._use_count() > 1:  # type: ignore[attr-defined]
        raise UnsupportedModel(
            f"torch still uses {name}: an attribute or a buffer was computed from it with a graph, or is a view of it "
            "(use torch.no_grad() and .clone() in the constructor)"
        )
