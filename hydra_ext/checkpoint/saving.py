"""Saves a checkpoint so that a crash at any moment leaves the previous checkpoint or the new one whole.

A save first removes the remains of killed saves. It writes and syncs every file, then the folder, then the manifest.
Renaming the manifest makes the folder a checkpoint. Older checkpoints are removed after that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_ext import _C
from hydra_ext.checkpoint.folder import Folder, Found, State, newest_first
from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format import writer
from hydra_ext.checkpoint.format.files import Files, closing, write_all
from hydra_ext.checkpoint.format.manifest import BadManifest, Manifest, Share
from hydra_ext.checkpoint.format.tensors import Entry
from hydra_ext.errors import SaveFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """The contents of a new checkpoint.

    Attributes:
        step: Number of optimizer steps.
        sections: Groups of tensors, by section of the manifest. A group is not spread over files.
        ties: Groups of names that stand for one tensor; see :class:`Manifest`.
        content: Everything else, as JSON; see :class:`Manifest`.
        texts: Files beside the tensors, by name.
    """

    step: int
    sections: Mapping[str, Sequence[Sequence[Entry]]]
    ties: tuple[tuple[str, ...], ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, bytes] = field(default_factory=dict)


def save(path: Path, contents: Contents, *, keep: int, files: Files) -> Path:
    """Saves a checkpoint. Returns its folder once it will survive a crash or a loss of power.

    Args:
        path: Folder of checkpoints; created if it does not exist.
        keep: Number of the newest checkpoints that stay, the new one included.

    Raises:
        SaveFailed: The checkpoint could not be written. Earlier checkpoints are unchanged.
        CheckpointsInUse: Another process is saving into the folder.
        UnsupportedState: Two tensors have one name. Nothing was written.
    """
    shards = [shard for section, groups in contents.sections.items() for shard in writer.plan(section, groups)]
    needed = writer.needed_bytes(shards, contents.texts.values())
    with unfinished(path, contents.step, needed_bytes=needed, keep=keep, files=files) as draft:
        written = writer.Writer(files, draft.descriptor)
        for shard in shards:
            written.write_shard(shard)
        draft.commit(Share(written.files, written.tensors), contents)
    return draft.path


class Draft:
    """The folder of a checkpoint that is being written.

    Attributes:
        name: Name of the folder.
        path: Path of the folder.
        descriptor: Descriptor of the open folder.
    """

    def __init__(self, folder: Folder, files: Files, name: str, descriptor: int, mark: int, taken: _Taken) -> None:
        self.name = name
        self.path = folder.path / name
        self.descriptor = descriptor
        self._files = files
        self._mark = mark
        self._taken = taken
        self._open = True

    def commit(self, share: Share, contents: Contents) -> None:
        """Makes the folder a checkpoint. The tensors' files must be safe on the disk before.

        Args:
            share: Records of these files and their tensors.
            contents: The contents without ``sections``, which is not used.
        """
        texts = dict(contents.texts)
        model = share.tensors.get("model", {})
        if len({record.file for record in model.values()}) > 1:
            texts["model.safetensors.index.json"] = writer.index(model)
        written = writer.Writer(self._files, self.descriptor)
        for file, text in texts.items():
            written.write_text(file, text)
        self._files.sync(self.descriptor)
        manifest = Manifest(
            serial=self._taken.serial,
            step=contents.step,
            older=self._taken.names,
            files={**share.files, **written.files},
            tensors=share.tensors,
            ties=contents.ties,
            content=contents.content,
        )
        try:
            write_all(self._files, self._mark, memoryview(_readable(manifest, self.path.parent)))
            self._files.sync(self._mark)
        finally:
            self.close()
        self._files.rename(manifests.UNFINISHED, manifests.NAME, inside=self.descriptor)
        self._files.sync(self.descriptor)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._files.close(self._mark)


@dataclass(frozen=True)
class _Taken:
    """Names in the folder of checkpoints that are taken, unreadable ones included, and the new serial number."""

    names: tuple[str, ...]
    serial: int  # the new checkpoint's number


@contextmanager
def unfinished(
    path: Path,
    step: int,
    *,
    needed_bytes: int,
    keep: int,
    files: Files,
    is_left_alone: Callable[[], bool] = lambda: True,
) -> Iterator[Draft]:
    """A new checkpoint's folder, to be filled and committed inside. Afterwards older checkpoints are removed.

    Args:
        needed_bytes: Bytes that the checkpoint will take.
        is_left_alone: Called if the body raises. Tells whether no rank writes into the folder any more, so that it can
            be removed. If not, the next save removes it.

    Raises:
        SaveFailed: The checkpoint could not be written; an ``OSError`` from inside becomes this error, too. Earlier
            checkpoints are unchanged.
        CheckpointsInUse: Another process is saving into the folder.
    """
    try:
        _make_folders(path, files)
        with closing(files, files.open_folder(path)) as descriptor:
            folder = Folder(path, files, descriptor)
            if manifests.NAME in files.names(descriptor):
                raise SaveFailed(  # a load would take this folder for the checkpoint, and find no other
                    f"no checkpoint could be saved in {path}: it has a {manifests.NAME}, so it is a checkpoint itself. "
                    "Give a folder that holds checkpoints",
                    path=path,
                )
            with folder.locked():
                before = folder.scan()
                _discard(folder, [each.name for each in before if each.state not in (State.WHOLE, State.DAMAGED)])
                _expect_room(folder, files, needed_bytes)
                with _marked(folder, files, step, before, is_left_alone) as draft:
                    yield draft
                _discard(folder, [each.name for each in newest_first(before)[keep - 1 :]])
    except OSError as error:
        raise failed(path, error) from error


def failed(path: Path, error: OSError) -> SaveFailed:
    return SaveFailed(
        f"no checkpoint could be saved in {path}: {error}. Earlier checkpoints there are unchanged", path=path
    )


def _make_folders(path: Path, files: Files) -> None:
    """Creates the folders that are missing, and syncs the parent of each."""
    made = True
    try:
        files.make_folder(path)
    except FileExistsError:
        made = False
    except FileNotFoundError:
        if path.parent == path:
            raise
        _make_folders(path.parent, files)
        files.make_folder(path)
    try:
        parent = files.open_folder(path.parent)
    except PermissionError:
        if made:
            raise
        return  # another process has created the folder, and its parent is not readable
    with closing(files, parent):
        files.sync(parent)  # for an old folder, too: its creator may have been killed before its sync


def _expect_room(folder: Folder, files: Files, needed: int) -> None:
    free = files.free_bytes(folder.descriptor)
    if free < needed:
        raise SaveFailed(
            f"a checkpoint takes {_C.human_bytes(needed)} in {folder.path}, where {_C.human_bytes(free)} are free: "
            "make room, or keep fewer checkpoints",
            path=folder.path,
            needed_bytes=needed,
            free_bytes=free,
        )


@contextmanager
def _marked(
    folder: Folder, files: Files, step: int, before: Sequence[Found], is_left_alone: Callable[[], bool]
) -> Iterator[Draft]:
    names = folder.names()
    serial = 1 + max((each.manifest.serial for each in before if each.manifest is not None), default=0)
    name = folder.free_name(step, names)
    files.make_folder_in(name, inside=folder.descriptor)
    try:
        with closing(files, files.open_folder_in(name, inside=folder.descriptor)) as descriptor:
            # The mark comes first: any file beside it from now on is ours.
            mark = files.create(manifests.UNFINISHED, inside=descriptor)
            draft = Draft(folder, files, name, descriptor, mark, _Taken(tuple(names), serial))
            try:
                files.sync(descriptor)
                files.sync(folder.descriptor)
                yield draft
            finally:
                draft.close()
    except BaseException:  # re-raised; the next save removes the folder if this fails
        if is_left_alone():
            with contextlib.suppress(OSError):
                folder.discard(name)
        raise


def _readable(manifest: Manifest, path: Path) -> bytes:
    """The bytes of the manifest, after a check that a reader will accept them."""
    text = manifest.write()
    try:
        manifests.parse(text)
    except BadManifest as error:
        raise SaveFailed(
            f"no checkpoint could be saved in {path}, as its manifest could not be read again: {error}", path=path
        ) from error
    return text


def _discard(folder: Folder, names: Sequence[str]) -> None:
    """Removes remains of killed saves, or older checkpoints. The next save tries again where this fails."""
    for name in names:
        try:
            folder.discard(name)
        except OSError as error:
            logger.warning("%s could not be removed: %s", folder.path / name, error)
