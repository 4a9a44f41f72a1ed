"""Plain models trained by pipelines of several processes, and by one process without stages.

The reference is the unchanged model with plain accumulation. It also follows two rules of the pipeline:

- the rule of random numbers, if the model draws any;
- the order of sums for a weight that several stages use: each stage sums its gradients over all microbatches, then the
  stages' sums are added, the last stage's first. For that the weight has a *twin* for every stage.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import hydra_ext
from hydra_ext import Checks
from hydra_ext.pipeline import Pipeline
from hydra_ext.pipeline.stages import splitting
from hydra_ext.split import find_blocks, glue_parameters
from hydra_ext.split.stage_program import event_seed, microbatch_seed
from support.split.split_models import LIBRARY, VOCABULARY, Batch, Subject, causal
from support.split.split_models_more import MORE
from support.split.split_models_own import OWN
from support.summation import Summands, assert_sums_alike

SUBJECTS = LIBRARY | OWN | MORE
ONE_SHAPE = {"branches"}  # its weights decide its path, so that a rank without all of them cannot rehearse a new shape
SEED = 5


def _wide() -> nn.Module:
    sizes = {"n_embd": 128, "n_layer": 6, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops, tie_word_embeddings=False))


WIDE = Subject("wide", _wide, causal)  # so wide that stand-ins of one element are small beside a stage


@dataclass(frozen=True)
class Case:
    """One training of one model.

    Attributes:
        cuts: Blocks at which stages after the first begin; the pipeline chooses them if there are none.
        materialized: Whether ``hydra_ext.materialize`` makes the model.
        replicas: Number of replicas. All have the same data, so that the mean of their gradients is that of one, to the
            bit.
        max_norm: Maximum norm of all gradients together.
        budget: Bytes of the device, if the weights are on poisoned hosts.
    """

    name: str
    stages: int = 2
    schedule: str = "1f1b"
    cuts: tuple[str, ...] = ()
    microbatches: int = 4
    steps: int = 3
    materialized: bool = False
    recompute: bool = False
    replicas: int = 1
    optimizer: str = "adamw"
    max_norm: float | None = None
    budget: int | None = None

    @property
    def subject(self) -> Subject:
        return WIDE if self.name == WIDE.name else SUBJECTS[self.name]

    def data(self) -> list[list[Batch]]:
        """Returns data by step. Every second microbatch has fewer rows, and shorter ones if they are texts."""
        batches = self.subject.batches(self.steps * self.microbatches)
        if self.name not in ONE_SHAPE:
            batches = [_smaller(batch) if number % 2 else batch for number, batch in enumerate(batches)]
        return [batches[i : i + self.microbatches] for i in range(0, len(batches), self.microbatches)]


def _smaller(batch: Batch) -> Batch:
    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value[: value.shape[0] - 1]
        return value[:, :9].clone() if value.dim() == 2 and not value.is_floating_point() else value.clone()

    return {key: cut(value) for key, value in batch.items()}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "native-adamw": lambda parameters: hydra_ext.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1),
}


@dataclass
class Rank:
    """The final state of one rank.

    Attributes:
        events: Events of its stage: the first, and one after the last.
        gradients: Gradients that the first update used, of the parameters that got one.
        weights: Final values of all parameters of the rank's optimizer.
        buffers: Final buffers of the blocks that the rank calls.
        resident: Bytes of all parameters' memory.
        elements: Bytes of stand-ins among them, which have one element each.
        undead: Parameters that the rank does not hold, but whose first memory is still alive.
        filled: Names of the parameters that got memory, if the model was built in parts.
    """

    events: tuple[int, int]
    losses: list[Tensor]
    norms: list[float | None]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    resident: int
    elements: int
    undead: list[str]
    filled: set[str] = field(default_factory=set)
    device: dict[str, Any] | None = None


# ---- a rank ---------------------------------------------------------------------------------------------------------
def train_all(rank: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        try:
            results.append(vars(train(rank, case)))
        except Exception as error:
            raise RuntimeError(f"{case}: {type(error).__name__}") from error
    return results


def train(rank: int, case: Case) -> Rank:
    filled: set[str] = set()
    with _noting_filled(filled):
        model = _built(case)
        memory = {name: StorageWeakRef(p.untyped_storage()) for name, p in model.named_parameters()}
        held: list[nn.Parameter] = []
        first: list[tuple[nn.Parameter, Tensor]] = []
        hook: Any = None

        def note(*_: Any) -> None:
            first.extend(_gradients(held))
            hook.remove()  # a native optimizer with one does not step behind the next step

        def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            held.extend(parameters)
            optimizer = OPTIMIZERS[case.optimizer](parameters)
            nonlocal hook
            hook = optimizer.register_step_pre_hook(note)
            return optimizer

        with Pipeline(
            model,
            make_optimizer,
            schedule=case.schedule,
            microbatches=case.microbatches,
            cuts=list(case.cuts) or None,
            recompute=case.recompute,
            replicas=case.replicas,
            budget=case.budget,
            checks=Checks(poison_hosts=True) if case.budget is not None else None,
            seed=SEED,
        ) as pipe:
            outputs = [
                pipe.step(batches, lambda batch: case.subject.fn(model, batch), max_norm=case.max_norm)
                for batches in case.data()
            ]
            losses = [torch.stack(output.losses) for output in outputs]
            device = pipe.report().device
    names = {parameter: name for name, parameter in model.named_parameters()}
    program = pipe._engine.assembly.parts.own[0].program
    own = tuple(f"{name}." for name in program.events)
    gc.collect()
    weights = {names[parameter]: parameter.detach().clone() for parameter in held}
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return Rank(
        (program._lo, program._hi),
        losses,
        [None if output.grad_norm is None else output.grad_norm.item() for output in outputs],
        {names[parameter]: gradient for parameter, gradient in first},
        weights,
        {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name.startswith(own)},
        sum(storages.values()),
        sum(parameter.element_size() for parameter, name in names.items() if name not in weights),
        [name for name, ref in memory.items() if not case.materialized and name not in weights and not ref.expired()],
        filled - set(glue_parameters(model)),
        device and device.as_dict(),
    )


def _built(case: Case) -> nn.Module:
    if not case.materialized:
        return case.subject.make()
    torch.manual_seed(0)
    return hydra_ext.materialize(case.subject.build).train()


def _gradients(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    return [(p, p.grad.detach().clone()) for p in parameters if p.grad is not None]


@contextmanager
def _noting_filled(filled: set[str]) -> Iterator[None]:
    fill = splitting.fill

    def noting(model: nn.Module, names: Any = None, **options: Any) -> None:
        filled.update(dict(model.named_parameters()) if names is None else names)
        fill(model, names, **options)

    splitting.fill = noting
    try:
        yield
    finally:
        splitting.fill = fill


# ---- one process ----------------------------------------------------------------------------------------------------
class Whole:
    """The model in one process, with versions of its weights, and twins of weights that several stages use."""

    def __init__(self, case: Case, borders: Sequence[int], shared: Sequence[str]) -> None:
        self.case = case
        self.model = case.subject.make()
        self.names = dict(self.model.named_parameters())
        self.sums: dict[str, Tensor] = {}  # of the first step
        self.gradients: dict[str, Tensor] = {}  # of the first update: clipped
        self.losses: list[Tensor] = []
        self.norms: list[float] = []
        self._borders = list(borders)
        self._events = 0
        self._seed = 0
        self._twins = [
            {name: nn.Parameter(self.names[name].detach().clone()) for name in shared} for _ in range(len(borders) - 1)
        ]
        self._places = [
            (module, key, name)
            for name in shared
            for module in self.model.modules()
            for key, parameter in module._parameters.items()
            if parameter is self.names[name]
        ]
        self._follow_events()

    def _follow_events(self) -> None:
        depth = 0

        def before(_module: nn.Module, _args: Any) -> None:
            nonlocal depth
            depth += 1
            if depth > 1:
                return
            if self._events in self._borders:
                self._show(self._twins[self._borders.index(self._events)])
            if self.case.subject.random:
                torch.manual_seed(event_seed(self._seed, self._events))

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth:
                return
            if self.case.subject.random:
                torch.manual_seed(event_seed(self._seed, self._events, after=True))
            self._events += 1

        for block in find_blocks(self.model).values():
            block.register_forward_pre_hook(before)
            block.register_forward_hook(after)

    def _show(self, parameters: dict[str, nn.Parameter]) -> None:
        for module, key, name in self._places:
            module._parameters[key] = parameters[name]

    def _forward(self, batch: Batch, seed: int) -> Tensor:
        self._events, self._seed = 0, seed
        self._show(self._twins[0])
        torch.manual_seed(seed)
        output = self.case.subject.fn(self.model, batch)
        self._show(self.names)
        loss: Tensor = output[0] if isinstance(output, tuple) else output
        return loss

    def _batch(self, step: int, batches: Sequence[Batch], summands: Summands | None = None) -> None:
        """Leaves the step's gradients in ``grad``, and appends its losses."""
        losses = []
        for parameter in [*self.names.values(), *(p for twins in self._twins for p in twins.values())]:
            parameter.grad = None
        for number, batch in enumerate(batches):
            loss = self._forward(batch, microbatch_seed(SEED, 0, step, number))
            share = loss / len(batches)
            if summands is not None:
                summands.watch([share], self.names)
            share.backward()
            losses.append(loss.detach())
        for twins in reversed(self._twins):
            for name, twin in twins.items():
                known = self.names[name].grad
                if twin.grad is not None:
                    self.names[name].grad = twin.grad if known is None else known + twin.grad
        self.losses.append(torch.stack(losses))

    @torch.no_grad()
    def _take(self, weights: dict[str, Tensor]) -> None:
        for name, weight in weights.items():
            for parameter in (self.names[name], *(twins[name] for twins in self._twins if name in twins)):
                parameter.copy_(weight)

    def train(self, delay: int) -> None:
        """W(t+1) = W(t) - v * grad f(W(max(t - delay, 0)))."""
        optimizer = OPTIMIZERS[self.case.optimizer](self.names.values())
        versions = [self._weights()]
        for step, batches in enumerate(self.case.data()):
            self._take(versions[max(step - delay, 0)])
            self._batch(step, batches)
            self._take(versions[-1])
            if step == 0:
                self.sums = self._gradients()
            if self.case.max_norm is not None:
                self.norms.append(hydra_ext.optim.clip_grad_norm_(self.names.values(), self.case.max_norm).item())
            if step == 0:
                self.gradients = self._gradients()
            optimizer.step()
            versions.append(self._weights())

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.names.items() if p.grad is not None}

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.names.items()}


# ---- comparisons ----------------------------------------------------------------------------------------------------
def check(case: Case, ranks: Sequence[Rank]) -> None:
    for replica in range(case.replicas):
        _check_line(case, ranks[replica :: case.replicas])


def _check_line(case: Case, ranks: Sequence[Rank]) -> None:
    borders = [*(rank.events[0] for rank in ranks), ranks[-1].events[1]]
    assert all(low < high for low, high in pairwise(borders))
    held = [name for rank in ranks for name in rank.weights]
    shared = sorted({name for name in held if held.count(name) > 1})
    delay = 1 if case.schedule == "2bw" else 0
    twin = Whole(case, borders, shared)
    twin.train(delay)
    assert set(held) == set(twin.names)
    for place, rank in enumerate(ranks):
        where = f"{case}, borders {borders}, stage {place}"
        for step, (losses, expected) in enumerate(zip(rank.losses, twin.losses, strict=True)):
            assert torch.equal(losses, expected), f"{where}: losses of step {step}: {losses} and {expected}"
        if case.max_norm is not None:
            late = 2 * delay  # a step reports the norm of the update that it makes
            assert rank.norms == [None] * late + twin.norms[: len(twin.norms) - late], where
        assert set(rank.gradients) == set(twin.gradients) & set(rank.weights), where
        if case.budget is not None:
            assert rank.device is not None, where
            assert rank.device["windows"] > 0, where
        _check_tensors(where + ", gradient", rank.gradients, twin.gradients)
        _check_tensors(where + ", weight", rank.weights, twin.names)
        _check_tensors(where + ", buffer", rank.buffers, dict(twin.model.named_buffers()))
        own = sum(tensor.nbytes for tensor in rank.weights.values())
        assert rank.resident <= own + rank.elements, f"{where}: {rank.resident} bytes for {own}"
        assert not rank.undead, f"{where}: memory of {rank.undead}"
        assert rank.filled <= set(rank.weights), where
    _check_sums(case, shared, twin)


def _check_tensors(where: str, found: dict[str, Tensor], expected: dict[str, Any]) -> None:
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), f"{where} of {name}"


def _check_sums(case: Case, shared: Sequence[str], twin: Whole) -> None:
    """Compares the first step's sums with those of plain accumulation, without twins: only the order differs."""
    if not shared:
        return
    plain = Whole(case, [0, -1], [])
    summands = Summands()
    plain._batch(0, case.data()[0], summands)
    for name in shared:
        gradient = plain.names[name].grad
        if gradient is not None and case.optimizer != "sgd":
            assert_sums_alike(twin.sums[name], gradient, summands.bound(name), f"{case}: {name}")
