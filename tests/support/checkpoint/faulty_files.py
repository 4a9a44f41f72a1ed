"""Files whose n-th operation fails, and files that know the state of the disk after a loss of power."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_ext.checkpoint.format.files import Files

OPERATIONS = [name for name in vars(Files) if not name.startswith("_")]


class CountingFiles(Files):
    """Counts operations, and does not sync. Calls ``before`` at each, which may raise, or limit the bytes to move."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def before(self, name: str) -> int | None:
        """Returns the bytes that a read or write is cut to; None for all."""
        return None

    def after(self, name: str, result: Any, *args: Any, **options: Any) -> None:
        """Called after an operation."""


def _wrapped(name: str) -> Callable[..., Any]:
    real = getattr(Files, name)

    def operation(self: CountingFiles, *args: Any, **options: Any) -> Any:
        self.done.append(name)
        try:
            limit = self.before(name)
        except OSError:
            if name == "close":  # as on Linux, the file is closed even if close fails
                real(self, *args)
            raise
        if limit is not None and name in ("read", "write"):
            args = (args[0], args[1][:limit], *args[2:])
        result = None if name == "sync" else real(self, *args, **options)  # syncs are slow
        self.after(name, result, *args, **options)
        return result

    return operation


for _name in OPERATIONS:
    setattr(CountingFiles, _name, _wrapped(_name))


class FailingFiles(CountingFiles):
    """Fails in the n-th operation, from 1, and in all later ones if ``lasting``.

    Args:
        code: The error's code; None to cut a read or write to one byte, which is no failure.
    """

    def __init__(self, n: int, code: int | None, *, lasting: bool = False) -> None:
        super().__init__()
        self._n = n
        self._code = code
        self._lasting = lasting

    @property
    def failed(self) -> bool:
        return len(self.done) >= self._n

    def before(self, name: str) -> int | None:
        due = len(self.done) >= self._n if self._lasting else len(self.done) == self._n
        if not due:
            return None
        if self._code is None:
            return 1
        raise OSError(self._code, os.strerror(self._code))


class PowerLost(BaseException):
    """Later operations have no effect."""


@dataclass
class _File:
    """A file's safe bytes; None if its name may exist, but not its bytes."""

    safe: bytes = b""


@dataclass
class _Folder:
    now: dict[str, Any] = field(default_factory=dict)
    safe: dict[str, Any] = field(default_factory=dict)

    def some(self, draw: random.Random) -> dict[str, Any]:
        """Returns names after some of the changes since the last sync. Each node has one former name or none."""
        before = {id(node): (name, node) for name, node in self.safe.items()}
        after = {id(node): (name, node) for name, node in self.now.items()}
        chosen = [draw.choice((before, after)).get(key) for key in {**before, **after}]
        return dict(each for each in chosen if each is not None)


class PowerLossFiles(CountingFiles):
    """Works on a real folder until the n-th operation, and knows the state of the disk after a loss of power then.

    A file's bytes are safe after ``sync`` of it, a folder's names after ``sync`` of it.
    """

    def __init__(self, root: Path, n: int) -> None:
        super().__init__()
        self._n = n
        self._root = root
        self._nodes: dict[tuple[int, int], Any] = {}
        self._take_in(root)

    def _take_in(self, path: Path) -> Any:
        """Takes in existing files as safe."""
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            names = {each.name: self._take_in(each) for each in path.iterdir()}
            node: Any = _Folder(dict(names), dict(names))
        else:
            node = _File(path.read_bytes())
        self._nodes[status.st_dev, status.st_ino] = node
        return node

    def _node(self, descriptor: int) -> Any:
        status = os.fstat(descriptor)
        return self._nodes.get((status.st_dev, status.st_ino))

    def before(self, name: str) -> int | None:
        if len(self.done) >= self._n and name not in ("close", "unlock"):
            raise PowerLost
        return None

    def after(self, name: str, result: Any, *args: Any, **options: Any) -> None:
        inside = self._node(options["inside"]) if "inside" in options else None
        if name == "create":
            status = os.fstat(result)
            inside.now[args[0]] = self._nodes[status.st_dev, status.st_ino] = _File()
        elif name == "make_folder_in":
            status = os.stat(args[0], dir_fd=options["inside"])
            inside.now[args[0]] = self._nodes[status.st_dev, status.st_ino] = _Folder()
        elif name == "make_folder":
            status, around = os.stat(args[0]), os.stat(args[0].parent)
            node = self._nodes[status.st_dev, status.st_ino] = _Folder()
            self._nodes[around.st_dev, around.st_ino].now[args[0].name] = node
        elif name == "rename":
            inside.now[args[1]] = inside.now.pop(args[0])
        elif name in ("remove", "remove_folder"):
            del inside.now[args[0]]
        elif name == "sync":
            self._sync(self._node(args[0]), args[0])

    def _sync(self, node: Any, descriptor: int) -> None:
        if isinstance(node, _Folder):
            node.safe = dict(node.now)
        elif isinstance(node, _File):
            node.safe = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def leave(self, target: Path, *, names: str, seed: int = 0) -> None:
        """Makes a folder in a possible state after the loss of power.

        Args:
            names: Names that the folder has. "safe": those that a sync has written; "now": all, as if folders had been
                written without a sync, but no file's bytes; "some": each change of a name may have been written or not.
                A renaming counts as one change.
        """
        status = os.stat(self._root)
        self._leave(self._nodes[status.st_dev, status.st_ino], target, names, random.Random(seed))

    def _leave(self, node: Any, target: Path, names: str, draw: random.Random) -> None:
        if isinstance(node, _File):
            target.write_bytes(node.safe)
            return
        target.mkdir()
        left = node.some(draw) if names == "some" else getattr(node, names)
        for name, each in left.items():
            self._leave(each, target / name, names, draw)


ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "short": None}
