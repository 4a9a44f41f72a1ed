"""Reads and checks every byte of every checkpoint in a folder, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra_ext.checkpoint import choosing
from hydra_ext.checkpoint.folder import Folder, Found, State, newest_first, perhaps_newer
from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format.files import Files, closing
from hydra_ext.errors import CheckpointError, CheckpointRemoved, CheckpointUnavailable

_PERHAPS_UNDER_WAY = (State.UNFINISHED, State.EMPTY)


@dataclass(frozen=True)
class Verdict:
    """The findings about one checkpoint.

    Attributes:
        path: The checkpoint's folder.
        state: "whole" or "damaged". "under way" if a save is writing or removing it now. "unfinished" if a killed save
            left it, which the next save removes. "foreign" for a folder of such a name without a checkpoint of ours.
        newest: Whether a load takes this checkpoint.
        step, serial, nbytes: Values from the manifest; None if it cannot be read.
        faults: Faults as file, tensor or None, and message.
    """

    path: Path
    state: Literal["whole", "damaged", "under way", "unfinished", "foreign"]
    newest: bool = False
    step: int | None = None
    serial: int | None = None
    nbytes: int | None = None
    faults: tuple[tuple[Path, str | None, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "state": self.state,
            "newest": self.newest,
            "step": self.step,
            "serial": self.serial,
            "bytes": self.nbytes,
            "faults": [{"file": str(file), "tensor": tensor, "message": text} for file, tensor, text in self.faults],
        }


def verify(path: Path) -> list[Verdict]:
    """Checks each checkpoint in a folder, or the folder itself if it is a checkpoint.

    Another process may be saving there. Checkpoints that are removed before they are read are left out.

    Returns:
        Verdicts on checkpoints that are not whole, by name; then on those with a readable manifest, oldest first.

    Raises:
        CheckpointError: There is no such folder, the newest checkpoint was removed in every attempt, or the process
            may not open so many files at once.
    """
    files = Files()
    for _ in range(choosing.ATTEMPTS):
        with choosing.readable(path), closing(files, files.open_folder(path)) as descriptor:
            if manifests.NAME in files.names(descriptor):
                verdict = _read(path, choosing.SELF, files, newest=False)
                if verdict is None:
                    raise CheckpointRemoved(path)
                return [verdict]
            found, in_use = _scanned(Folder(path, files, descriptor))
        whole = newest_first(found)
        taken = whole[0] if whole and not perhaps_newer(found) else None
        # The newest is read first: it is the last that a saver removes.
        read = [_read(path, each.name, files, newest=each is taken) for each in whole]
        if not read or read[0] is not None:
            others = [_others(path, each, in_use) for each in found if each.state is not State.WHOLE]
            return [*others, *(verdict for verdict in reversed(read) if verdict is not None)]
    raise CheckpointRemoved(path / whole[0].name)


def _scanned(folder: Folder) -> tuple[list[Found], bool]:
    """The folder's checkpoints, and whether a saver has locked it, if that decides the state of one of them."""
    found = folder.scan_beside_saves()
    for _ in range(choosing.ATTEMPTS):
        if not any(each.state in _PERHAPS_UNDER_WAY for each in found):
            return found, False
        if folder.is_in_use():
            return found, True
        before = [(each.name, each.state) for each in found]
        found = folder.scan_beside_saves()
        if before == [(each.name, each.state) for each in found]:  # no save ran between the two scans
            return found, False
    return found, True


def _others(path: Path, found: Found, in_use: bool) -> Verdict:
    if found.error is not None:
        return Verdict(path / found.name, "damaged", faults=(_fault(found.error),))
    if in_use and found.state in _PERHAPS_UNDER_WAY:
        return Verdict(path / found.name, "under way")
    return Verdict(path / found.name, "unfinished" if found.state is State.UNFINISHED else "foreign")


def _read(path: Path, name: str, files: Files, *, newest: bool) -> Verdict | None:
    """The verdict on one checkpoint; None if it was removed before its files were open."""
    try:
        with choosing.opened(path, name, files) as reader:
            reader.hold(manifests.SECTIONS)
            faults = tuple(map(_fault, reader.faults(manifests.SECTIONS)))
            manifest = reader.manifest
    except CheckpointRemoved:
        return None
    except CheckpointUnavailable:
        raise
    except CheckpointError as error:
        return Verdict(path / name, "damaged", faults=(_fault(error),))
    return Verdict(
        path / name,
        "damaged" if faults else "whole",
        newest,
        step=manifest.step,
        serial=manifest.serial,
        nbytes=manifest.nbytes,
        faults=faults,
    )


def _fault(error: CheckpointError) -> tuple[Path, str | None, str]:
    return error.file, error.tensor, str(error)
