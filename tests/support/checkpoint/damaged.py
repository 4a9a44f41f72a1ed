"""A small checkpoint, and ways to damage it, at random and on purpose."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hydra_ext
from hydra_ext.checkpoint.format import checksum

START = b'{"crc32":"%s","checkpoint":'


class Subject:
    """A model, and an optimizer with state: everything that a load may change."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def offloaded(self) -> hydra_ext.offload:
        return hydra_ext.offload(self.model, self.optimizer, budget=2**20)

    def weights(self) -> list[bytes]:
        return [tensor.numpy().tobytes() for tensor in self.model.state_dict().values()]

    def bits(self) -> list[bytes]:
        tensors = [*self.model.state_dict().values()]
        tensors += [each for state in self.optimizer.state.values() for each in state.values()]
        tensors += [torch.tensor(float(group["lr"]), dtype=torch.float64) for group in self.optimizer.param_groups]
        return [tensor.numpy().tobytes() for tensor in tensors]


def save(folder: Path) -> Path:
    subject = Subject()
    with subject.offloaded() as run:
        return run.save(folder, extra={"epoch": 1})


def signed(body: Any) -> bytes:
    """Returns a manifest with the right checksum."""
    inner = json.dumps(body, separators=(",", ":")).encode() if not isinstance(body, bytes) else body
    return START % checksum.of(inner).encode() + inner + b"}\n"


def change(checkpoint: Path, edit: Callable[[Any], Any]) -> None:
    """Edits the manifest in place, and updates its checksum."""
    file = checkpoint / "manifest.json"
    body = json.loads(file.read_text())["checkpoint"]
    file.write_bytes(signed(edit(body) or body))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(file: Path, header: dict[str, Any] | bytes, data: bytes, *, length: int | None = None) -> None:
    """Replaces the file's header by one of any length, and adapts the size in the manifest."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)

    def resize(body: Any) -> None:
        body["files"][file.name]["bytes"] = file.stat().st_size

    change(file.parent, resize)


def tensor(name: str, **changes: Any) -> Callable[[Path], None]:
    """Changes the manifest's entry of a tensor of the model."""
    return lambda checkpoint: change(checkpoint, lambda body: body["tensors"]["model"][name].update(changes))


def top(**changes: Any) -> Callable[[Path], None]:
    return lambda checkpoint: change(checkpoint, lambda body: body.update(changes))


def content(**changes: Any) -> Callable[[Path], None]:
    return lambda checkpoint: change(checkpoint, lambda body: body["content"].update(changes))


def in_header(edit: Callable[[dict[str, Any]], Any], *, data: Callable[[bytes], bytes] = bytes) -> Any:
    def damage(checkpoint: Path) -> None:
        header, rest = header_of(checkpoint / "model.safetensors")
        edited = edit(header)
        rewrite(checkpoint / "model.safetensors", header if edited is None else edited, data(rest))

    return damage


def text_of(data: bytes) -> Callable[[Path], Any]:
    return lambda checkpoint: (checkpoint / "manifest.json").write_bytes(data)


def instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        (checkpoint / name).rename(checkpoint.parent / f"moved-{name}")
        make(checkpoint / name)

    return damage


def cut(name: str, count: int) -> Callable[[Path], None]:
    return lambda checkpoint: os.truncate(checkpoint / name, (checkpoint / name).stat().st_size - count)


def swapped(header: dict[str, Any]) -> None:
    """Swaps two tensors of one size, without overlaps or holes."""
    first, second = header["1.weight"], header["1.bias"]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


def raw(header: dict[str, Any], old: str, new: str) -> bytes:
    text = json.dumps(header)
    assert old in text
    return text.replace(old, new, 1).encode()


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


ATTACKS: dict[str, Callable[[Path], Any]] = {
    # the manifest
    "manifest: empty": text_of(b""),
    "manifest: binary": text_of(bytes(range(256))),
    "manifest: cut": cut("manifest.json", 3),
    "manifest: not signed": text_of(START % b"00000000" + b"{}}\n"),
    "manifest: list": text_of(signed([])),
    "manifest: NaN": text_of(signed(b'{"version":NaN}')),
    "manifest: huge number": text_of(signed(b'{"version":1e999}')),
    "manifest: endless number": text_of(signed(b'{"version":' + b"9" * 5000 + b"}")),
    "manifest: deep": text_of(signed(nested(200_000))),
    "manifest: twice": text_of(signed(b'{"version":1,"version":1}')),
    "manifest: no utf-8": text_of(signed(b'{"version":"\xff"}')),
    "manifest: link": instead("manifest.json", lambda path: path.symlink_to("../moved-manifest.json")),
    "manifest: folder": instead("manifest.json", lambda path: path.mkdir()),
    "manifest: pipe": instead("manifest.json", os.mkfifo),
    "manifest: gone": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
    "version": top(version=2),
    "version true": top(version=True),
    "serial": top(serial=-1),
    "serial huge": top(serial=2**63),
    "step": top(step="1"),
    "older": top(older=[1]),
    "files": top(files=[]),
    "tensors": top(tensors={"model": []}),
    "section": top(tensors={"more": {}}),
    "no tensors": top(tensors={}),
    "ties": top(ties=[["0.weight"]]),
    "ties unknown": top(ties=[["x", "y"]]),
    "ties many": top(ties=[["0.weight", "0.more"]]),
    "content": top(content=[]),
    **{
        f"path {name}": top(files={name: {"bytes": 1, "crc32": "00000000"}})
        for name in ("../model.safetensors", "/etc/passwd", "a/model.safetensors", "", ".", "..", "model.safetensors\0")
    },
    **{
        f"tensor {key} {value!r:.20}": tensor("0.weight", **{key: value})
        for key, value in [
            ("file", "../model.safetensors"),
            ("file", "optimizer.safetensors"),
            ("file", None),
            ("bytes", [0, 24]),
            ("bytes", [10**9, 10**9 + 24]),
            ("bytes", [24, 0]),
            ("bytes", [-24, 0]),
            ("bytes", [0.0, 24.0]),
            ("bytes", [0, 24, 48]),
            ("bytes", "ab"),
            ("dtype", "F64"),
            ("dtype", "I32"),
            ("dtype", "F3"),
            ("dtype", None),
            ("shape", [2, 3]),
            ("shape", [3, 2.0]),
            ("shape", [3, True, 2]),
            ("shape", [2**62, 2**62, 0]),
            ("shape", [-3, -2]),
            ("shape", [1] * 100 + [6]),
            ("shape", 6),
            ("crc32", "00000000"),
            ("crc32", 5),
        ]
    },
    # the content
    "optimizer": content(optimizer=[]),
    "optimizer without groups": content(optimizer={"class": "x"}),
    "optimizer's options": content(
        optimizer={"class": "x", "groups": [{"params": [], "options": {"params": []}}], "state": {}}
    ),
    "optimizer's state": content(optimizer={"class": "x", "groups": [], "state": {"0.weight": {}}}),
    "optimizer's tensor": lambda checkpoint: change(
        checkpoint,
        lambda body: body["content"]["optimizer"]["state"]["0.weight"].update(exp_avg={"$": "tensor", "name": "no"}),
    ),
    "value unknown": lambda checkpoint: change(
        checkpoint, lambda body: body["content"]["optimizer"]["groups"][0]["options"].update(lr={"$": "exec"})
    ),
    "value no dtype": lambda checkpoint: change(
        checkpoint,
        lambda body: body["content"]["optimizer"]["groups"][0]["options"].update(lr={"$": "dtype", "name": "load"}),
    ),
    "value no table": lambda checkpoint: change(
        checkpoint,
        lambda body: body["content"]["optimizer"]["groups"][0]["options"].update(lr={"$": "dict", "items": [1]}),
    ),
    "schedule": content(schedule=5),
    "ranks": content(ranks=[]),
    "ranks of what": content(ranks=[5]),
    "random words": lambda checkpoint: change(
        checkpoint, lambda body: body["content"]["ranks"][0]["python"].update(words="zz")
    ),
    "random position": lambda checkpoint: change(
        checkpoint, lambda body: body["content"]["ranks"][0]["numpy"].update(position=10**6)
    ),
    "random position of python": lambda checkpoint: change(
        checkpoint, lambda body: body["content"]["ranks"][0]["python"].update(position=-5)
    ),
    "torch's random": lambda checkpoint: change(
        checkpoint, lambda body: body["content"]["ranks"][0].update(torch="00" * 5056)
    ),
    "torch's random short": lambda checkpoint: change(
        checkpoint, lambda body: body["content"]["ranks"][0].update(torch="00" * 16)
    ),
    "buffers": content(buffers=[{"1.running_mean": {"$": "tensor", "name": "no"}}]),
    # the files
    "file gone": lambda checkpoint: (checkpoint / "model.safetensors").unlink(),
    "file cut": cut("model.safetensors", 1),
    "file cut to nothing": lambda checkpoint: os.truncate(checkpoint / "model.safetensors", 0),
    "file longer": cut("model.safetensors", -1),
    "file link": instead("model.safetensors", lambda path: path.symlink_to("../moved-model.safetensors")),
    "file folder": instead("model.safetensors", lambda path: path.mkdir()),
    "file pipe": instead("model.safetensors", os.mkfifo),
    "file device": instead("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "text pipe": lambda checkpoint: (
        os.mkfifo(checkpoint / "config.json"),
        change(checkpoint, lambda body: body["files"].update({"config.json": {"bytes": 0, "crc32": "00000000"}})),
    ),
    "optimizer's file gone": lambda checkpoint: (checkpoint / "optimizer.safetensors").unlink(),
    # the header of a file that is as long as it should be
    "header empty": in_header(lambda header: b""),
    "header no table": in_header(lambda header: b"[]"),
    "header null": in_header(lambda header: b"null"),
    "header blank": in_header(lambda header: b" " + json.dumps(header).encode()),
    "header deep": in_header(lambda header: nested(200_000)),
    "header twice": in_header(lambda header: raw(header, '"0.bias"', '"0.weight"')),
    "header NaN": in_header(lambda header: raw(header, "[3, 2]", "[NaN, 2]")),
    "header huge": in_header(lambda header: raw(header, "[3, 2]", "[3e400, 2]")),
    "header endless": in_header(lambda header: raw(header, "[3, 2]", "[" + "3" * 5000 + ", 2]")),
    "header negative": in_header(lambda header: raw(header, "[3, 2]", "[-3, -2]")),
    "header other shape": in_header(lambda header: raw(header, "[3, 2]", "[2, 3]")),
    "header other type": in_header(lambda header: raw(header, '"F32"', '"I32"')),
    "header unknown type": in_header(lambda header: raw(header, '"F32"', '"F99"')),
    "header no type": in_header(lambda header: raw(header, '"F32"', "[]")),
    "header part more": in_header(lambda header: header["0.weight"].update(more=1)),
    "header part less": in_header(lambda header: header["0.weight"].pop("dtype")),
    "header entry": in_header(lambda header: header.update({"0.weight": 5})),
    "header name more": in_header(lambda header: header.update(more=header["0.weight"])),
    "header name less": in_header(lambda header: header.pop("0.weight") and None),
    "header other name": in_header(lambda header: header.update(more=header.pop("0.weight"))),
    "header swapped": in_header(swapped),
    "header overlap": in_header(lambda header: header["1.bias"].update(data_offsets=[0, 12])),
    "header hole": in_header(lambda header: None, data=lambda data: data + b"\0" * 8),
    "header beyond": in_header(lambda header: None, data=lambda data: data[:-8]),
    "header metadata": in_header(lambda header: header.update(__metadata__={"format": 5})),
    "header long": lambda checkpoint: rewrite(
        checkpoint / "model.safetensors", *header_of(checkpoint / "model.safetensors"), length=2**63
    ),
    "header over the end": lambda checkpoint: rewrite(
        checkpoint / "model.safetensors", *header_of(checkpoint / "model.safetensors"), length=2**20
    ),
    "header of many names": in_header(
        lambda header: {f"{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(200_000)}
    ),
}
