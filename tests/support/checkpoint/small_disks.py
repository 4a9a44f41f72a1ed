"""Trains with disks that are too small, and prints the outcome as JSON.

Run as ``python -m support.checkpoint.small_disks CASE FOLDER`` by observe(), in a process with mounts of its own,
which end with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import hydra_ext

_OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]
LAYERS = 24


def allowed() -> bool:
    """Whether a process may have its own mounts."""
    if shutil.which(_OWN_MOUNTS[0]) is None:
        return False
    mounting = [*_OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(mounting, capture_output=True, check=False).returncode == 0


def observe(case: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Returns the outcome of one of the cases below."""
    done = subprocess.run(
        [
            *_OWN_MOUNTS,
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "support.checkpoint.small_disks",
            case.__name__,
            str(folder),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _mount(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)


def _enlarge(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def _used(folder: Path) -> int:
    """Returns the bytes in use, including those of unnamed files."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _make() -> tuple[Any, Any]:
    import torch
    from torch import nn

    from support.runtime.native import OPTIMIZERS, WIDTH

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    return model, OPTIMIZERS["adamw"](model.parameters())


def _same(plain: list[Any], offloaded: list[Any]) -> bool:
    import torch

    return all(map(torch.equal, plain, offloaded)) and len(plain) == len(offloaded) > 0


def _context(
    model: Any, optimizer: Any, folder: Path, *, budget: int = 2**19, host_budget: int = 340_000
) -> hydra_ext.offload:
    """Enters a context with all blocks on the disk."""
    import hydra_ext

    return hydra_ext.offload(
        model,
        optimizer,
        budget=budget,
        host_budget=host_budget,
        spill_dir=folder,
        blocks=list(model.children()),
        device="simulated",
        checks=hydra_ext.Checks(poison_hosts=True),
    )


def _refusal(model: Any, optimizer: Any, folder: Path) -> str:
    import hydra_ext

    try:
        with _context(model, optimizer, folder):
            return ""
    except hydra_ext.errors.SpillError as error:
        return str(error)


def spilling(folder: Path) -> dict[str, Any]:
    """Trains with a disk for weights and state that is first too small, and then large enough."""
    from support.runtime.footprint import footprint, process_footprint
    from support.runtime.native import state, train

    plain, theirs = _make()
    model, ours = _make()
    expected = train(plain, theirs)
    seen: dict[str, Any] = {}
    _mount(folder, "1m")
    before = footprint(model), process_footprint()
    seen["told"] = [_refusal(model, ours, folder)]
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=2**40)):  # as if it was taken a moment later
        seen["told"].append(_refusal(model, ours, folder))
    seen["unchanged"] = (footprint(model), process_footprint()) == before and not ours.state
    seen["used"], seen["names"] = _used(folder), os.listdir(folder)
    _enlarge(folder, "8m")
    with _context(model, ours, folder) as run:
        seen["same losses"] = _same(expected, train(model, ours))
        run.core.update.finish()
        seen["on disk"] = run.report().disk_bytes
        seen["reserved"] = _used(folder)
    seen["left"], seen["same state"] = _used(folder), _same(state(plain, theirs), state(model, ours))
    return seen


def stashing(folder: Path) -> dict[str, Any]:
    """Trains with a disk that becomes full as saved tensors leave, and then has room for them."""
    import hydra_ext
    from support.runtime.native import WIDTH, state

    plain, theirs = _make()
    model, ours = _make()
    batch = _batch(512, WIDTH)
    expected = [_step(plain, theirs, batch) for _ in range(3)]
    seen: dict[str, Any] = {}
    _mount(folder, "3m")
    with _context(model, ours, folder, budget=2**20, host_budget=500_000) as run:
        seen["model"] = _used(folder)
        try:
            _step(model, ours, batch)
        except hydra_ext.errors.SpillError as error:
            seen["told"] = str(error)
        seen["full"] = _used(folder)
        ours.zero_grad()
        _enlarge(folder, "8m")
        losses = [_step(model, ours, batch) for _ in range(3)]
        report = run.report().activations
        seen["written"] = 0 if report is None else report.copies.disk_written_bytes
        run.core.update.finish()
    seen["left"] = _used(folder)
    seen["same losses"] = _same(expected, losses)
    seen["same state"] = _same(state(plain, theirs), state(model, ours))
    return seen


def _batch(rows: int, width: int) -> Any:
    import torch

    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def _step(model: Any, optimizer: Any, batch: Any) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def saving(folder: Path) -> dict[str, Any]:
    """Saves to a disk with room for one checkpoint, and then for more."""
    import hydra_ext
    from hydra_ext.checkpoint.verifying import verify
    from support.runtime.native import state, train

    plain, theirs = _make()
    model, ours = _make()
    seen: dict[str, Any] = {}
    checkpoints, spill = folder / "checkpoints", folder / "spill"
    checkpoints.mkdir()
    _mount(checkpoints, "2m")
    expected = [train(plain, theirs) for _ in range(3)]
    with _context(model, ours, spill) as run:
        losses = [train(model, ours)]
        run.save(checkpoints)
        first, used = run.steps, _used(checkpoints)
        losses.append(train(model, ours))
        try:
            run.save(checkpoints)
        except hydra_ext.errors.SaveFailed as error:
            seen["told"], seen["needed"], seen["free"] = str(error), error.needed_bytes, error.free_bytes
        seen["left"] = _used(checkpoints) - used
        seen["kept"] = [(verdict.state, verdict.step == first) for verdict in verify(checkpoints)]
        losses.append(train(model, ours))
        _enlarge(checkpoints, "8m")
        run.save(checkpoints)
        seen["states"] = [verdict.state for verdict in verify(checkpoints)]
        seen["on disk"] = run.report().disk_written_bytes
    seen["same losses"] = all(map(_same, expected, losses))
    seen["same state"] = _same(state(plain, theirs), state(model, ours))
    other, its = _make()
    with _context(other, its, spill) as run:
        run.load(checkpoints)
        train(other, its)
    train(plain, theirs)
    seen["goes on"] = _same(state(plain, theirs), state(other, its))
    return seen


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    cases: dict[str, Callable[[Path], dict[str, Any]]] = {each.__name__: each for each in (spilling, stashing, saving)}
    print(json.dumps(cases[sys.argv[1]](Path(sys.argv[2]))))


if __name__ == "__main__":
    _main()
