"""Models of transformers with their weights in safetensors files, built without memory."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from hydra_ext.checkpoint.format.header import DTYPES
from hydra_ext.construction import materialize
from hydra_ext.errors import InvalidArgument, UnsupportedModel
from hydra_ext.integrations.versions import expect_version

logger = logging.getLogger(__name__)

_NEEDED = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]


def from_pretrained(
    source: str | os.PathLike[str],
    cls: Any,
    *,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    **options: Any,
) -> nn.Module:
    """A model as ``cls.from_pretrained(source, dtype=dtype)`` of transformers makes it, whose parameters are on meta.

    :class:`hydra_ext.offload` reads them from the files, block by block, so the host never holds the model twice. The
    numbers are those of transformers, bit for bit, and the model is in evaluation mode, as there.

    Args:
        source: A folder with ``config.json`` and safetensors files; or the name of a model on the Hub, whose files are
            downloaded, or found in the cache.
        cls: A class of transformers, such as ``AutoModelForCausalLM`` or ``GPT2LMHeadModel``.
        dtype: Of the model; by default that of its configuration or, if it has none, of its first weights. Weights in
            the files are rounded to it.
        revision: Branch, tag or commit on the Hub.
        options: For the configuration, such as ``attn_implementation=``.

    Raises:
        MissingDependency: transformers is not installed, or too old.
        InvalidArgument: The configuration has no such option; or ``dtype`` is none.
        UnsupportedModel: The model keeps parts in another dtype than ``dtype``, or its weights are quantised.
        WeightsError: The files lack a tensor of the model, for example of a new head, or are damaged.
    """
    expect_version("transformers", "4.56", what="hydra_ext.from_pretrained()")
    import transformers

    folder = _folder_of(source, revision)
    config = _configuration(folder, source, options)
    config.name_or_path = os.fspath(source)
    chosen = _chosen(dtype) or getattr(config, "dtype", None) or _first_dtype(folder) or torch.get_default_dtype()
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config

    def build() -> nn.Module:
        made: nn.Module = make(config, dtype=chosen)
        return made

    with torch.device("meta"):
        shell: Any = build()
    _refuse_mixed(shell, chosen)
    left_out: list[str] = []
    model: Any = materialize(build, weights=folder, rename=_renamer(shell, left_out), cast=True)
    if left_out:
        logger.warning("%s has tensors that a %s does not have: %s", source, type(model).__name__, ", ".join(left_out))
    if (folder / "generation_config.json").exists() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    evaluated: nn.Module = model.eval()
    return evaluated


def _configuration(folder: Path, source: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    import transformers

    config, unknown = transformers.AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    if unknown:
        raise InvalidArgument(
            f"from_pretrained({', '.join(f'{name}=' for name in unknown)}): a {type(config).__name__} has no such "
            "option; weights are placed by hydra_ext.offload()"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            f"the weights of {source} are quantised, which transformers reads: hydra_ext.offload() takes the model of "
            "the class's own from_pretrained(), with its packed bytes on the host"
        )
    return config


def _chosen(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if dtype in (None, "auto"):
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidArgument(f"from_pretrained(dtype={dtype!r}): give a floating dtype, such as torch.bfloat16")
    return found


def _first_dtype(folder: Path) -> torch.dtype | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                dtype = DTYPES.get(opened.get_slice(name).get_dtype())
                if dtype is not None and dtype.is_floating_point:
                    return dtype
    return None


def _folder_of(source: str | os.PathLike[str], revision: str | None) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(os.fspath(source), revision=revision, allow_patterns=_NEEDED))


def _renamer(shell: Any, left_out: list[str]) -> Callable[[str], str | None]:
    """Names in files may have the prefix of the model below the head, or lack it."""
    names, prefix = set(shell.state_dict()), f"{shell.base_model_prefix}."
    ignored = [re.compile(each) for each in getattr(shell, "_keys_to_ignore_on_load_unexpected", None) or ()]

    def rename(stored: str) -> str | None:
        for name in (stored, prefix + stored, stored.removeprefix(prefix)):
            if name in names:
                return name
        if not any(each.search(stored) for each in ignored):
            left_out.append(stored)
        return None

    return rename


def _refuse_mixed(shell: Any, dtype: torch.dtype) -> None:
    kept = list(getattr(shell, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        kept += getattr(shell, "_keep_in_fp32_modules", None) or ()
    if kept and dtype is not torch.float32:
        raise UnsupportedModel(
            f"a {type(shell).__name__} keeps {', '.join(sorted(map(str, kept)))} in float32 beside {dtype}: give "
            "dtype=torch.float32, and autocast around the training"
        )
