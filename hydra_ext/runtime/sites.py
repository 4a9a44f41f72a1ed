"""Sites: calls of modules that announce their blocks to the core, in forward and in backward.

A site's call has a stand-in (:mod:`hydra_ext.calls`). It pins the blocks before the first of the user's hooks and
releases them after the last, on every way out, ``KeyboardInterrupt`` included.

In backward, a hook on the node that made a site's output announces the site before that node runs. Autograd runs nodes
in the reverse order of their creation, so the backward of later sites has ended by then. The hook holds no tensor and
no node, which would keep the graph alive.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.activations.call_state import is_repeating
from hydra_ext.blocks import Layout, Site
from hydra_ext.calls import StandIn, standing_in
from hydra_ext.errors import UnsupportedModel
from hydra_ext.runtime.rounds import fibers
from hydra_ext.state.arguments import tensors_in
from hydra_ext.tracing import not_traced


class SiteListener(Protocol):
    """The context a site belongs to.

    Attributes:
        version: Number of the weight version that calls use; 0 if there is only one.
    """

    core: _C.PagedModel
    version: int

    def forward_kind(self) -> _C.PassKind: ...


class SiteCall(StandIn):
    """Stands in for a site's call."""

    def __init__(self, listener: SiteListener, site: Site, number: int) -> None:
        super().__init__(site.module)
        self._listener = listener
        self._site = site
        self._number = number
        self._blocks = [list(site.blocks), *map(list, site.others)]  # by version
        self._window = listener.core.window
        self._kind = listener.forward_kind

    # Not traced: the blocks are pinned around the compiled region. The call inside is compiled as usual.
    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fiber = fibers.current()
        if fiber is None or fiber.owner is not self._listener:
            return self._visit(args, kwargs)
        return fiber.call(self._number, self._site, self._visit, args, kwargs)

    @not_traced
    def _visit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        window = self._window
        visit = _C.SiteVisit()
        failed = True
        try:
            # Inside the try: an interrupt that arrives as soon as the call returns finds the visit begun.
            window.begin_visit(visit, self._blocks[self._listener.version], self._kind())
            output = self.inner(*args, **kwargs)
            # The graph of a repetition is dropped at once; hooks on its nodes would keep its inputs alive for a while.
            if torch.is_grad_enabled() and not is_repeating():
                window.returns(visit, [output] if type(output) is torch.Tensor else list(tensors_in(output)))
            failed = False
            return output
        finally:
            window.end_visit(visit, failed=failed)


class TableCall(SiteCall):
    """Stands in for the call of a table's module, which has no blocks: it opens a window if none is open."""

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) if self._listener.core.gate.open else self._visit(args, kwargs)


def install(listener: SiteListener, layout: Layout) -> None:
    for table in layout.tables:
        for module in table.modules:
            TableCall(listener, Site(table.name, module, ()), -1).install()
    for number, site in enumerate(layout.sites):
        if type(site.module).__call__ is not nn.Module.__call__ and not _calls_through(type(site.module)):
            raise UnsupportedModel(
                f"'{site.name}' is a {type(site.module).__name__}, whose __call__ does not run nn.Module's; "
                "name the module around it in blocks="
            )
        SiteCall(listener, site, number).install()


def remove(layout: Layout) -> None:
    for module in (
        *(site.module for site in layout.sites),
        *(each for table in layout.tables for each in table.modules),
    ):
        for call in list(standing_in(module)):
            if isinstance(call, SiteCall):
                call.remove()


def _calls_through(cls: type[nn.Module]) -> bool:
    """A class with a ``__call__`` of its own is taken to call nn.Module's; scripted modules do not."""
    return not issubclass(cls, torch.jit.ScriptModule)
