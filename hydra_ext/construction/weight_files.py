"""Weights in safetensors files. Headers are read at once, tensors one by one when they are needed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hydra_ext.checkpoint.format.header import DTYPES
from hydra_ext.construction.vouched import Vouched
from hydra_ext.errors import WeightsError

Rename = Callable[[str], "str | None"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Pages of a mapped file count as the process's memory, so little of it is mapped at a time.
_MAPPED_BYTES = 64 * 2**20


class WeightFiles:
    """A model's tensors by name, in one file or in shards with an index.

    If a checkpoint's manifest lies beside the files, they have to match it.

    Args:
        path: A safetensors file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.
        rename: Function from a tensor's name in the files to its name in the model; None leaves the tensor out.
        cast: Whether floating tensors of another dtype are rounded to the model's.

    Raises:
        WeightsError: The file does not exist or is damaged, or two of its tensors get one name.
    """

    def __init__(self, path: str | os.PathLike[str], rename: Rename | None = None, *, cast: bool = False) -> None:
        self.path = Path(path)
        self._cast = cast
        self._file_of: dict[str, Path] = {}
        self._vouched = Vouched(self.path)
        for file, promised in self._files().items():
            with _opened(file) as opened:
                there = set(opened.keys())
                self._vouched.check_header(file, opened)
            if promised is not None and promised - there:
                raise WeightsError(
                    f"{file} has no tensor {min(promised - there)}, which {self.path / _INDEX} lists for it",
                    file=file,
                    tensor=min(promised - there),
                )
            self._file_of.update(dict.fromkeys(there if promised is None else promised, file))
        self._stored: dict[str, str] = {}  # name in the files by name in the model
        for stored in self._file_of:
            name = stored if rename is None else rename(stored)
            if name in self._stored:
                raise WeightsError(
                    f"{self.path} has {self._stored[name]} and {stored}, and rename= gives both the name {name}",
                    file=self.path,
                    tensor=stored,
                )
            if name is not None:
                self._stored[name] = stored

    def find(self, model: nn.Module) -> dict[str, str]:
        """The tensor's name in the files, for every name of a parameter or persistent buffer.

        The files may have tied parameters under any of their names, and under several if the bytes are the same.

        Raises:
            WeightsError: A tensor is missing, or not in the model, or has another shape or dtype; or two names of a
                tied parameter have different bytes.
        """
        found: dict[str, str] = {}
        wanted = _wanted(model)
        for names, _ in wanted:
            stored = next((self._stored[name] for name in names if name in self._stored), None)
            if stored is None:
                raise WeightsError(
                    f"{self.path} has no tensor {names[0]}, which the model has"
                    + (f" (nor {', '.join(names[1:])}, which are the same)" if names[1:] else ""),
                    file=self.path,
                    tensor=names[0],
                )
            found.update(dict.fromkeys(names, stored))
        extra = self._stored.keys() - set(found)
        if extra:
            name = self._stored[min(extra)]
            raise WeightsError(
                f"{self._file_of[name]} has a tensor {name}, which the model does not have"
                + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""),
                file=self._file_of[name],
                tensor=name,
            )
        self.check({self._stored[name]: tensor for names, tensor in wanted for name in names if name in self._stored})
        for names, tensor in wanted:
            for name in names:
                if name in self._stored and self._stored[name] != found[name]:
                    self._compare(found[name], self._stored[name], tensor)
        return found

    def read(self, stored: Mapping[str, Tensor]) -> None:
        """Copies tensors of the files into the given ones, with a part of the files mapped at a time.

        Args:
            stored: Tensors to write to, by their names in the files.

        Raises:
            WeightsError: As :meth:`check`; or the bytes do not have the manifest's checksums. The given tensors may
                have been written to, and must not be used.
        """
        for file, names in self._by_file(stored).items():
            sums: dict[str, str] = {}
            for batch in _batches(names, stored):
                with _opened(file) as opened, torch.no_grad():
                    for name, rows in batch:
                        part = self._part(opened, file, name, stored[name])[rows]
                        stored[name][rows].copy_(part)
                        self._vouched.follow(sums, name, part)
                        del part  # otherwise the file stays mapped
            self._vouched.check_sums(file, sums)

    def check(self, stored: Mapping[str, Tensor]) -> None:
        """Compares tensors with the headers of their files.

        Args:
            stored: Tensors of the expected shapes and dtypes, by their names in the files.

        Raises:
            WeightsError: A tensor is missing, or has another shape or dtype.
        """
        for file, names in self._by_file(stored).items():
            with _opened(file) as opened:
                for name in names:
                    self._part(opened, file, name, stored[name])

    def _compare(self, name: str, other: str, tensor: Tensor) -> None:
        """Compares two tensors of the files that are one in the model, with a part of each mapped at a time.

        Raises:
            WeightsError: They differ.
        """
        file, other_file = self._file_of[name], self._file_of[other]
        for rows, _ in _pieces(tensor, _MAPPED_BYTES // 2):
            with _opened(file) as opened, _opened(other_file) as other_opened:
                part = self._part(opened, file, name, tensor)[rows]
                other_part = self._part(other_opened, other_file, other, tensor)[rows]
                same = torch.equal(_bits(part), _bits(other_part))
                del part, other_part
            if not same:
                raise WeightsError(
                    f"{self.path} has different numbers for {name} and {other}, which are one tensor in the model: "
                    "build the model without tying them, or give it a file that has one of them",
                    file=other_file,
                    tensor=other,
                )

    def _part(self, opened: Any, file: Path, name: str, wanted: Tensor) -> Any:
        """A tensor in a file, which indexing reads. Its shape and dtype are those of ``wanted``, or can be cast."""
        try:
            part = opened.get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{file}: {name}: {error}", file=file, tensor=name) from error
        shape, dtype = tuple(part.get_shape()), DTYPES.get(part.get_dtype())
        if shape != tuple(wanted.shape):
            raise WeightsError(
                f"{file}: {name} has shape {shape}; in the model it is {tuple(wanted.shape)}", file=file, tensor=name
            )
        can_be_cast = self._cast and _is_plain(dtype) and _is_plain(wanted.dtype)
        if dtype is not wanted.dtype and not can_be_cast:
            raise WeightsError(
                f"{file}: {name} is {dtype}; in the model it is {wanted.dtype}: build the model with the dtype of its "
                "weights, or give cast=True, which rounds them",
                file=file,
                tensor=name,
            )
        return part

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        return by_file

    def _files(self) -> dict[Path, set[str] | None]:
        """The files, each with the names that the index lists for it; None without an index."""
        if not self.path.is_dir():
            return {self.path: None}
        if (self.path / _SINGLE).exists():
            return {self.path / _SINGLE: None}
        index = self.path / _INDEX
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            entries = [(str(name), str(file)) for name, file in weight_map.items()]
        except FileNotFoundError as error:
            raise WeightsError(f"{self.path} has neither {_SINGLE} nor {_INDEX}", file=self.path) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} is not an index of safetensors files: {error!r}", file=index) from error
        files: dict[Path, set[str] | None] = {}
        promised: dict[str, set[str]] = {}
        for name, file in entries:
            if PurePosixPath(file).name != file or file in ("", ".", ".."):
                raise WeightsError(f"{index} names {file!r}: it may name only files beside it", file=index, tensor=name)
            promised.setdefault(file, set()).add(name)
        files.update({self.path / file: names for file, names in promised.items()})
        return files


def _is_plain(dtype: torch.dtype | None) -> bool:
    """Whether numbers of this dtype mean what they say: eight bits are codes, whose scales are elsewhere."""
    return dtype is not None and dtype.is_floating_point and dtype.itemsize > 1


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read as safetensors: {error}", file=file) from error


def _batches(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[list[tuple[str, Any]]]:
    """Names and rows of at most ``_MAPPED_BYTES`` together, or one larger row alone."""
    batch: list[tuple[str, Any]] = []
    size = 0
    for name in names:
        for rows, nbytes in _pieces(tensors[name], _MAPPED_BYTES):
            if batch and size + nbytes > _MAPPED_BYTES:
                yield batch
                batch, size = [], 0
            batch.append((name, rows))
            size += nbytes
    if batch:
        yield batch


def _pieces(tensor: Tensor, most: int) -> Iterator[tuple[Any, int]]:
    """Rows of at most ``most`` bytes, or one larger row, in order, with their bytes."""
    if tensor.nbytes <= most:
        yield ..., tensor.nbytes
        return
    row = tensor.nbytes // len(tensor)
    rows = max(1, most // row)
    for begin in range(0, len(tensor), rows):
        end = min(begin + rows, len(tensor))
        yield slice(begin, end), (end - begin) * row


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, to compare NaNs as well."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(-1).view(torch.uint8)


def _wanted(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Parameters and persistent buffers, each with all its names."""
    tensors: dict[int, tuple[list[str], Tensor]] = {}
    persistent = model.state_dict(keep_vars=True)
    for name, tensor in persistent.items():
        if isinstance(tensor, Tensor):
            tensors.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(tensors.values())
