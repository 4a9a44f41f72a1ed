"""Calls of a model and of its modules inside code that torch.compile traces.

Dynamo traces the body of a module's ``__call__`` and bypasses the stand-in that opens the window and fetches the block.
So the graph breaks at the call of a site or the root. That call runs eagerly, and the code inside it is compiled as
usual: each block becomes a graph of its own. dynamo begins no graph in code of torch itself, so blocks that are modules
of ``torch.nn`` run as they are. ``fullgraph=True`` forbids breaks. With a backend that runs one operator after the
other, a graph inside an open window may have several blocks, since operators fetch what is absent. Kernels of other
backends read memory that they take to be there, so the caller gets a :class:`StateError`.

One method of dynamo is replaced while a context is active, and from then on none of our code between graphs is traced.
Dynamo's caches are reset when a context begins and when it ends, since their guards do not check for windows.
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


_RUNS_OPERATORS = ("eager", "aot_eager")  # backends
# Packages whose code runs between graphs. Not runtime itself: a call of the root, which may be compiled, is there.
_NOT_TRACED = ("activations", "heads", "optim", "runtime.placement", "runtime.rounds", "stash", "state", "tables")

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
    _leave_our_code_alone()
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


def why_absent(error: RuntimeError) -> StateError | None:
    """What to write in place of a compiled graph that has read weights which were not there; None for other errors."""
    said, _, frames = str(error).partition("\n")
    if not said.startswith("hydra_ext: the device parameter ") or "Exception raised from" not in frames:
        return None
    name = said.split("'")[1]
    return StateError(
        f"a compiled graph reads '{name}' outside of the call of the module that has it, and kernels do not wait for "
        "weights: name the module that reads it in blocks=, call the one that has it, or leave this code out of graphs "
        "with torch.compiler.disable(recursive=False)"
    )


def _dynamo() -> tuple[Any, Any]:
    """The function that resets dynamo's caches, and dynamo's class for a module that it traces.

    The import is here because it takes seconds; programs with an optimizer of torch have imported dynamo already.
    """
    try:
        from torch._dynamo import reset_code_caches, trace_rules
        from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

        vars(UnspecializedNNModuleVariable)["call_function"]  # KeyError unless the class itself defines the method
        _refusal_type()
        trace_rules.add  # noqa: B018 - AttributeError without it
    except (ImportError, KeyError, AttributeError) as error:
        raise MissingDependency(
            "hydra_ext.offload() has to intercept the calls of modules that torch.compile traces, or else they would "
            f"compute with host parameters. Dynamo of torch {torch.__version__} does not allow that ({error}). "
            'Install a supported torch: pip install "torch==2.13.*"'
        ) from error
    return reset_code_caches, UnspecializedNNModuleVariable


@functools.cache
def _leave_our_code_alone() -> None:
    from torch._dynamo import trace_rules

    for package in _NOT_TRACED:
        trace_rules.add(f"hydra_ext.{package}")


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
    if owner is None:
        return _plain(variable, tx, args, kwargs)
    # The root's call does more than open a window: it brings its arguments to the device.
    if variable.value is owner.model or not owner.core.gate.open:
        raise _refusal_type()(
            f"a call of a {type(variable.value).__name__} cannot be a part of one graph, as fullgraph=True asks: "
            "inside hydra_ext.offload() the call has to bring weights to the device, outside of the graph. Compile the "
            "model in place, and call it from code that is not traced: model.compile(fullgraph=True); model(x). Or "
            "leave fullgraph=True out"
        )
    if not tx.one_graph or getattr(tx.output.compiler_fn, "_compiler_name", None) not in _RUNS_OPERATORS:
        raise _refusal_type()(
            f"a {type(variable.value).__name__} cannot be a part of a larger graph, as fullgraph=True asks: inside "
            "hydra_ext.offload() its weights are fetched when it is called, and compiled kernels would not wait for "
            "them. Leave fullgraph=True out, so that each block becomes a graph of its own"
        )
    return _plain(variable, tx, args, kwargs)
