"""How to train a model on several devices, before anything runs: ``hydra_ext.plan.pipeline``."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hydra_ext.errors import InvalidArgument
from hydra_ext.plan.pipelines.chains import Chain, ChainAt, affine
from hydra_ext.plan.pipelines.forecast import PipelinePlan
from hydra_ext.plan.pipelines.question import Cluster, Constraints, checked_kinds
from hydra_ext.plan.pipelines.search import nothing_possible, search
from hydra_ext.policy import parse_bytes
from hydra_ext.profile import device_of, dtype_of
from hydra_ext.profile.cards import USABLE, Card, Speed, card_named, link_of, speed_of_this_machine

Example = TypeVar("Example")

_CHAINS = "hydra_ext.split.chains"  # by name: split knows cuts, and is above the planners, as kinds of problems are


class _Chains(Protocol):
    def microbatch_chain(
        self,
        model: nn.Module,
        example: Any,
        fn: Callable[[Any], Any],
        *,
        samples: int,
        speed: Speed | None,
        param_dtype: torch.dtype | None,
    ) -> tuple[Chain, str | None]: ...


def pipeline(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    *,
    devices: int,
    batch: int | None = None,
    microbatches: int | None = None,
    budget: int | str | None = None,
    device: Card | str | None = None,
    link: float | str | None = None,
    latency: float = 0.0,
    param_dtype: torch.dtype | None = None,
    state_copies: float = 2.0,
    schedule: str | Sequence[str] | None = None,
    stages: int | None = None,
    replicas: int | None = None,
    recompute: bool | None = None,
) -> PipelinePlan:
    """Plans how :class:`~hydra_ext.Pipeline` trains a model on several devices: no step is made, no memory is taken.

    It chooses the number of lines and of ranks in each (width and depth), the size of microbatches, the cuts, the
    schedule, and whether to recompute. The simulator of schedules judges each choice, with seconds from dry runs of two
    sizes of microbatches: those of others lie on the line through them.

    Args:
        model: Any module, also one on meta.
        example: Samples along the first dimension of each tensor, in any containers. The numbers are not read, unless
            ``fn`` needs them: then two real microbatches are made.
        fn: As for ``Pipeline.step``: returns the loss of a microbatch.
        devices: Number of devices. All are used.
        batch: Samples of a step on all devices together; by default those of ``example``.
        microbatches: Of a step, in each line. What is None is chosen, here and for the last four.
        budget: Bytes of each device. None takes the card's memory, or without a card sets no limit.
        device: The name of a known card, such as ``"rtx4090-24"``, or a card's figures; None for this machine.
        link: Bytes a second between two ranks, each way; None for the card's link to its host, or for no limit.
        latency: Seconds that a message takes beside its bytes.
        param_dtype: Dtype in which weights compute; by default the model's own.
        state_copies: Bytes of the optimizer's state for each byte of weights.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` or ``"2bw"``, whose numbers are others, or several of them.
        stages: Of the model.
        replicas: Number of lines.
        recompute: Whether to recompute.

    Raises:
        PlanDoesNotFit: No choice stays within the budget.
        PlanError: The constraints contradict each other, or the batch.
        NotOnFakeTensors: ``fn`` needs numbers, and the model or the example has none.
        SplitError: The forward cannot be followed.
        InvalidArgument: The card is unknown, or a number is not positive.
    """
    card = card_named(device) if isinstance(device, str) else device
    given = {"width": replicas, "stages": stages, "microbatches": microbatches}
    constraints = _constraints(rows_of(example) if batch is None else batch, schedule, recompute, given)
    if not constraints.sizes(_checked("devices", devices)):
        raise nothing_possible(constraints, devices)
    speed = _speed_of(model, card, param_dtype)
    cluster = _cluster(devices, card, speed, link_of(link, card), latency, state_copies, budget)
    chain_at, because = _chains(model, example, fn, constraints.sizes(devices), speed, param_dtype)
    return replace(search(chain_at, cluster, constraints), measured_because=because)


def _constraints(
    batch: int, schedule: str | Sequence[str] | None, recompute: bool | None, given: Mapping[str, int | None]
) -> Constraints:
    numbers = {name: None if number is None else _checked(name, number) for name, number in given.items()}
    return Constraints(
        batch=_checked("batch", batch),
        schedules=checked_kinds(schedule),
        recompute=recompute,
        width=numbers["width"],
        stages=numbers["stages"],
        microbatches=numbers["microbatches"],
    )


def _cluster(
    devices: int,
    card: Card | None,
    speed: Speed,
    link: float,
    latency: float,
    state_copies: float,
    budget: int | str | None,
) -> Cluster:
    usable = None if card is None else int(card.memory_bytes * USABLE)
    return Cluster(
        devices=devices,
        bytes_per_second=link,
        latency=_not_negative("latency", latency),
        update_seconds=update_seconds(speed.bytes_per_second, _not_negative("state_copies", state_copies)),
        state_copies=state_copies,
        budget=usable if budget is None else parse_bytes(budget),
    )


def _chains(
    model: nn.Module,
    example: Any,
    fn: Callable[[Any], Any],
    sizes: Sequence[int],
    speed: Speed,
    param_dtype: torch.dtype | None,
) -> tuple[ChainAt, str | None]:
    """The chains of all sizes, and why microbatches had to be real ones."""
    chains = cast(_Chains, importlib.import_module(_CHAINS))
    (small, because), *large = (
        chains.microbatch_chain(
            model, first_rows(example, size), fn, samples=size, speed=speed, param_dtype=param_dtype
        )
        for size in sorted({sizes[0], sizes[-1]})
    )
    return affine(small, large[0][0] if large else small), because


def update_seconds(memory_speed: float, state_copies: float) -> float:
    """Of an optimizer, for each byte of weights. It reads the gradient, and reads and writes weights and state."""
    return (3 + 2 * state_copies) / memory_speed


def rows_of(example: Any) -> int:
    """The number of samples in an example.

    Raises:
        InvalidArgument: Its tensors have no rows, or not equally many.
    """
    rows = {leaf.shape[0] for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(rows) != 1 or 0 in rows:
        raise InvalidArgument(
            f"example has tensors with {sorted(rows)} rows: give samples along the first dimension of each tensor"
        )
    return int(rows.pop())


def first_rows(example: Example, count: int) -> Example:
    """The first samples of an example, which begins anew if it has too few."""

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return leaf[:count] if count <= leaf.shape[0] else torch.cat([leaf] * -(-count // leaf.shape[0]))[:count]

    taken: Example = pytree.tree_map(of_leaf, example)
    return taken


def _speed_of(model: nn.Module, card: Card | None, param_dtype: torch.dtype | None) -> Speed:
    dtype = param_dtype or dtype_of(model)
    return speed_of_this_machine(device_of(model, None), dtype) if card is None else card.speed(dtype)


def _checked(name: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidArgument(f"{name}={number!r}: give a whole number from 1 on")
    return number


def _not_negative(name: str, number: float) -> float:
    if not (number >= 0 and math.isfinite(number)):
        raise InvalidArgument(f"{name}={number!r}: give 0 or more")
    return number
