"""Calls of a model and of its modules inside code that torch.compile traces.

Dynamo traces the body of a module's ``__call__`` and bypasses the stand-in that opens the window. If the window is open
already, that does no harm, as modules show faces. Otherwise the graph breaks at the call of a site or the root. That
call runs eagerly, and the code inside it is compiled as usual. ``fullgraph=True`` forbids breaks, so the caller gets a
:class:`StateError`.

One method of dynamo is replaced while a context is active. Dynamo's caches are reset when a context begins and when it
ends, since their guards do not check for windows.
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
    """The interface of a model's context that this module uses."""

    model: nn.Module
    core: _C.PagedModel
    layout: Layout


_lock = threading.Lock()
_models: dict[nn.Module, TracedModel] = {}  # by root and by modules of sites
_plain: Any = None


def join(model: TracedModel) -> None:
    """From now on dynamo does not trace calls of the model while its window is closed. :func:`leave` undoes it.

    Raises:
        MissingDependency: dynamo of this torch lacks the method that has to be replaced.
    """
    global _plain
    reset, variable = _dynamo()
    with _lock:
        _models.update(dict.fromkeys([model.model, *(site.module for site in model.layout.sites)], model))
        if _plain is None:
            _plain, variable.call_function = variable.call_function, _call_function
    reset()


def leave(model: TracedModel) -> None:
    """Undoes :func:`join`; no-op for a model that has not joined."""
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
    """The function that resets dynamo's caches, and dynamo's class for a module that it traces.

    The import is here because it takes seconds; programs with an optimizer of torch have imported dynamo already.
    """
    try:
        from torch._dynamo import reset_code_caches
        from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

        vars(UnspecializedNNModuleVariable)["call_function"]  # KeyError unless the class itself defines the method
        _refusal_type()
    except (ImportError, KeyError) as error:
        raise MissingDependency(
            "hydra_ext.offload() has to intercept the calls of modules that torch.compile traces, or else they would "
            f"compute with host parameters. Dynamo of torch {torch.__version__} does not allow that ({error}). "
            'Install a supported torch: pip install "torch==2.13.*"'
        ) from error
    return reset_code_caches, UnspecializedNNModuleVariable


@functools.cache
def _refusal_type() -> type[StateError]:
    """The error that makes dynamo break the graph; with ``fullgraph=True`` dynamo passes it on to the caller."""
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
            "inside hydra_ext.offload() the call has to bring weights to the device, outside of the graph. Compile the "
            "model in place, and call it from code that is not traced: model.compile(fullgraph=True); model(x). Or "
            "leave fullgraph=True out"
        )
    return _plain(variable, tx, args, kwargs)
