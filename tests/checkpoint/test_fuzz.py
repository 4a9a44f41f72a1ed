"""Checkpoints changed at random, in their bytes and in what a rightly signed manifest says."""

from __future__ import annotations

import copy
import itertools
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext.errors import CheckpointError
from support.checkpoint import damaged
from support.checkpoint.damaged import Subject

MINUTES = 10  # of the long one
NAMES = ("manifest.json", "model.safetensors", "optimizer.safetensors")

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    0.5,
    1e308,
    "",
    "..",
    "F64",
    "model.safetensors",
    [],
    {},
    [[]],
]
ODD += [{"$": "tensor", "name": "0.weight"}, {"$": "tuple", "items": []}, {"$": "float", "name": "nan"}, "\0", "é" * 50]


class Target:
    """A checkpoint, and the bits that a model may have after a load of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = damaged.save(folder)
        self.files = {name: (self.checkpoint / name).read_bytes() for name in NAMES}
        self.body = json.loads(self.files["manifest.json"])["checkpoint"]

    def write(self, files: dict[str, bytes]) -> None:
        for name, data in {**self.files, **files}.items():
            (self.checkpoint / name).write_bytes(data)

    def load(self) -> bool:
        """Whether it was loaded: then the model's tensors are as they were saved; else nothing has changed."""
        subject = Subject()
        saved = subject.weights()
        for tensor in subject.model.state_dict().values():
            tensor.zero_()
        before = subject.bits()
        with subject.offloaded() as run:
            try:
                run.load(self.folder)
            except CheckpointError:
                assert subject.bits() == before
                return False
        assert subject.weights() == saved
        return True


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("fuzz") / "ckpt")


def places(value: Any) -> list[tuple[Any, ...]]:
    """Paths to everything inside."""
    found: list[tuple[Any, ...]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        found.append((key,))
        found += [(key, *path) for path in places(each)]
    return found


def edited(body: Any, draw: random.Random) -> Any:
    """One or two things in it are something else, gone, or somewhere else."""
    body = copy.deepcopy(body)
    for _ in range(draw.randint(1, 2)):
        *path, last = draw.choice(places(body))
        around = body
        for key in path:
            around = around[key]
        kind = draw.randrange(4)
        if kind == 0:
            del around[last]
        elif kind == 1:
            around[last] = draw.choice(ODD)
        elif kind == 2 and type(around[last]) in (int, float):
            around[last] += draw.choice((-8, -1, 1, 4, 2**40))
        else:
            around[last] = copy.deepcopy(_at(body, draw.choice(places(body))))
    return body


def _at(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        body = body[key]
    return body


def altered(data: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, moved or put in."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(changed) + 1)
        kind = draw.randrange(4)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place : place + draw.choice((1, 8, 1000))]
        elif kind == 2:
            changed[place:place] = draw.choice((b"\0", b"}", b'"', b"\xff" * 9, bytes(changed[:50])))
        else:
            other = draw.randrange(len(changed) + 1)
            changed[place : place + 8] = changed[other : other + 8]
    return bytes(changed)


def attack(target: Target, seed: int) -> None:
    draw = random.Random(seed)
    files: dict[str, bytes] = {}
    if draw.random() < 0.6:
        files["manifest.json"] = damaged.signed(edited(target.body, draw))
    else:
        name = draw.choice(NAMES)
        files[name] = altered(target.files[name], draw)
    target.write(files)
    loaded = target.load()
    same = all(data == target.files[name] for name, data in files.items())
    assert loaded or not same


@settings(deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_a_changed_checkpoint_is_refused_or_right(target: Target, seed: int) -> None:
    attack(target, seed)


# What the long one has found.


def test_a_manifest_without_a_schedule_is_that_of_a_training_without(target: Target) -> None:
    body = copy.deepcopy(target.body)
    assert body["content"].pop("schedule") is None
    target.write({"manifest.json": damaged.signed(body)})
    assert target.load()


@pytest.mark.parametrize("option", ["fused", "capturable"])
def test_a_switch_that_is_a_tensor_is_refused(target: Target, option: str) -> None:
    body = copy.deepcopy(target.body)
    body["content"]["optimizer"]["groups"][0]["options"][option] = {"$": "tensor", "name": "0.weight/exp_avg"}
    target.write({"manifest.json": damaged.signed(body)})
    assert not target.load()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("$"), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, derandomize=True)
@given(value=VALUES, place=st.integers(0, 10**6))
def test_any_value_in_any_place_is_refused_or_right(target: Target, value: Any, place: int) -> None:
    body = copy.deepcopy(target.body)
    *path, last = places(body)[place % len(places(body))]
    _at(body, tuple(path))[last] = value
    try:
        signed = damaged.signed(body)
    except UnicodeEncodeError:
        return
    target.write({"manifest.json": signed})
    target.load()


@pytest.mark.full
def test_ten_minutes_of_changes(tmp_path: Path) -> None:
    target = Target(tmp_path / "ckpt")
    end = time.monotonic() + 60 * MINUTES
    for seed in itertools.count(2**33):
        attack(target, seed)
        if time.monotonic() > end:
            break
    assert seed - 2**33 > 1000
    shutil.rmtree(tmp_path / "ckpt")
