"""Calls of a model, and of its parts, in what torch.compile traces.

Dynamo traces what is inside a module's ``__call__`` and passes by the stand-in that opens the window. Where the window
is open already, that is as well: faces are in place. Elsewhere the graph is broken at the call of a site or the root,
which is then made as it is, and what is inside it is compiled as usual. With ``fullgraph=True`` there can be no break,
and the caller gets a :class:`StateError`.

One method of dynamo's is replaced while a context is active. What was traced before is traced anew, with the first call
inside the context as after it: its guards know nothing of windows.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.errors import MissingDependency, StateError


class TracedModel(Protocol):
    """What is needed of a model's context."""

    model: nn.Module
    core: _C.PagedModel
    layout: Layout


_lock = threading.Lock()
_models: dict[nn.Module, TracedModel] = {}  # by root and site
_plain: Any = None


def join(model: TracedModel) -> None:
    """From now on calls of it are not traced while its window is closed. :func:`leave` undoes it.

    Raises:
        MissingDependency: this torch has not what it takes.
    """
    global _plain
    reset, variable = _dynamo()
    with _lock:
        _models.update(dict.fromkeys([model.model, *(site.module for site in model.layout.sites)], model))
        if _plain is None:
            _plain, variable.call_function = variable.call_function, _call_function
    reset()


def leave(model: TracedModel) -> None:
    """Does nothing to one that has not joined."""
    global _plain
    with _lock:
        mine = [module for module, owner in _models.items() if owner is model]
    if not mine:
        return
    reset, variable = _dynamo()
    with _lock:
        for module in mine:
            del _models[module]
        if not _models and variable.call_function is _call_function:
            variable.call_function, _plain = _plain, None
    reset()


def _dynamo() -> tuple[Any, Any]:
    """How to have everything traced anew, and the class of what dynamo traces a module as.

    Imported here: it takes seconds, and torch's optimizers have it imported already.
    """
    try:
        from torch._dynamo import reset_code_caches
        from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

        vars(UnspecializedNNModuleVariable)["call_function"]  # is there, and its own
        _refusal_type()
    except (ImportError, KeyError) as error:
        raise MissingDependency(
            "hydra_ext.offload() has to see the calls of modules that torch.compile traces: such models would compute "
            f"with host parameters. In torch {torch.__version__} dynamo does not have what that takes ({error}). "
            'Install one that does: pip install "torch==2.13.*"'
        ) from error
    return reset_code_caches, UnspecializedNNModuleVariable


@functools.cache
def _refusal_type() -> type[StateError]:
    """Dynamo breaks the graph where one is raised; where it must not, it lets it through to the caller."""
    from torch._dynamo.exc import Unsupported

    class CallInGraph(StateError, Unsupported):
        def __reduce__(self) -> tuple[Any, ...]:
            return StateError, self.args  # other processes cannot import this class

    return CallInGraph


def _call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    owner = _models.get(variable.value)
    # The root's call does more than open a window: it brings its arguments to the device.
    if owner is not None and (variable.value is owner.model or not owner.core.gate.open):
        raise _refusal_type()(
            f"a call of a {type(variable.value).__name__} cannot be a part of one graph, as fullgraph=True asks: "
            "inside hydra_ext.offload() it brings weights to the device, or else would compute with host parameters. "
            "Compile the model in place, and call it where nothing is traced: model.compile(fullgraph=True); model(x). "
            "Or leave fullgraph=True out"
        )
    return _plain(variable, tx, args, kwargs)
