"""Functions as JSON: a module and a name, and the arguments that ``functools.partial`` binds.

Workers are other processes, perhaps on other machines, and a fleet may resume next week. So a job names its functions
and holds no code.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hydra_ext.errors import InvalidJob

_SCRIPT = "__hydra_job__"  # the name under which a worker imports the program that has defined a job
_in_worker = False
_PLAIN = (type(None), bool, int, float, str)


def describe(value: object, place: str) -> Any:
    """A function, or a value that ``functools.partial`` binds, as JSON.

    Args:
        place: What messages call the value, such as ``job 'a': model``.

    Raises:
        InvalidJob: The value cannot be found again by a name.
    """
    if type(value) in _PLAIN:  # a value of a subclass would come back as one of its base
        return value
    if type(value) is list:
        return [describe(each, f"{place}[{i}]") for i, each in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [describe(each, f"{place}[{i}]") for i, each in enumerate(value)]}
    if type(value) is dict:
        if not all(type(key) is str for key in value):
            raise InvalidJob(f"{place} is a dict with a key that is not a text: name its entries by texts")
        return {"dict": {key: describe(each, f"{place}[{key!r}]") for key, each in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, partial):
        return {
            "partial": describe(value.func, place),
            "arguments": [describe(each, f"{place}, argument {i}") for i, each in enumerate(value.args)],
            "keywords": {key: describe(each, f"{place}, {key}=") for key, each in value.keywords.items()},
        }
    return _named(value, place)


def _named(value: object, place: str) -> dict[str, str]:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(module, str) or not isinstance(name, str):
        raise InvalidJob(
            f"{place} is a {type(value).__name__}, which a worker cannot make again: give a function of a module, with "
            "functools.partial for its arguments, which may be numbers, texts, lists, dicts and dtypes"
        )
    if "<" in name:  # a lambda, or a function inside another one
        raise InvalidJob(
            f"{place} is {name}, which other processes cannot find by its name: move it to the top of a module, and "
            "bind what it takes from around it by functools.partial"
        )
    owner = sys.modules.get(module)
    if _attribute(owner, name) is not value:
        raise InvalidJob(
            f"{place} is called {module}.{name}, where something else is found: give it its own name there"
        )
    spec = getattr(owner, "__spec__", None)
    if module == "__main__" and spec is not None:  # of `python -m`
        module = spec.name
    if module != "__main__":
        return {"module": module, "name": name}
    file = getattr(owner, "__file__", None)
    if file is None:
        raise InvalidJob(
            f"{place} is {name} of an interactive session, which other processes cannot import: write it to a file, "
            "and import it from there"
        )
    return {"script": str(Path(file).resolve()), "name": name}


def resolve(described: Any) -> Any:
    """The value that :func:`describe` was given.

    Raises:
        InvalidJob: A module or a name in it does not exist here.
    """
    if isinstance(described, list):
        return [resolve(each) for each in described]
    if not isinstance(described, dict):
        return described
    if "tuple" in described:
        return tuple(resolve(described["tuple"]))
    if "dict" in described:
        return {key: resolve(each) for key, each in described["dict"].items()}
    if "dtype" in described:
        return getattr(torch, described["dtype"])
    if "partial" in described:
        function = resolve(described["partial"])
        keywords = {key: resolve(each) for key, each in described["keywords"].items()}
        return partial(function, *resolve(described["arguments"]), **keywords)
    where = str(described.get("module", described.get("script")))
    try:
        module = importlib.import_module(where) if "module" in described else _script(where)
    except ImportError as error:
        raise InvalidJob(
            f"{described['name']} of {where} cannot be imported here: {error}. Workers search the folders of sys.path "
            "that the fleet was started with"
        ) from error
    found = _attribute(module, described["name"])
    if found is None:
        raise InvalidJob(f"{where} has no {described['name']} any more: put it back, or start a new fleet")
    return found


def _attribute(owner: object, name: str) -> Any:
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner


def mark_worker() -> None:
    """Notes that this process is a worker."""
    global _in_worker
    _in_worker = True


def is_in_worker() -> bool:
    """Whether this process is a worker, which imports the program that has defined its job."""
    return _in_worker


def _script(path: str) -> ModuleType:
    """The program that has defined a job, imported under another name than ``__main__``, so that it does not start."""
    known = sys.modules.get(_SCRIPT)
    if known is not None and known.__file__ == path:
        return known
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is not None and str(Path(str(main.__file__)).resolve()) == path:  # type: ignore[union-attr]
        return sys.modules["__main__"]
    spec = importlib.util.spec_from_file_location(_SCRIPT, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_SCRIPT] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # re-raised: a module that is half imported must not be found again
        del sys.modules[_SCRIPT]
        raise
    return module


def shape_of(described: Any) -> Any:
    """The description without numbers that are not whole, such as a learning rate, which change no shape."""
    if isinstance(described, float):
        return "a number"
    if isinstance(described, list):
        return [shape_of(each) for each in described]
    if isinstance(described, dict):
        return {key: shape_of(each) for key, each in described.items()}
    return described
