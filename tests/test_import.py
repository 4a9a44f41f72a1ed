"""Importing hydra_ext adds little to importing torch: few modules, and none of a large package."""

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import hydra_ext

MOST_MODULES = 120
LIGHT = {"hydra_ext", "safetensors"}

PROGRAM = """
import json, sys, torch
before = set(sys.modules)
import hydra_ext
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_brings_in_few_modules_beyond_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    modules = json.loads(subprocess.check_output(command, text=True, cwd=tmp_path))
    assert "hydra_ext.runtime.run" in modules
    assert len(modules) <= MOST_MODULES
    assert {name.partition(".")[0] for name in modules} <= LIGHT | sys.stdlib_module_names


def test_names_that_are_not_there_are_told_as_python_does() -> None:
    assert not hasattr(hydra_ext, "no_such_name")
    with pytest.raises(AttributeError, match="module 'hydra_ext' has no attribute 'no_such_name'"):
        hydra_ext.no_such_name  # noqa: B018


def test_errors_of_torch_keep_their_types() -> None:
    with pytest.raises(dist.DistStoreError):
        dist.HashStore().wait(["missing"], timedelta(milliseconds=1))


def test_what_is_imported_on_first_use_is_listed_too() -> None:
    assert set(hydra_ext.__all__) <= set(dir(hydra_ext))
    assert dir(hydra_ext) == sorted(set(dir(hydra_ext)))
