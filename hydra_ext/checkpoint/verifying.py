"""Looks at every byte of every checkpoint in a folder, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra_ext.checkpoint import loading
from hydra_ext.checkpoint import manifest as manifests
from hydra_ext.checkpoint.files import Files, closing
from hydra_ext.checkpoint.folder import Folder, Found, newest_first, perhaps_newer
from hydra_ext.errors import CheckpointError


@dataclass(frozen=True)
class Verdict:
    """What was found of one checkpoint.

    Attributes:
        path: its folder.
        state: "whole"; "damaged"; "unfinished", which a killed save leaves and the next one removes; or "foreign", a
            folder of such a name that holds no checkpoint of ours.
        newest: it is what a load takes.
        step, serial, nbytes: as its manifest says; None without.
        faults: file, tensor or None, and what is wrong with it.
    """

    path: Path
    state: Literal["whole", "damaged", "unfinished", "foreign"]
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
    """Of each checkpoint in a folder, oldest first; or of the one that the folder is.

    Raises:
        CheckpointError: there is no such folder.
    """
    files = Files()
    with loading.readable(path), closing(files, files.open_folder(path)) as descriptor:
        if manifests.NAME in files.names(descriptor):
            return [_read(path, ".", newest=False)]
        found = Folder(path, files, descriptor).scan()
    newest = newest_first(found)
    taken = newest[0] if newest and not perhaps_newer(found) else None
    others = [each for each in found if each.manifest is None]
    ordered = [*others, *reversed(newest)]
    return [_look(path, each, newest=each is taken) for each in ordered]


def _look(path: Path, found: Found, *, newest: bool) -> Verdict:
    if found.error is not None:
        return Verdict(path / found.name, "damaged", faults=(_fault(found.error),))
    if found.manifest is None:
        return Verdict(path / found.name, "unfinished" if found.unfinished else "foreign")
    return _read(path, found.name, newest=newest)


def _read(path: Path, name: str, *, newest: bool) -> Verdict:
    try:
        with loading.opened(path, name, Files()) as reader:
            faults = tuple(map(_fault, reader.faults(manifests.SECTIONS)))
            manifest = reader.manifest
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
