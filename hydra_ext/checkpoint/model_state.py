"""A model's tensors by their names, each once, and its configuration files."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.checkpoint.format.header import CODES
from hydra_ext.checkpoint.format.manifest import Manifest
from hydra_ext.checkpoint.format.tensors import Entry
from hydra_ext.errors import UnsupportedState
from hydra_ext.state.composites import composites_of


@dataclass(frozen=True)
class Named:
    """A parameter or buffer with all its names. It is saved under the first one."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]


def named_tensors(model: nn.Module) -> list[Named]:
    """Parameters and persistent buffers, in the order of ``state_dict()``.

    A composite (:mod:`hydra_ext.state.composites`) has an entry for each inner tensor, such as ``layer.weight.scale``.
    What its module makes from them for ``state_dict()`` is left out.

    Raises:
        UnsupportedState: ``state_dict()`` has other entries, or lacks a parameter or a persistent buffer.
    """
    parameters = {id(parameter): f"parameter '{name}'" for name, parameter in model.named_parameters()}
    buffers = {id(buffer) for buffer in model.buffers()}
    composites = composites_of(model)
    inner = {id(each.parameter): each.inner for each in composites}
    expected = parameters | _persistent_buffers(model)
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in inner:
            expected.pop(id(value), None)
            for path, tensor in inner[id(value)].items():
                found.setdefault(id(tensor), ([], tensor))[0].append(f"{name}.{path}" if path else name)
            continue
        if id(value) not in parameters and id(value) not in buffers:
            if any(_is_made_from(name, each.name) for each in composites):
                continue
            raise UnsupportedState(
                f"'{name}' in the model's state_dict() is neither a parameter nor a buffer, but a "
                f"{type(value).__name__}, which could not be restored: register it as a buffer"
            )
        found.setdefault(id(value), ([], value))[0].append(name)
    for key, what in expected.items():
        if key not in found:
            raise UnsupportedState(
                f"the model's state_dict() leaves out the {what}, which would be lost: let state_dict() return every "
                "parameter and persistent buffer"
            )
    return [Named(tuple(names), tensor) for names, tensor in found.values()]


def _is_made_from(name: str, composite: str) -> bool:
    """Whether an entry of ``state_dict()`` is below a composite, or beside it in its module: bitsandbytes has both."""
    below = name.startswith(f"{composite}.")
    return below or name.rpartition(".")[0] == composite.rpartition(".")[0]


def _persistent_buffers(model: nn.Module) -> dict[int, str]:
    found = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[id(buffer)] = f"buffer '{path}.{name}'" if path else f"buffer '{name}'"
    return found


def entries(tensors: Sequence[Named], blocks: Sequence[Sequence[Tensor]]) -> list[list[Entry]]:
    """Groups for the writer: the tensors of each block together, and every other tensor by itself.

    Raises:
        UnsupportedState: No file can hold one of the tensors.
    """
    block_of = {id(tensor): number for number, block in enumerate(blocks) for tensor in block}
    groups: dict[int, list[Entry]] = {}
    for named in tensors:
        groups.setdefault(block_of.get(id(named.tensor), -1 - len(groups)), []).append(
            Entry.of(named.name, named.tensor)
        )
    return list(groups.values())


def ties(tensors: Sequence[Named]) -> tuple[tuple[str, ...], ...]:
    return tuple(named.names for named in tensors if len(named.names) > 1)


def differences(tensors: Sequence[Named], manifest: Manifest) -> list[str]:
    """All differences between a model and a checkpoint, a line each."""
    names = {named.name for named in tensors}
    return [*differences_of_some(tensors, manifest), *differences_of_names(names, ties(tensors), manifest)]


def differences_of_some(tensors: Sequence[Named], manifest: Manifest) -> list[str]:
    """Differences between some of a model's tensors and the saved ones, in existence, shape and type."""
    stored = manifest.tensors.get("model", {})
    own = {named.name: named for named in tensors}
    lines = [f"the checkpoint has no tensor {name!r}, which the model has" for name in own if name not in stored]
    for name, named in own.items():
        if name not in stored:
            continue
        span, tensor = stored[name].span, named.tensor
        if span.shape != tuple(tensor.shape):
            lines.append(
                f"{name!r} is of shape {list(span.shape)} in the checkpoint, {list(tensor.shape)} in the model"
            )
        if span.dtype != CODES.get(tensor.dtype):
            lines.append(f"{name!r} is {span.dtype} in the checkpoint, {tensor.dtype} in the model")
    return lines


def differences_of_names(names: Set[str], tied: Sequence[tuple[str, ...]], manifest: Manifest) -> list[str]:
    """Differences in names: saved tensors that the model lacks, and names that stand for one tensor on one side only.

    Args:
        names: Names of the model's tensors.
        tied: Groups of names that stand for one tensor in the model; see ``ties`` of :class:`Manifest`.
    """
    stored = manifest.tensors.get("model", {})
    lines = [f"the model has no tensor {name!r:.200}, which the checkpoint has" for name in stored if name not in names]
    before, now = set(manifest.ties), set(tied)
    lines += [f"{_tied(names)} in the checkpoint, and not in the model" for names in sorted(before - now)]
    lines += [f"{_tied(names)} in the model, and were not in the checkpoint" for names in sorted(now - before)]
    return lines


def _tied(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name!r:.200}" for name in names) + " are one tensor"


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Copies the value's bits into the tensor."""
    tensor.copy_(value)


def texts(model: nn.Module) -> dict[str, bytes]:
    """The files that Hugging Face's ``from_pretrained`` reads beside the tensors; none for a model without a config."""
    found: dict[str, bytes] = {}
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(config, "to_json_string"):
        said = json.loads(config.to_json_string())
        said.setdefault("architectures", [type(model).__name__])
        dtype = next((str(each.dtype) for each in model.parameters() if each.is_floating_point()), None)
        if dtype is not None:
            said["dtype"] = dtype.removeprefix("torch.")
        found["config.json"] = _text(said)
    if config is not None and hasattr(generation, "to_json_string"):
        found["generation_config.json"] = _text(json.loads(generation.to_json_string()))
    return found


def _text(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
