"""A job: one model's training, as functions that build its parts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hydra_ext.errors import InvalidJob
from hydra_ext.fleet import references

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")
_FUNCTIONS = ("model", "optimizer", "data", "loss", "schedule", "evaluate")
_TAKEN = ("trials", "requests", "journal.jsonl", "workers.lock")  # what a fleet's folder has itself
_OPTIONAL = ("schedule", "evaluate")
_SEEDS = 2**62


@dataclass(frozen=True)
class Job:
    """One model's training in a fleet.

    The functions build what they are named after, in the process that trains. Each is a function or class at the top
    of a module, or ``functools.partial`` of one with numbers, texts, lists, dicts and dtypes. A technique runs this
    loop, whose bits it has with ``exact=True``::

        seed_everything(seed)                       # torch, random, numpy
        net = model()
        optimizer_, batches = optimizer(net.parameters()), data()
        schedule_ = schedule(optimizer_)
        for step in range(steps):
            microbatches = batches[step % len(batches)]
            for microbatch, seed_ in zip(microbatches, job.seeds(step, len(microbatches))):
                torch.manual_seed(seed_)
                (loss(net, microbatch) / len(microbatches)).backward()
            clip_grad_norm_(net.parameters(), max_norm)   # with max_norm=
            optimizer_.step()
            schedule_.step()
            optimizer_.zero_grad()
        seed_everything(seed_of(seed, "evaluation"))
        net.eval()                                  # and the mean of loss(net, microbatch) over evaluate()

    ``clip_grad_norm_`` is that of ``hydra_ext.optim`` with an optimizer from there, and torch's with others.

    Attributes:
        name: Of letters, digits and ``._=+-``: the job's folder in the fleet's.
        model: Makes the module.
        optimizer: Makes the optimizer from an iterable of parameters.
        data: Makes the steps' batches: a sequence of lists of microbatches, which begins anew after its end. Or an
            iterable of them: it is seeded before each batch, and a job that resumes reads past those it has seen.
        loss: Called as ``loss(model, microbatch)``; gives the loss of one microbatch.
        steps: Number of steps.
        schedule: Makes the schedule of the learning rate from the optimizer; its ``step()`` follows each step.
        evaluate: Makes an iterable of microbatches that the job's weights are judged by when it ends: the mean of
            ``loss``, in evaluation mode.
        max_norm: Norm to which a step's gradients are clipped; None for no clipping.
        delayed: Whether a pipeline may use gradients of the weights before the newest (``schedule="2bw"``).
        exact: Whether only techniques are taken that give the bits of this loop.
        seed: Of the model, the data, and every microbatch.

    Raises:
        InvalidJob: An argument is not as given here.
    """

    name: str
    _: KW_ONLY
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor]], Optimizer]
    data: Callable[[], Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    steps: int
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    evaluate: Callable[[], Iterable[Any]] | None = None
    max_norm: float | None = None
    delayed: bool = False
    exact: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def describe(self) -> dict[str, Any]:
        """The job as JSON.

        Raises:
            InvalidJob: A function cannot be found again by a name.
        """
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return found | {key: references.describe(found[key], f"job {self.name!r}: {key}") for key in _FUNCTIONS}

    @staticmethod
    def of(described: dict[str, Any]) -> Job:
        """The job that was described.

        Raises:
            InvalidJob: A function is not there any more.
        """
        return Job(**described | {key: references.resolve(described[key]) for key in _FUNCTIONS})

    def seeds(self, step: int, count: int) -> list[int]:
        """The seeds of a step's microbatches."""
        return [seed_of(self.seed, step, number) for number in range(count)]


def seed_of(seed: int, *place: int | str) -> int:
    """A seed for one place in a job: always the same one, and unlike those of other places."""
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % _SEEDS


def _check(job: Job) -> None:
    if not isinstance(job.name, str) or not _NAME.fullmatch(job.name):
        raise InvalidJob(
            f"a job is named {job.name!r}: its folder has this name, so give up to 100 letters, digits and ._=+-, the "
            "first a letter or a digit"
        )
    if job.name in _TAKEN:
        raise InvalidJob(f"a job is named {job.name!r}, which a fleet's folder has itself: give another name")
    for key in _FUNCTIONS:
        value = getattr(job, key)
        if not callable(value) and not (value is None and key in _OPTIONAL):
            raise InvalidJob(f"job {job.name!r}: {key} is a {type(value).__name__}: give a function that makes it")
    if isinstance(job.steps, bool) or not isinstance(job.steps, int) or job.steps < 1:
        raise InvalidJob(f"job {job.name!r}: steps={job.steps!r}: give a number of steps, 1 or more")
    if isinstance(job.seed, bool) or not isinstance(job.seed, int):
        raise InvalidJob(f"job {job.name!r}: seed={job.seed!r}: give a whole number")
    norm = job.max_norm
    if norm is not None and (
        isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 < norm < float("inf")
    ):
        raise InvalidJob(f"job {job.name!r}: max_norm={norm!r}: give a positive number, or None")
    if job.delayed and job.exact:
        raise InvalidJob(
            f"job {job.name!r}: delayed=True takes gradients of older weights, which exact=True rules out: give "
            "exact=False with it"
        )
