"""Which modules are blocks: the pieces that a stage is made of.

What lies between the calls of blocks (residual sums, masks, the loss) is *glue*; it is never called as a module here,
and neither are containers: what they hold directly is glue too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from hydra_ext.errors import SplitError
from hydra_ext.tracing import not_traced

# A member of a list that itself holds lists is one block up to this share of the model's elements, else opened. So is a
# chain of modules of several classes; one of several layers also up to this share of the model's layers, since it may
# be that they compute long with few elements.
LARGEST_SHARE = 0.34
SEVERAL_LAYERS = 4

BlockCall = Callable[[str, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def find_blocks(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The blocks by their names, in the order in which the model holds them.

    A member of a list is a block, and so is a module that holds no list; a module that holds one is opened. Lists are
    a ``ModuleList``, a ``Sequential`` of at least two modules of one class, and one of several classes, or a
    ``ModuleDict`` with a forward, that is too large a share of the model (:data:`LARGEST_SHARE`).

    Args:
        names: modules to take as blocks instead.

    Raises:
        SplitError: a name that the model does not have, or one inside another.
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
    """Modules that have parameters themselves."""
    return sum(any(True for _ in inner.parameters(recurse=False)) for inner in module.modules())


def _is_called(module: nn.Module) -> bool:
    """Containers are not, but for those that a program has given a forward."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_list(module: nn.Module) -> bool:
    """Whether its members are the pieces: those of a ModuleList are called one by one, whatever they are."""
    if not any(True for _ in module.parameters()) or isinstance(module, ParametrizationList):
        return False
    if isinstance(module, nn.Sequential):
        return len(module) > 1 and len({type(member) for member in module}) == 1
    return isinstance(module, nn.ModuleList)


def _is_large_chain(module: nn.Module, largest: float, most: float) -> bool:
    """Whether it is of several pieces, called one after another, and of too many elements or layers for one block."""
    if not (isinstance(module, (nn.Sequential, nn.ModuleDict)) and _is_called(module)):
        return False
    several = sum(_size(child) > 0 for child in module.children()) > 1
    return several and (_size(module) > largest or _layers(module) >= most)


@contextmanager
def blocks_call(blocks: Mapping[str, nn.Module], call: BlockCall) -> Iterator[None]:
    """Within it ``call(name, block, forward, args, kwargs)`` runs where a block's ``forward`` would.

    The block's own hooks run around it as ever, wherever the call is made.
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
