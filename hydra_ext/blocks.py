"""Blocks: which parameters move together, and which modules announce their use.

A *block* is a set of parameters; a *site* is a module whose call uses blocks. Both are found for any
:class:`torch.nn.Module` by size alone. A module becomes one block if it is small enough and is called as a module.
Otherwise its own parameters form a block, and its children are visited one by one. A parameter that several modules
share belongs to the block of the first one. Each of these modules uses that block.

Inner tensors of composites (:mod:`hydra_ext.state.composites`) are in blocks in the places of their parameters. So are
*paged buffers*, which are too large to stay on the device: they are treated as frozen parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from hydra_ext.calls import is_compiled
from hydra_ext.errors import UnsupportedModel
from hydra_ext.state.composites import Composite, composites_of

# A block is at most this part of the model, where modules allow it, and this part of the budget.
_BLOCKS_PER_MODEL = 16
_BLOCKS_PER_BUDGET = 4

# Containers whose own __call__ never runs: their parents call the elements, or read the parameters.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Block:
    """Tensors that move together, with their names in the model: parameters, inner tensors and paged buffers."""

    name: str
    parameters: tuple[tuple[str, torch.Tensor], ...]

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for _, parameter in self.parameters)


@dataclass(frozen=True)
class Site:
    """A module whose forward uses the blocks with these indices.

    Attributes:
        others: Blocks of each version of the weights but the first, if there are several versions.
    """

    name: str
    module: nn.Module
    blocks: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Table:
    """A weight of which rows move, not the whole: it is in no block.

    Attributes:
        name: Its name in the model.
        modules: Those that look rows up in it.
        sparse: Whether they ask for sparse gradients.
        dtype: Dtype of rows on the device; None for the weight's own.
        gradient_dtype: Dtype in which gradients of rows leave the device; None for their own.
    """

    name: str
    weight: nn.Parameter
    modules: tuple[nn.Module, ...]
    sparse: bool
    dtype: torch.dtype | None = None
    gradient_dtype: torch.dtype | None = None


@dataclass
class Layout:
    """Blocks that have each parameter with elements exactly once, and a site for every module that uses a block.

    Attributes:
        tables: Parameters that are in no block, because they move by rows.
        composites: Parameters of which blocks have the inner tensors.
        buffers: Paged buffers by their names.
        stay: Tensors that stay on the device: inner tensors that several composites share, that are buffers, too, or
            without elements.
    """

    blocks: list[Block] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    tables: tuple[Table, ...] = ()
    composites: tuple[Composite, ...] = ()
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stay: tuple[torch.Tensor, ...] = ()


def block_limit(total: int, budget: int) -> int:
    """Most bytes of a block, where modules allow it: a part of the model's bytes, and of the budget."""
    return min(total // _BLOCKS_PER_MODEL, budget // _BLOCKS_PER_BUDGET)


def discover(
    model: nn.Module,
    *,
    largest_bytes: int,
    modules: Sequence[nn.Module | str] | None = None,
    tables: Sequence[Table] = (),
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> Layout:
    """Splits a model into blocks of at most ``largest_bytes`` each, where its modules allow it.

    Args:
        model: Any module.
        largest_bytes: Most bytes of parameters of a module that becomes one block; larger ones are split.
        modules: Modules, or their names, that become blocks whatever their size. Other blocks are found by size. Those
            of an ``nn.ModuleList`` become one block together.
        tables: Weights that are left out of the blocks.
        buffers: Buffers that move with the parameters, by their names.

    Raises:
        UnsupportedModel: ``modules`` names a module that the model does not have, or one inside another.
    """
    tensors = _Tensors(model, {table.weight for table in tables}, buffers or {})
    finder = _Finder(tensors, largest_bytes, chosen(model, modules or ()))
    finder.visit("", model)
    return replace(
        finder.layout(), tables=tuple(tables), composites=tensors.composites, buffers=buffers or {}, stay=tensors.stay
    )


def chosen(model: nn.Module, modules: Iterable[nn.Module | str]) -> set[nn.Module]:
    """The modules that ``blocks=`` names. See :func:`discover`."""
    by_name = dict(model.named_modules())
    named: set[nn.Module] = set()
    for wanted in modules:
        module = by_name.get(wanted) if isinstance(wanted, str) else wanted
        if module is None or all(module is not known for known in by_name.values()):
            raise UnsupportedModel(
                f"blocks={wanted!r} is not a module of {type(model).__name__}: name one of its modules"
            )
        named.add(module)
    for outer in named:
        for inner in outer.modules():
            if inner is not outer and inner in named:
                raise UnsupportedModel(
                    f"blocks: a {type(inner).__name__} lies inside a {type(outer).__name__} that is a block too; "
                    "name one of the two"
                )
    return named


class _Tensors:
    """What moves of each module."""

    def __init__(
        self, model: nn.Module, left_out: Collection[torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self.composites = tuple(composites_of(model))
        uses = Counter(id(inner) for each in self.composites for inner in each.inner.values())
        inside = [inner for each in self.composites for inner in each.inner.values()]
        registered = {id(buffer) for buffer in model.buffers()}
        self.stay = tuple(
            {id(t): t for t in inside if uses[id(t)] > 1 or t.numel() == 0 or id(t) in registered}.values()
        )
        self._left_out = {id(tensor) for tensor in (*left_out, *self.stay)}
        self._inner = {id(each.parameter): tuple(each.inner.values()) for each in self.composites}
        self._paged = {id(buffer) for buffer in buffers.values()}
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.names |= {
            id(inner): f"{each.name}.{path}" if path else each.name
            for each in self.composites
            for path, inner in each.inner.items()
        }
        self.names |= {id(buffer): name for name, buffer in buffers.items()}

    def inside(self, module: nn.Module) -> list[torch.Tensor]:
        """Of a module and those in it."""
        return self._moved(module.parameters(), module.buffers())

    def own(self, module: nn.Module) -> list[torch.Tensor]:
        """Of a module alone; lists of parameters in it count as its own."""
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        return self._moved([*own, *_read_by_parent(module)], buffers)

    def _moved(self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        found = [inner for parameter in parameters for inner in self._inner.get(id(parameter), (parameter,))]
        found += [buffer for buffer in buffers if id(buffer) in self._paged]
        return [tensor for tensor in found if tensor.numel() > 0 and id(tensor) not in self._left_out]


class _Finder:
    def __init__(self, tensors: _Tensors, largest_bytes: int, named: set[nn.Module]) -> None:
        self._tensors = tensors
        self._largest = largest_bytes
        self._chosen = named
        self._block_of: dict[int, int] = {}  # by the identity of a tensor
        self._blocks: list[Block] = []
        self._users: list[tuple[str, nn.Module, list[torch.Tensor]]] = []
        self._seen: set[nn.Module] = set()

    def layout(self) -> Layout:
        layout = Layout(blocks=self._blocks)
        for name, module, parameters in self._users:
            blocks = tuple(dict.fromkeys(self._block_of[id(parameter)] for parameter in parameters))
            layout.sites.append(Site(name=name, module=module, blocks=blocks))
        return layout

    def visit(self, name: str, module: nn.Module) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        parameters = self._tensors.inside(module)
        if not parameters:
            return
        whole = (
            module in self._chosen
            or sum(p.nbytes for p in parameters) <= self._largest
            or (
                # Calls inside a compiled region are not seen, so everything that it reads is pinned around it.
                bool(name) and is_compiled(module)
            )
        )
        if whole and not isinstance(module, _CONTAINERS):
            self._seen.update(module.modules())
            self._use(name, module, parameters)
            return
        if module in self._chosen and isinstance(module, nn.ModuleList):
            self._use_together(name, module, parameters)
            return
        own = self._tensors.own(module)
        if own:
            self._use(name, module, own)
        for child_name, child in module.named_children():
            if not isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                self.visit(f"{name}.{child_name}" if name else child_name, child)

    def _use_together(self, name: str, module: nn.Module, parameters: list[torch.Tensor]) -> None:
        """All modules in a list, and in containers in it, use one block."""
        for child_name, child in module.named_children():
            if isinstance(child, _CONTAINERS):
                self._use_together(f"{name}.{child_name}", child, parameters)
            elif child not in self._seen:
                self._seen.update(child.modules())
                self._use(f"{name}.{child_name}", child, parameters)

    def _use(self, name: str, module: nn.Module, parameters: list[torch.Tensor]) -> None:
        unique = {id(parameter): parameter for parameter in parameters}
        new = [identity for identity in unique if identity not in self._block_of]
        if new:
            index = len(self._blocks)
            named = tuple((self._tensors.names[identity], unique[identity]) for identity in new)
            self._blocks.append(Block(name or "(root)", named))
            self._block_of.update(dict.fromkeys(new, index))
        self._users.append((name, module, list(unique.values())))


def _read_by_parent(module: nn.Module) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            found += [p for p in child.parameters() if isinstance(p, torch.Tensor) and p.numel() > 0]
    return found
