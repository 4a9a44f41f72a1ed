"""Wheels are named by the torch that they were built for, and require it."""

import zipfile
from pathlib import Path

import pytest

from check_wheel import faults
from name_wheel import renamed, suffix

METADATA = """\
Name: hydra-ext
Version: 0.1.0
Requires-Dist: torch<2.14,>=2.11
Requires-Dist: numpy>=1.26

Version: 9 of the description stays.
"""


@pytest.mark.parametrize(("cuda", "label"), [("", "torch2.13"), ("13.0", "torch2.13.cu13"), ("12.8", "torch2.13.cu12")])
def test_the_label_has_torch_and_its_cuda(cuda: str, label: str) -> None:
    assert suffix("2.13", cuda) == label


def test_the_metadata_require_that_torch_alone() -> None:
    lines = renamed(METADATA, "2.13", "torch2.13").splitlines()
    assert lines[1:4] == ["Version: 0.1.0+torch2.13", "Requires-Dist: torch==2.13.*", "Requires-Dist: numpy>=1.26"]
    assert lines[5] == METADATA.splitlines()[5]


def test_a_wheel_without_such_a_name_is_at_fault(wheel: Path) -> None:
    assert "not named by torch 2.13" in faults(wheel)
    assert "does not require torch 2.13" in faults(wheel)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "hydra_ext-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hydra_ext-0.1.0.dist-info/METADATA", METADATA)
        archive.writestr("hydra_ext/_build_info.py", 'TORCH = "2.13"\nTORCH_CUDA = ""\n')
    return path
