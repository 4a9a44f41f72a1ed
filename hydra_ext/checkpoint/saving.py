"""Saves a checkpoint so that a crash at any moment leaves the one before, or this one, whole.

What killed saves have left is removed first. Every file is written and made safe, then their names, then the manifest,
whose rename makes it a checkpoint. Only then are older ones removed.
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
    """What is to be saved, from wherever it comes.

    Attributes:
        step: optimizer steps made.
        sections: groups of tensors, by section of the manifest; a group is not spread over files.
        ties: see :class:`Manifest`.
        content: see :class:`Manifest`.
        texts: files beside the tensors, by name.
    """

    step: int
    sections: Mapping[str, Sequence[Sequence[Entry]]]
    ties: tuple[tuple[str, ...], ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, bytes] = field(default_factory=dict)


def save(path: Path, contents: Contents, *, keep: int, files: Files) -> Path:
    """Returns the new checkpoint's folder when it will survive whatever comes.

    Args:
        path: the folder of checkpoints; made if it is not there.
        keep: so many of the newest stay, this one included.

    Raises:
        SaveFailed: it could not be written; what was there before is as it was.
        CheckpointsInUse: another process is saving there.
        UnsupportedState: two tensors have one name. Nothing was written.
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
    """A checkpoint's folder, before it is one.

    Attributes:
        name: of the folder.
        path: of the folder.
        descriptor: of the open folder.
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
        """Makes it one: what is in the files is safe already. Of ``contents`` the sections are not looked at."""
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
    """What was in the folder of checkpoints: names that cannot be had, those that a scan cannot look into included."""

    names: tuple[str, ...]
    serial: int  # the next one


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
    """A new checkpoint's folder, in which files are to be written inside; then older checkpoints are removed.

    Args:
        needed_bytes: that it will take.
        is_left_alone: asked if it is not committed: whether no rank writes into it any more, so that it can be removed.
            Else the next save does that.

    Raises:
        SaveFailed: from here or from inside, where that raises ``OSError``; what was there before is as it was.
        CheckpointsInUse: another process is saving there.
    """
    try:
        _make_folders(path, files)
        with closing(files, files.open_folder(path)) as descriptor:
            folder = Folder(path, files, descriptor)
            if manifests.NAME in files.names(descriptor):
                raise SaveFailed(  # a search in there would find that one, and no other
                    f"no checkpoint could be saved in {path}: with its {manifests.NAME} it is a checkpoint itself. "
                    "Give the folder that checkpoints are to lie in",
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
        f"no checkpoint could be saved in {path}: {error}. Those that were there before are as they were", path=path
    )


def _make_folders(path: Path, files: Files) -> None:
    """Those that are missing, each safe in the one around it."""
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
        return  # another process has made it
    with closing(files, parent):
        files.sync(parent)  # also if it was there: its maker may have been killed before this


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
            # The mark comes first: whatever lies beside it from now on is ours.
            mark = files.create(manifests.UNFINISHED, inside=descriptor)
            draft = Draft(folder, files, name, descriptor, mark, _Taken(tuple(names), serial))
            try:
                files.sync(descriptor)
                files.sync(folder.descriptor)
                yield draft
            finally:
                draft.close()
    except BaseException:  # re-raised: what fails here is collected by the next save
        if is_left_alone():
            with contextlib.suppress(OSError):
                folder.discard(name)
        raise


def _readable(manifest: Manifest, path: Path) -> bytes:
    """What is to be written: whatever it says, a reader will take it."""
    text = manifest.write()
    try:
        manifests.parse(text)
    except BadManifest as error:
        raise SaveFailed(
            f"no checkpoint could be saved in {path}: no reader would take it: {error}", path=path
        ) from error
    return text


def _discard(folder: Folder, names: Sequence[str]) -> None:
    """What killed saves have left, or older checkpoints. What cannot be removed now is tried again next time."""
    for name in names:
        try:
            folder.discard(name)
        except OSError as error:
            logger.warning("%s could not be removed: %s", folder.path / name, error)
