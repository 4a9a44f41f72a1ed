"""Models and microbatches, from a folder with a configuration or from a class: on meta, or with random weights."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydra_ext.errors import InvalidArgument, MissingDependency

Loss = Callable[[Any], Any]


def model_and_microbatch(
    source: str, shape: Sequence[int], dtype: torch.dtype, device: str = "meta"
) -> tuple[nn.Module, dict[str, Tensor], Loss]:
    """A model, a microbatch of zeros, and the function that computes its loss.

    Args:
        source: A folder with the ``config.json`` of a transformers model, or a class as ``package.module:Class``, whose
            constructor takes no arguments and whose forward takes one tensor.
        shape: Of a microbatch: rows and tokens for a text model, else all sizes of its main input.
        dtype: Of the weights.
        device: Where they are: on meta they have no numbers.

    Raises:
        InvalidArgument: There is no such folder or class, or no such model.
        MissingDependency: transformers is not installed.
    """
    folder = Path(source)
    if (folder / "config.json").is_file():
        return _of_folder(folder, shape, dtype, device)
    package, colon, name = source.partition(":")
    if not colon or folder.exists():
        raise InvalidArgument(f"--model {source}: give a folder with a config.json, or a class as package.module:Class")
    try:
        kind = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(f"--model {source} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InvalidArgument(f"--model {source} is no torch.nn.Module: give a class of one")
    with torch.device(device):
        model = kind().to(dtype)
    return model, {"input": torch.zeros(*shape, dtype=dtype, device=device)}, lambda batch: _mean(model(batch["input"]))


def _of_folder(
    folder: Path, shape: Sequence[int], dtype: torch.dtype, device: str
) -> tuple[nn.Module, dict[str, Tensor], Loss]:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency(f"{folder} holds a transformers model: pip install transformers") from error
    config = transformers.AutoConfig.from_pretrained(folder)
    named = json.loads((folder / "config.json").read_text()).get("architectures") or ["AutoModelForCausalLM"]
    kind = getattr(transformers, named[0], None)
    if kind is None:
        raise InvalidArgument(f"{folder}: this transformers has no {named[0]}")
    with torch.device(device):
        model = kind.from_config(config) if named[0].startswith("AutoModel") else kind(config)
    model = model.to(dtype).train()
    name = model.main_input_name
    if name == "input_ids":
        given = torch.zeros(*shape, dtype=torch.long, device=device)
        batch = {name: given, "labels": given}
    else:
        batch = {name: torch.zeros(*shape, dtype=dtype, device=device)}
        batch["labels"] = torch.zeros(shape[0], dtype=torch.long, device=device)
    return model, batch, lambda batch: model(**batch).loss


def _mean(output: Any) -> Tensor:
    tensors = [output] if isinstance(output, Tensor) else [each for each in output if isinstance(each, Tensor)]
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()
