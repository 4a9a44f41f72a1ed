"""Compares weights that are read from a checkpoint with the checkpoint's manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hydra_ext.checkpoint.format import checksum
from hydra_ext.checkpoint.format import manifest as manifests
from hydra_ext.checkpoint.format.manifest import BadManifest, Manifest, TensorRecord
from hydra_ext.checkpoint.format.tensors import bytes_of
from hydra_ext.errors import WeightsError

_ADVICE = "take another checkpoint, or a whole copy of this one"


class Vouched:
    """The records of the manifest beside a checkpoint's weights. Without a manifest nothing is checked.

    Args:
        path: Folder of the weights, or a file in it.

    Raises:
        WeightsError: The manifest is damaged, or the checkpoint has never been whole.
    """

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        manifest = _manifest_in(folder)
        another = manifest is not None and folder != path and path.name not in manifest.files
        self._records: Mapping[str, TensorRecord] | None = None
        if manifest is not None and not another:
            self._records = manifest.tensors.get("model", {})

    def check_header(self, file: Path, opened: Any) -> None:
        """Compares a file's header with the manifest.

        Args:
            file: Path of the file, for the message.
            opened: The file as opened by safetensors.

        Raises:
            WeightsError: The header has other tensors than were written.
        """
        if self._records is None:
            return
        written = {
            (name, record.span.dtype, record.span.shape)
            for name, record in self._records.items()
            if record.file == file.name
        }
        names = opened.keys()
        slices = {name: opened.get_slice(name) for name in names}
        found = {(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        if found != written:
            name = min(found ^ written)[0]
            raise _differs(file, name, "its entry in the header differs from the manifest beside it")

    def follow(self, sums: dict[str, str], name: str, part: Tensor) -> None:
        """Adds the next part of a tensor to the sums that :meth:`check_sums` compares."""
        if self._records is not None:
            sums[name] = checksum.follow(sums.get(name, checksum.EMPTY), bytes_of(part))

    def check_sums(self, file: Path, sums: Mapping[str, str]) -> None:
        """Compares checksums with the manifest.

        Args:
            file: Path of the file, for the message.
            sums: Checksums of whole tensors, by name.

        Raises:
            WeightsError: A tensor's bytes are not those that were written.
        """
        records = self._records or {}
        for name, summed in sums.items():
            if summed != records[name].checksum:
                raise _differs(file, name, "its bytes are not those that were written: the checksum differs")


def _differs(file: Path, name: str, why: str) -> WeightsError:
    return WeightsError(f"{file}: {name}: {why}; {_ADVICE}", file=file, tensor=name)


def _manifest_in(folder: Path) -> Manifest | None:
    file = folder / manifests.NAME
    if not os.path.lexists(file):
        unfinished = folder / manifests.UNFINISHED
        if os.path.lexists(unfinished):
            raise WeightsError(
                f"{folder} was being written, or removed, and is not a whole checkpoint; {_ADVICE}", file=unfinished
            )
        return None
    if not file.is_file():
        raise WeightsError(f"{file} is not a file, or is a broken link; {_ADVICE}", file=file)
    try:
        with file.open("rb") as opened:
            data = opened.read(manifests.LONGEST + 1)
        return None if manifests.is_foreign(data) else manifests.parse(data)
    except (OSError, BadManifest) as error:
        raise WeightsError(f"{file}: {error}; {_ADVICE}", file=file) from error
