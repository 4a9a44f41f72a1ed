"""Saves a checkpoint so that a crash at any moment leaves the one before, or this one, whole.

What killed saves have left is removed first. Every file is written and made safe, then their names, then the manifest,
whose rename makes it a checkpoint. Only then are older ones removed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_ext import _C
from hydra_ext.checkpoint import manifest as manifests
from hydra_ext.checkpoint import writer
from hydra_ext.checkpoint.files import Files, closing, write_all
from hydra_ext.checkpoint.folder import Folder, Found, newest_first
from hydra_ext.checkpoint.manifest import BadManifest, Manifest
from hydra_ext.checkpoint.tensors import Entry
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
        CheckpointsInUse: somebody else is saving there.
        UnsupportedState: two tensors have one name. Nothing was written.
    """
    shards = {section: writer.plan(section, groups) for section, groups in contents.sections.items()}
    texts = dict(contents.texts)
    if len(shards.get("model", ())) > 1:
        texts["model.safetensors.index.json"] = writer.index(shards["model"])
    every = [shard for planned in shards.values() for shard in planned]
    try:
        _make_folders(path, files)
        with closing(files, files.open_folder(path)) as descriptor:
            folder = Folder(path, files, descriptor)
            with folder.locked():
                before = folder.scan()
                _discard(folder, [each.name for each in before if each.manifest is None and each.error is None])
                _expect_room(folder, files, writer.needed_bytes(every, texts.values()))
                name = _write(folder, files, every, texts, contents, before)
                _discard(folder, [each.name for each in newest_first(before)[keep - 1 :]])
    except OSError as error:
        raise SaveFailed(
            f"no checkpoint could be saved in {path}: {error}. Those that were there before are as they were", path=path
        ) from error
    return path / name


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
        return  # somebody else has made it
    with closing(files, parent):
        files.sync(parent)  # also if it was there: who made it may have been killed before this


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


def _write(
    folder: Folder,
    files: Files,
    shards: Sequence[writer.Shard],
    texts: Mapping[str, bytes],
    contents: Contents,
    before: Sequence[Found],
) -> str:
    names = folder.names()  # those that a scan cannot look into, too
    name = folder.free_name(contents.step, names)
    files.make_folder_in(name, inside=folder.descriptor)
    try:
        with closing(files, files.open_folder_in(name, inside=folder.descriptor)) as step:
            # The mark comes first: whatever lies beside it from now on is ours.
            mark = files.create(manifests.UNFINISHED, inside=step)
            try:
                files.sync(step)
                files.sync(folder.descriptor)
                written = writer.Writer(files, step)
                for shard in shards:
                    written.write_shard(shard)
                for file, text in texts.items():
                    written.write_text(file, text)
                files.sync(step)
                serial = 1 + max((each.manifest.serial for each in before if each.manifest is not None), default=0)
                manifest = Manifest(
                    serial=serial,
                    step=contents.step,
                    older=tuple(names),
                    files=written.files,
                    tensors=written.tensors,
                    ties=contents.ties,
                    content=contents.content,
                )
                write_all(files, mark, memoryview(_readable(manifest, folder.path)))
                files.sync(mark)
            finally:
                files.close(mark)
            files.rename(manifests.UNFINISHED, manifests.NAME, inside=step)
            files.sync(step)
    except BaseException:  # re-raised: what fails here is collected by the next save
        with contextlib.suppress(OSError):
            folder.discard(name)
        raise
    return name


def _readable(manifest: Manifest, path: Path) -> bytes:
    """What is to be written: whatever it says, a reader will take it."""
    text = manifest.write()
    try:
        manifests.parse(text)
    except BadManifest as error:
        raise SaveFailed(f"no checkpoint could be saved in {path}: nobody could read it: {error}", path=path) from error
    return text


def _discard(folder: Folder, names: Sequence[str]) -> None:
    """What killed saves have left, or older checkpoints. What cannot be removed now is tried again next time."""
    for name in names:
        try:
            folder.discard(name)
        except OSError as error:
            logger.warning("%s could not be removed: %s", folder.path / name, error)
