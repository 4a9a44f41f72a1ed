"""Weights that a checkpoint's manifest vouches for: what is read of them is what was written."""

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
    """What the manifest beside a checkpoint's weights says of them; nothing where there is none.

    Args:
        path: a folder, or a file in one.

    Raises:
        WeightsError: the manifest is damaged, or the checkpoint has never been whole.
    """

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        manifest = _manifest_in(folder)
        another = manifest is not None and folder != path and path.name not in manifest.files
        self._records: Mapping[str, TensorRecord] | None = None
        if manifest is not None and not another:
            self._records = manifest.tensors.get("model", {})

    def check_header(self, file: Path, opened: Any) -> None:
        """
        Args:
            opened: the file, as safetensors gives it.

        Raises:
            WeightsError: its header has other tensors than were written.
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
            raise _differs(file, name, "its header does not say of it what the manifest beside it does")

    def follow(self, sums: dict[str, str], name: str, part: Tensor) -> None:
        """Takes the next part of a tensor into the sums that :meth:`check_sums` looks at."""
        if self._records is not None:
            sums[name] = checksum.follow(sums.get(name, checksum.EMPTY), bytes_of(part))

    def check_sums(self, file: Path, sums: Mapping[str, str]) -> None:
        """
        Args:
            sums: of whole tensors.

        Raises:
            WeightsError: the bytes of one are not those that were written.
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
                f"{folder} was being written, or removed, and is no whole checkpoint; {_ADVICE}", file=unfinished
            )
        return None
    if not file.is_file():
        raise WeightsError(f"{file} is no file, or a link that leads nowhere; {_ADVICE}", file=file)
    try:
        with file.open("rb") as opened:
            data = opened.read(manifests.LONGEST + 1)
        return None if manifests.is_foreign(data) else manifests.parse(data)
    except (OSError, BadManifest) as error:
        raise WeightsError(f"{file}: {error}; {_ADVICE}", file=file) from error
