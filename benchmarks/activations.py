"""What a step holds and takes, by what becomes of saved tensors: python benchmarks/activations.py [--rounds 9] [--tiny]

Two models: VGG-16 with batch normalisation, and a GPT-2 of six layers; random images and tokens.
A step is forward and backward. Every candidate's gradients are first compared with plain PyTorch's, bit for bit.

Beside plain PyTorch (keep): hydra_ext.stash(Offload()) as it comes, and with a budget of an eighth of what a step
saves; vDNN's conv, and dynamic with a budget of five eighths; Compress, whose streams leave, or stay with a budget of
half of what a step saves; torch's save_on_cpu; copies on a stream as torchtune's.

(bytes) The highest sum of what a step has allocated on the simulated device, counted by its allocator: activations,
    the batch, gradients of activations, what operations use meanwhile. Parameters are not in it, nor are their
    gradients, which go as soon as they are summed. Goal: at most half of what keeping everything takes.
    With Compress whose streams stay less than without it.
(time) A step's time over that of keeping everything, by turns. Goal: at most 1.03. Of dynamic, once it has chosen, over
    that of Offload and of conv with the same budget: at most 1.03 times the better one.

The link is the same for all, and so fast that transfers can be hidden: in each direction the bytes that a step saves
take a third of the time that forward takes in plain PyTorch, or backward if that is shorter; a sixth for VGG, whose
first four convolutions save seven tenths of the bytes in a third of the time. --hiding takes another part for both.
saved_elsewhere.py has what is compared with, and what of it is emulated. Waits of a stash are printed as it reports
them, of all rounds together.

Compute runs on one thread; the lanes' copies, which a GPU leaves to its copy engines, run on another core. They share
its memory's bandwidth with compute, as those engines hardly do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from measure import compare
from models import Size, keep_freed_memory, make_model, make_vgg, parameter_bytes
from saved_elsewhere import SaveOnCpu, StreamedCopies
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

import hydra_ext
from hydra_ext import _C

MOST_BYTES, MOST_TIME = 0.5, 1.03
STEPS = 3  # whose peaks are counted
UNLIMITED = 2**62


@dataclass(frozen=True)
class Task:
    """A model and one batch.

    Attributes:
        batch: on the host.
        loss: of the batch on the device.
        hiding: how much faster the link is than the sum of bytes needs.
    """

    name: str
    model: nn.Module
    batch: Tensor
    loss: Callable[[Tensor], Tensor]
    hiding: float = 3.0

    def step(self, inside: AbstractContextManager[object]) -> None:
        """Gradients are those of this step alone, and stay until the next one."""
        self.model.zero_grad()
        batch = self.batch.clone()
        with inside:
            self.loss(batch).backward()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]


@dataclass(frozen=True)
class Saved:
    """What a step saves for backward: each storage once, parameters and buffers not at all."""

    bytes: int
    largest: int  # of a storage


@dataclass(frozen=True)
class Setting:
    """What candidates are made for.

    Attributes:
        speed: of the link in each direction, bytes a second.
    """

    task: Task
    saved: Saved
    speed: float

    def stash(self, policy: Any, share: float | None = None) -> hydra_ext.stash:
        """``share`` of what a step saves may stay on the device; without one it is the stash that chooses."""
        budget = None if share is None else int(share * self.saved.bytes)
        device = hydra_ext.SimulatedDevice(
            to_device_bytes_per_second=self.speed, to_host_bytes_per_second=self.speed, poison=False
        )
        return hydra_ext.stash(policy, budget=budget, model=self.task.model, device=device)


@dataclass(frozen=True)
class Candidate:
    """A way to keep saved tensors.

    Attributes:
        make: what is entered for each step, the same again and again.
        has_goals: whether the goals are its own.
        is_exact: gradients are those of plain PyTorch.
        below: the candidate that it is to hold less than.
    """

    name: str
    make: Callable[[Setting], AbstractContextManager[object]]
    has_goals: bool = False
    is_exact: bool = True
    below: str | None = None


KEEP = "keep"
DYNAMIC = "dynamic"
CANDIDATES = [
    Candidate("Offload", lambda setting: setting.stash(hydra_ext.Offload()), has_goals=True),
    Candidate("Offload, 1/8", lambda setting: setting.stash(hydra_ext.Offload(), 1 / 8), has_goals=True),
    Candidate("conv", lambda setting: setting.stash(hydra_ext.Offload("conv"))),
    Candidate("dynamic, 5/8", lambda setting: setting.stash(hydra_ext.Offload("dynamic"), 5 / 8)),
    Candidate("Compress", lambda setting: setting.stash(hydra_ext.Compress()), is_exact=False),
    Candidate("Compress, 1/2", lambda setting: setting.stash(hydra_ext.Compress(), 1 / 2), is_exact=False, below=KEEP),
    Candidate("save_on_cpu", lambda setting: SaveOnCpu(setting.speed)),
    Candidate("streamed copies", lambda setting: StreamedCopies(setting.speed)),
]


def vgg(*, tiny: bool) -> Task:
    images, pixels, width = (2, 32, 4) if tiny else (16, 64, 64)
    model = make_vgg(width)
    batch = torch.randn(images, 3, pixels, pixels).contiguous(memory_format=torch.channels_last)
    classes = torch.randint(0, 10, (images,))
    return Task("VGG-16", model, batch, lambda batch: cross_entropy(model(batch), classes), hiding=6.0)


def gpt2(*, tiny: bool) -> Task:
    model = make_model(Size(layers=2, width=64, tokens=64) if tiny else Size(layers=6, width=768, tokens=256))
    ids = torch.randint(0, 256, (1, 64 if tiny else 256))
    return Task("GPT-2", model, ids, lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss)


def saved_by(task: Task) -> Saved:
    own = {held.untyped_storage().data_ptr() for held in task.model.state_dict().values()}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = task.loss(task.batch)  # what it holds keeps addresses apart
    del loss
    return Saved(sum(sizes.values()), max(sizes.values()))


def speed_that_hides(task: Task, saved: Saved, rounds: int) -> float:
    """Of a link, in bytes a second: see the module's docstring."""
    forward, backward = [], []
    for _ in range(rounds):
        task.model.zero_grad()
        begin = time.perf_counter()
        loss = task.loss(task.batch)
        between = time.perf_counter()
        loss.backward()
        forward.append(between - begin)
        backward.append(time.perf_counter() - between)
    shortest = min(forward), min(backward)  # the least disturbed ones: the link is the same in every run
    speed = task.hiding * saved.bytes / min(shortest)
    print(
        f"{task.name}: forward {shortest[0]:.3f} s, backward {shortest[1]:.3f} s, link {speed / 1e9:.2f} GB/s each way"
    )
    return speed


def is_asked_for(only: str, task: Task, name: str) -> bool:
    return f"{task.name}, {name}".startswith(only)


def check_gradients(setting: Setting, candidate: Candidate, expected: list[Tensor]) -> None:
    """Of a first step and of a second, which may know more."""
    inside = candidate.make(setting)
    for _ in range(2 if candidate.is_exact else 0):
        setting.task.step(inside)
        found = setting.task.gradients()
        if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
            sys.exit(f"{candidate.name} changes the gradients of {setting.task.name}")


def peak_bytes(task: Task, inside: AbstractContextManager[object]) -> int:
    """The highest of some steps: with transfers under way it is not the same in each."""
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        for parameter in task.model.parameters()
    ]
    task.model.zero_grad()
    peaks = []
    for _ in range(STEPS):
        charged = _C.Charged(UNLIMITED)
        with charged:
            task.step(inside)
        peaks.append(charged.ledger.peak)
    for handle in handles:
        handle.remove()
    return max(peaks)


def compare_bytes(setting: Setting, candidates: list[Candidate]) -> None:
    name = setting.task.name
    peaks = {KEEP: peak_bytes(setting.task, nullcontext())}
    print(f"(bytes) {name}, {KEEP}: {peaks[KEEP] / 2**20:.1f} MiB")
    for candidate in candidates:
        peak = peaks[candidate.name] = peak_bytes(setting.task, candidate.make(setting))
        said = f"(bytes) {name}, {candidate.name}: {peak / 2**20:.1f} MiB, {peak / peaks[KEEP]:.1%} of {KEEP}"
        if candidate.has_goals:
            said += f": at most {MOST_BYTES:.0%} {judged(peak <= MOST_BYTES * peaks[KEEP])}"
        if candidate.below is not None:
            said += f": less than {candidate.below} {judged(peak < peaks[candidate.below])}"
        print(said)


def judged(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def compare_times(setting: Setting, candidates: list[Candidate], rounds: int) -> None:
    task = setting.task
    for candidate in candidates:
        inside = candidate.make(setting)
        result = compare(lambda: task.step(nullcontext()), lambda: task.step(inside), rounds=rounds)  # noqa: B023
        verdict = result.verdict(margin=MOST_TIME - 1, holds=result.ratio <= MOST_TIME)
        print(f"(time) {task.name}, {candidate.name}: {result.subject_seconds:.3f} s, {KEEP} "
              f"{result.reference_seconds:.3f} s, ratio {result.ratio:.4f}, spread {result.spread:.4f}"
              f"{f': at most {MOST_TIME} {verdict}' if candidate.has_goals else ''}")  # fmt: skip
        if isinstance(inside, hydra_ext.stash):
            print(inside.report())


def compare_dynamic(setting: Setting, rounds: int) -> None:
    """Against what it chooses from."""
    task, share = setting.task, 5 / 8
    dynamic = setting.stash(hydra_ext.Offload("dynamic"), share)
    while dynamic.report().chosen is None:
        task.step(dynamic)
    for which in ("all", "conv"):
        other = setting.stash(hydra_ext.Offload(which), share)
        result = compare(lambda: task.step(other), lambda: task.step(dynamic), rounds=rounds)  # noqa: B023
        verdict = result.verdict(margin=MOST_TIME - 1, holds=result.ratio <= MOST_TIME)
        print(f"(time) {task.name}, dynamic ({dynamic.report().chosen}) over {which}: ratio {result.ratio:.4f}, spread "
              f"{result.spread:.4f}: at most {MOST_TIME} {verdict}")  # fmt: skip


def examine(task: Task, rounds: int, only: str) -> None:
    """Those whose model and name begin with ``only``."""
    candidates = [candidate for candidate in CANDIDATES if is_asked_for(only, task, candidate.name)]
    if not candidates and not is_asked_for(only, task, DYNAMIC):
        return
    saved = saved_by(task)
    print(f"{task.name}: parameters {parameter_bytes(task.model) / 2**20:.1f} MiB, their gradients as many; saved "
          f"{saved.bytes / 2**20:.1f} MiB, the largest {saved.largest / 2**20:.1f} MiB")  # fmt: skip
    setting = Setting(task, saved, speed_that_hides(task, saved, rounds))
    task.step(nullcontext())
    expected = task.gradients()
    for candidate in candidates:
        check_gradients(setting, candidate, expected)
    compare_bytes(setting, candidates)
    compare_times(setting, candidates, rounds)
    if is_asked_for(only, task, DYNAMIC):
        compare_dynamic(setting, rounds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="small models, to see that the benchmark runs")
    parser.add_argument("--hiding", type=float, help="how much faster the link is than the sum of bytes needs")
    parser.add_argument("--only", default="", help="one model, or one way of it, as 'VGG-16, Offload'")
    options: Any = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    for make in (vgg, gpt2):
        task = make(tiny=options.tiny)
        examine(task if options.hiding is None else replace(task, hiding=options.hiding), options.rounds, options.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
