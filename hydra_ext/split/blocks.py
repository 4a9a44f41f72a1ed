"""Finds the blocks of a model: the modules that a stage is made of.

Code between the calls of blocks (residual sums, masks, the loss) is *glue*. Containers are not blocks: their own
operations, and the parameters that they hold directly, belong to the glue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hydra_ext.errors import SplitError
from hydra_ext.tracing import not_traced

# A list's member that itself holds lists is one block if it has at most this share of the model's elements; otherwise
# its own members are the blocks. The same holds for a chain of modules of several classes. Such a chain must also have
# less than this share of the model's layers (or fewer than SEVERAL_LAYERS): layers with few elements can take long.
LARGEST_SHARE = 0.34
SEVERAL_LAYERS = 4

BlockCall = Callable[[str, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def find_blocks(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The blocks by their names, in the order in which the model holds them.

    A block is a member of a list, or a module that holds no list. The search goes on inside all other modules, and
    inside a member that holds lists and is too large for one block (:data:`LARGEST_SHARE`). Modules without parameters,
    and containers without a forward, are no blocks.

    These modules are lists:

    - a ``ModuleList``;
    - a ``Sequential`` of at least two modules, all of one class;
    - a ``Sequential`` of several classes, or a ``ModuleDict`` with a forward, if it is too large for one block.

    Args:
        names: Names of the modules to take as blocks. If given, nothing is searched.

    Raises:
        SplitError: A name is not the name of a module, or lies inside another one.
    """
    if names is not None:
        return _chosen(model, names)
    largest, most = LARGEST_SHARE * _size(model), max(SEVERAL_LAYERS, LARGEST_SHARE * _layers(model))
    lists = {module for module in model.modules() if _is_list(module) or _is_large_chain(module, largest, most)}
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module, is_member: bool) -> None:
        size = _size(module)
        if size == 0 or module in seen:
            return
        seen.add(module)
        holds_lists = not lists.isdisjoint(module.modules())
        if name and (not holds_lists or (is_member and size <= largest)) and _is_called(module):
            found[name] = module
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, module in lists)

    visit("", model, False)
    return found


def _chosen(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise SplitError(f"blocks: {name!r} is not the name of a module in {type(model).__name__}")
        outer = next((other for other in names if name.startswith(other + ".")), None)
        if outer is not None:
            raise SplitError(f"blocks: {name!r} lies inside {outer!r}, which is a block too: name one of the two")
    return {name: modules[name] for name in names}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _layers(module: nn.Module) -> int:
    """The number of modules that have parameters of their own."""
    return sum(any(True for _ in inner.parameters(recurse=False)) for inner in module.modules())


def _is_called(module: nn.Module) -> bool:
    """Whether the module has a forward; containers have none unless the program defines one."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_list(module: nn.Module) -> bool:
    """Whether its members are blocks. Those of a ``ModuleList`` are called one by one, even if their classes differ."""
    if not any(True for _ in module.parameters()) or isinstance(module, ParametrizationList):
        return False
    if isinstance(module, nn.Sequential):
        return len(module) > 1 and len({type(member) for member in module}) == 1
    return isinstance(module, nn.ModuleList)


def _is_large_chain(module: nn.Module, largest: float, most: float) -> bool:
    """Whether it calls several members in turn, and has too many elements or layers for one block."""
    if not (isinstance(module, (nn.Sequential, nn.ModuleDict)) and _is_called(module)):
        return False
    several = sum(_size(child) > 0 for child in module.children()) > 1
    return several and (_size(module) > largest or _layers(module) >= most)


@contextmanager
def blocks_call(blocks: Mapping[str, nn.Module], call: BlockCall) -> Iterator[None]:
    """Inside, ``call(name, block, forward, args, kwargs)`` runs in place of each block's ``forward``.

    The block's own hooks run around it as usual.
    """
    missing = object()
    before = {name: block.__dict__.get("forward", missing) for name, block in blocks.items()}
    try:
        for name, block in blocks.items():
            block.__dict__["forward"] = _replacement(name, block, block.forward, call)
        yield
    finally:
        for name, block in blocks.items():
            if before[name] is missing:
                block.__dict__.pop("forward", None)
            else:
                block.__dict__["forward"] = before[name]


def _replacement(name: str, block: nn.Module, forward: Callable[..., Any], call: BlockCall) -> Callable[..., Any]:
    @not_traced
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(name, block, forward, args, kwargs)

    return replaced
