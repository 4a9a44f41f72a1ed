"""Calls of a model's parts in what torch.compile traces.

Dynamo traces what is inside a module's ``__call__`` and passes by the stand-in that opens the window. Where the window
is open already, that is as well: faces are in place. Elsewhere the graph is broken at the call of a site, which is then
made as it is, and what is inside it is compiled as usual. With ``fullgraph=True``, dynamo raises ``Unsupported``.

One method of dynamo's is replaced while a context is active. What was traced before is traced anew, with the first call
inside the context as after it: its guards know nothing of windows.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import nn

from hydra_ext import _C
from hydra_ext.blocks import Layout


class TracedModel(Protocol):
    """What is needed of a model's context."""

    core: _C.PagedModel
    layout: Layout


_lock = threading.Lock()
_models: dict[nn.Module, TracedModel] = {}  # by site
_plain: Any = None


def join(model: TracedModel) -> None:
    """From now on calls of its sites are not traced while its window is closed. :func:`leave` undoes it."""
    global _plain
    dynamo, variable = _dynamo()
    with _lock:
        _models.update({site.module: model for site in model.layout.sites})
        if _plain is None:
            _plain, variable.call_function = variable.call_function, _call_function
    dynamo.reset_code_caches()


def leave(model: TracedModel) -> None:
    global _plain
    dynamo, variable = _dynamo()
    with _lock:
        for module in [module for module, owner in _models.items() if owner is model]:
            del _models[module]
        if not _models and variable.call_function is _call_function:
            variable.call_function, _plain = _plain, None
    dynamo.reset_code_caches()


def _dynamo() -> tuple[Any, Any]:
    """Imported here: it takes seconds, and torch's optimizers have it imported already."""
    import torch._dynamo
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    return torch._dynamo, UnspecializedNNModuleVariable


def _call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    owner = _models.get(variable.value)
    if owner is not None and not owner.core.window_open:
        from torch._dynamo.exc import unimplemented

        unimplemented(
            gb_type="call of a part of an offloaded model",
            context=f"{type(variable.value).__name__}, outside the forward of the model",
            explanation="Inside hydra_ext.offload() such a call brings weights to the device, which cannot be traced. "
            "Here it was to be traced as a part of one graph, and would have computed with host parameters.",
            hints=[
                "Compile the whole model, and call that: compiled = torch.compile(model); compiled(x).",
                "Or leave fullgraph=True out.",
            ],
        )
    return _plain(variable, tx, args, kwargs)
