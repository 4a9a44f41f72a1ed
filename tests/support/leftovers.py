"""Finds state that a test leaves behind, and that could make another test fail. Names it, and ends or restores it.

``Now()`` is taken before a test, and ``left_since(before)`` is called after it. Both are quick if the test left
nothing: only differences are examined closely.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.variable import Variable

import hydra_ext
from hydra_ext import _C
from hydra_ext.runtime import engine, root

_REPOSITORY = Path(__file__).parents[2]
PATIENCE = 30.0  # seconds for threads and processes that are about to end, also on a busy machine
_log = logging.getLogger(__name__)
_engine_holder: Any = Variable
_HOOKS: Any = torch._C._autograd

# ---- values, which have to be unchanged -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A value that exists once in the process."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _attribute(owner: Any, name: str) -> Value:
    return Value(f"{owner.__name__}.{name}", lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _handler(number: signal.Signals) -> Value:
    return Value(
        f"the handler of {number.name}",
        lambda: signal.getsignal(number),
        lambda handler: signal.signal(number, handler),
    )


_SET_BY_LIBRARIES = (b"PYTEST_CURRENT_TEST", b"TORCHINDUCTOR_CACHE_DIR")  # when they are used first


def _environment() -> dict[bytes, bytes]:
    kept: dict[bytes, bytes] = os.environ._data.copy()  # type: ignore[attr-defined]  # as it is: nothing is decoded
    for name in _SET_BY_LIBRARIES:
        kept.pop(name, None)
    return kept


def _set_environment(wanted: dict[bytes, bytes]) -> None:
    for name in _environment().keys() - wanted.keys():
        del os.environb[name]
    os.environb.update(wanted)


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


VALUES = (
    Value("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    Value("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    Value(
        "torch.get_default_device()",
        lambda: getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        lambda context: torch.set_default_device(None if context is None else context.device),
    ),
    Value("torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled),
    Value("torch.is_anomaly_enabled()", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Value(
        "torch.use_deterministic_algorithms()",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    Value("autocast", lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    Value(
        "autocast's dtype",
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
    ),
    Value("autocast's cache", torch.is_autocast_cache_enabled, lambda on: torch.set_autocast_cache_enabled(on)),
    Value(
        "torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    Value("the flash kernel", torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    Value(
        "the memory-efficient kernel",
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    Value("the math kernel", torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    _attribute(_engine_holder, "_execution_engine"),
    _attribute(nn.Module, "__setattr__"),
    _attribute(nn.Module, "__call__"),
    Value(
        "torch.nn.Parameter.__new__",
        lambda: nn.Parameter.__dict__["__new__"],
        lambda new: setattr(nn.Parameter, "__new__", new),
    ),
    _attribute(torch, "set_autocast_cache_enabled"),
    *(_handler(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1)),
    Value("the working folder", os.getcwd, os.chdir),
    Value("the environment", _environment, _set_environment),
)

# ---- objects, which must not become more ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Things:
    """A kind of object that may exist several times.

    Attributes:
        there: Returns the objects that exist.
        name: Returns an object's name; None for one that does not concern us.
        end: Ends one.
    """

    there: Callable[[], Iterable[Any]]
    name: Callable[[Any], str | None]
    end: Callable[[Any], Any]


def _contexts() -> list[Any]:
    installed = engine._installed
    return [] if installed is None else list(installed.participants)


_swapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_entered: weakref.WeakSet[hydra_ext.stash] = weakref.WeakSet()
_swap, _enter = root.swap, hydra_ext.stash.__enter__


def _noted_swap(module: nn.Module, context: root.RootContext) -> None:
    _swapped.add(module)
    _swap(module, context)


def _noted_enter(stash: hydra_ext.stash) -> hydra_ext.stash:
    _entered.add(stash)
    return _enter(stash)


def watch() -> None:
    """Records from now on which modules have their class swapped, and which stashes were entered."""
    root.swap = _noted_swap
    hydra_ext.stash.__enter__ = _noted_enter  # type: ignore[method-assign]


def _still(known: weakref.WeakSet[Any], holds: Callable[[Any], bool]) -> list[Any]:
    """Returns the known objects for which the condition holds, and forgets the others."""
    if len(known) == 0:
        return []
    for one in [*known]:
        if not holds(one):
            known.discard(one)
    return [*known]


def _end_stash(stash: hydra_ext.stash) -> None:
    while stash._entered():
        stash.__exit__(None, None, None)


def _name_of_thread(thread: threading.Thread) -> str | None:
    # Torch's threads that have called Python stay, and so does the thread that tqdm starts with its first bar.
    if isinstance(thread, threading._DummyThread) or type(thread).__module__.startswith("tqdm."):
        return None
    thread.join(PATIENCE)
    return f"the thread '{thread.name}'" if thread.is_alive() else None


def _children() -> list[int]:
    """Returns the children of the main thread, which also has those of ended threads."""
    number = os.getpid()
    with open(f"/proc/{number}/task/{number}/children", "rb", buffering=0) as file:
        return [*map(int, file.read().split())]


def _command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def _name_of_child(child: int) -> str | None:
    if child in (resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid):  # type: ignore[attr-defined]
        return None
    try:
        while not (command := _command_of(child)) and _state_of(child) != "Z":
            pass  # it has just begun
    except FileNotFoundError:
        return None
    return None if "torch/_inductor/compile_worker" in command else f"the process {child}: {command or 'unreaped'}"


def _end_child(child: int) -> None:
    for known in multiprocessing.active_children():
        if known.pid == child:
            known.kill()
            known.join(PATIENCE)
            return
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _descriptors() -> list[str]:
    """Returns the open descriptors, without that of the listing itself: the lowest free one, as before."""
    found = os.listdir("/proc/self/fd")
    own = os.dup(2)
    os.close(own)
    return [name for name in found if name != str(own)]


def _name_of_descriptor(number: str) -> str | None:
    """Names files and folders, but not sockets, pipes and fonts, which libraries keep."""
    try:
        mode = os.fstat(int(number)).st_mode
        path = os.readlink(f"/proc/self/fd/{number}")
        ours = (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) and not path.endswith(".ttf")
        return f"open: {path}" if ours else None
    except OSError:  # it was closed meanwhile
        return None


_PASSING = {"__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache", ".mypy_cache", ".git", "build"}
_PASSING_STARTS = ("torchinductor_", "pymp-", "pytest-cache-files-")  # libraries keep these as long as the process


_listed: dict[str, tuple[int, list[str]]] = {}


def _files() -> list[str]:
    """Returns the files in the temporary folder and the repository, and shared memory with our process id."""
    found: list[str] = []
    for folder in (str(_REPOSITORY), f"{_REPOSITORY}/tests", tempfile.gettempdir(), "/dev/shm"):
        changed = os.stat(folder).st_mtime_ns
        if _listed.get(folder, (0, []))[0] != changed:
            _listed[folder] = changed, [f"{folder}/{name}" for name in os.listdir(folder)]
        found += _listed[folder][1]
    return found


def _name_of_file(path: str) -> str | None:
    name = os.path.basename(path)
    passing = name in _PASSING or name.startswith(_PASSING_STARTS) or not os.path.lexists(path)
    passing = passing or (path.startswith("/dev/shm/") and f"_{os.getpid()}_" not in name)  # another process'
    return None if passing else f"the file {path}"


def _charges() -> list[str]:
    return ["the thread's account"] if _C.on_simulated_device(torch.empty(1, device="cpu")) else []


def _hooks() -> list[Any]:
    top = _HOOKS._top_saved_tensors_default_hooks(True)
    return [] if top is None else [id(top[0])]


def _modes() -> list[str]:
    functions = range(torch._C._len_torch_function_stack())
    operations = range(torch._C._len_torch_dispatch_stack())
    return [*(f"function mode {n}" for n in functions), *(f"dispatch mode {n}" for n in operations)]


def _end_mode(mode: str) -> None:
    stack = torch._C._pop_torch_function_stack if mode.startswith("function") else torch._C._pop_torch_dispatch_stack
    stack()


def _groups() -> list[str]:
    return ["torch.distributed's process group"] if dist.is_available() and dist.is_initialized() else []


# The order in which objects are ended.
THINGS = (
    Things(
        _contexts,
        lambda run: f"autograd's engine is wrapped: {type(run).__name__} of a {type(run.model).__name__}",
        lambda run: run.close(),
    ),
    Things(
        lambda: _still(_entered, lambda stash: stash._inside > 0),
        lambda _: "a stash is entered",
        _end_stash,
    ),
    Things(
        lambda: _still(_swapped, root.is_swapped),
        lambda module: f"the class of a {type(module).__name__} is swapped",
        root.restore,
    ),
    Things(_charges, lambda name: f"{name} with a simulated device", lambda _: _C.suspend_charging()),
    Things(_hooks, lambda _: "hooks of saved tensors", lambda _: _HOOKS._pop_saved_tensors_default_hooks()),
    Things(_modes, lambda name: f"a {name}", _end_mode),
    Things(_groups, str, lambda _: dist.destroy_process_group()),
    Things(threading.enumerate, _name_of_thread, lambda thread: thread.join(PATIENCE)),
    Things(_children, _name_of_child, _end_child),
    Things(_descriptors, _name_of_descriptor, lambda _: None),
    Things(_files, _name_of_file, lambda _: None),
)

# ---- before and after -----------------------------------------------------------------------------------------------


class Now:
    """The present objects and values."""

    def __init__(self) -> None:
        self.values = [value.read() for value in VALUES]
        self.things = [set(things.there()) for things in THINGS]


def left_since(before: Now) -> list[str]:
    """Names everything that is new since then, and ends or restores it if possible."""
    after = Now()
    if after.values == before.values and all(map(set.issuperset, before.things, after.things)):
        return []
    gc.collect()  # unreferenced objects end by themselves
    names = [f"{value.name} {_difference(was, now)}" for value, was, now in _changed_since(before)]
    names += [name for things, were in zip(THINGS, before.things, strict=True) for _, name in _added(things, were)]
    if names:
        _clean_up(before)
    return names


def _difference(was: Any, now: Any) -> str:
    if isinstance(was, dict):
        was, now = (
            {key: one[key] for key in one if one[key] != other.get(key)} for one, other in ((was, now), (now, was))
        )
    return f"is {now!r}, was {was!r}"


def _changed_since(before: Now) -> list[tuple[Value, Any, Any]]:
    found = [(value, was, value.read()) for value, was in zip(VALUES, before.values, strict=True)]
    return [(value, was, now) for value, was, now in found if now != was]


def _added(things: Things, were: set[Any]) -> list[tuple[Any, str]]:
    """Returns new objects with their names."""
    return [(one, name) for one in things.there() if one not in were and (name := things.name(one)) is not None]


def _clean_up(before: Now) -> None:
    for number, (things, were) in enumerate(zip(THINGS, before.things, strict=True)):
        for one, name in _added(things, were):
            try:
                things.end(one)
            except Exception:  # noqa: BLE001 - the others are still to be ended
                _log.exception("%s could not be ended", name)
        if number == 0:  # contexts restore what they have replaced; other values are restored here
            for value, was, _ in _changed_since(before):
                value.write(was)
