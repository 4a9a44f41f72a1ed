"""Damaged and hostile checkpoints: a typed error that names the file, and nothing changed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hydra_ext
from hydra_ext.checkpoint.format.files import Files
from hydra_ext.checkpoint.verifying import verify
from hydra_ext.errors import CheckpointError, CheckpointMismatch
from support.checkpoint import damaged
from support.checkpoint.damaged import ATTACKS, Subject


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    damaged.save(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "ckpt")
    return tmp_path / "ckpt"


class BoundedFiles(Files):
    """Nothing is read into more memory than the file has bytes."""

    def read(self, file: int, into: memoryview, offset: int) -> int:
        assert len(into) <= self.status(file).st_size
        return super().read(file, into, offset)


# Attacks after which a checkpoint is merely of another model.
FITS_NOT = {"ties many", "tensor dtype 'I32'", "tensor shape [2, 3]"}
NONE = {"manifest: gone"}
LONG = pytest.param("manifest.json", marks=pytest.mark.full)
MODEL_ONLY = ("optimizer", "value", "schedule", "ranks", "random", "torch's", "buffers")


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_an_error_with_a_name_and_changes_nothing(attack: str, folder: Path) -> None:
    ATTACKS[attack](folder / "step-00000000")
    subject = Subject()
    before = subject.bits()
    with subject.offloaded() as run:
        run._checkpoint.files = BoundedFiles()
        if attack in NONE:
            assert run.load(folder) is None
        else:
            with pytest.raises(CheckpointError) as caught:
                run.load(folder)
            assert caught.value.file.is_relative_to(folder)
            assert str(folder) in str(caught.value)
            assert isinstance(caught.value, CheckpointMismatch) == (attack in FITS_NOT)
        assert run.steps == 0
    assert subject.bits() == before
    if not attack.startswith(MODEL_ONLY):
        with pytest.raises(CheckpointError):
            hydra_ext.load_model(folder, subject.model)
    assert subject.bits() == before


@pytest.mark.parametrize("attack", ATTACKS)
def test_verify_says_so(attack: str, folder: Path) -> None:
    ATTACKS[attack](folder / "step-00000000")
    (verdict,) = verify(folder)
    if attack in NONE:
        assert verdict.state == "foreign"
    elif verdict.state == "damaged":
        assert verdict.faults
        assert all(file.is_relative_to(folder) for file, _, _ in verdict.faults)
    else:  # nothing but a model, or a load, can tell
        assert attack in FITS_NOT or attack.startswith(MODEL_ONLY)


@pytest.mark.full
def test_what_reads_an_attack_takes_little_memory(folder: Path) -> None:
    """A tensor that claims to be of 2**50 bytes, and texts of 3 MB that make many objects."""
    checkpoint = folder / "step-00000000"
    for attack in ("header of many names", "header deep"):
        ATTACKS[attack](checkpoint)
    program = (
        "import resource, sys, torch, hydra_ext\n"
        "from pathlib import Path\n"
        "from hydra_ext.checkpoint.verifying import verify\n"
        "limit = 2**33\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert verify(Path(sys.argv[1]))[0].state == 'damaged'\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, folder], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 200 * 2**10  # KiB


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [LONG, "model.safetensors", "optimizer.safetensors"])
def test_every_flipped_bit_is_noticed(name: str, folder: Path) -> None:
    """One bit of each byte; which one goes around."""
    checkpoint = folder / "step-00000000"
    data = bytearray((checkpoint / name).read_bytes())
    for place in range(0, len(data), 1 if len(data) < 4000 else 7):
        bit = 1 << place % 8
        data[place] ^= bit
        (checkpoint / name).write_bytes(data)
        (verdict,) = verify(folder)
        assert verdict.state == "damaged", (place, bit)
        data[place] ^= bit
    (checkpoint / name).write_bytes(data)
    assert verify(folder)[0].state == "whole"


@pytest.mark.parametrize("name", [LONG, "model.safetensors"])
def test_every_length_but_the_right_one_is_noticed(name: str, folder: Path) -> None:
    data = (folder / "step-00000000" / name).read_bytes()
    for length in [*range(0, len(data), 1 if len(data) < 4000 else 11), len(data) - 1]:
        (folder / "step-00000000" / name).write_bytes(data[:length])
        assert verify(folder)[0].state == "damaged", length


def test_a_damaged_tensor_is_named(folder: Path) -> None:
    file = folder / "step-00000000" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    header, _ = damaged.header_of(file)
    last = max((entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__")[1]
    with pytest.raises(CheckpointError, match=f"{file}: '{last}': its bytes are not those") as caught:
        hydra_ext.load_model(folder, Subject().model)
    assert (caught.value.file, caught.value.tensor) == (file, last)


class ChangingFiles(Files):
    """Gives other bytes when something is read again."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, int]] = set()

    def read(self, file: int, into: memoryview, offset: int) -> int:
        count = super().read(file, into, offset)
        key = (self.status(file).st_ino, offset, count)
        if key in self.seen and count:
            into[0] ^= 1
        self.seen.add(key)
        return count


def test_what_changes_after_it_was_checked_is_no_part_of_a_tensor(folder: Path) -> None:
    subject = Subject()
    before = subject.weights()
    with subject.offloaded() as run:
        run._checkpoint.files = ChangingFiles()
        with pytest.raises(CheckpointError, match="partly new and partly old") as caught:
            run.load(folder / "step-00000000")
        assert caught.value.tensor == "1.num_batches_tracked"  # the first that is read
        assert subject.weights() == before
        run._checkpoint.files = Files()
        run.load(folder)


# ---- which one is taken ---------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    subject = Subject()
    with subject.offloaded() as run:
        return [run.save(tmp_path, keep=3, extra=number) for number in range(3)]


def load(folder: Path, *, strict: bool) -> object:
    subject = Subject()
    with subject.offloaded() as run:
        return run.load(folder, strict=strict).extra


def test_a_damaged_newest_one_is_an_error_or_an_older_one_is_taken(
    three: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = three[0].parent
    assert load(folder, strict=True) == 2
    damaged.cut("model.safetensors", 1)(three[2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has"):
        load(folder, strict=True)
    assert load(folder, strict=False) == 1
    assert str(three[2]) in caplog.text
    assert str(three[1]) in caplog.text
    damaged.cut("manifest.json", 1)(three[1])
    assert load(folder, strict=False) == 0
    damaged.cut("optimizer.safetensors", 1)(three[0])
    for strict in (True, False):
        with pytest.raises(CheckpointError):
            load(folder, strict=strict)


def test_a_manifest_that_cannot_be_read_may_be_the_newest_unless_a_newer_one_knows_it(three: list[Path]) -> None:
    folder = three[0].parent
    damaged.cut("manifest.json", 1)(three[0])
    assert load(folder, strict=True) == 2  # known to be older
    damaged.cut("manifest.json", 1)(three[2])
    with pytest.raises(CheckpointError, match="cut off"):
        load(folder, strict=True)
    assert load(folder, strict=False) == 1
    subject = Subject()
    with subject.offloaded() as run:
        run.load(folder, strict=False)
        run.save(folder, extra=3)
    assert load(folder, strict=True) == 3
    assert [verdict.state for verdict in verify(folder)] == ["damaged", "damaged", "whole", "whole"]


def test_a_checkpoint_of_another_model_is_none_that_is_skipped(three: list[Path]) -> None:
    subject = Subject()
    subject.model.append(damaged.nn.Linear(3, 1))
    with subject.offloaded() as run, pytest.raises(CheckpointMismatch):
        run.load(three[0].parent, strict=False)
