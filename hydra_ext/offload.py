"""``hydra_ext.offload``: trains or evaluates a model whose weights do not fit on the device."""

from __future__ import annotations

import os
import reprlib
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from hydra_ext import _C
from hydra_ext.activations.choice import (
    Choice,
    Planned,
    PlannedChoice,
    default_policy,
    planned_of,
    policies_of,
)
from hydra_ext.activations.saving import Saving
from hydra_ext.blocks import Layout, Site, block_limit, discover
from hydra_ext.errors import AlreadyOffloaded, BudgetTooSmall, InvalidArgument, StateError, UnsupportedModel
from hydra_ext.optim.host_optimizer import HostOptimizer
from hydra_ext.optim.rows import bring_to_host
from hydra_ext.optim.wrappers import is_made, unwrapped
from hydra_ext.policy import Checks, Keep, Offload, SimulatedDevice, parse_bytes
from hydra_ext.runtime import engine, root
from hydra_ext.runtime.placement import devices
from hydra_ext.runtime.placement.faces import can_dress
from hydra_ext.runtime.placement.moving_in import check_parameters, move_in, why_not_fillable
from hydra_ext.runtime.placement.residents import paged_buffers, resident_bytes
from hydra_ext.runtime.placement.spilling import HostLimit, Spilling
from hydra_ext.runtime.replicas import Replicas, check_group, choose_group, describe
from hydra_ext.runtime.rounds import fibers
from hydra_ext.runtime.run import Run
from hydra_ext.state.composites import inner_tensors
from hydra_ext.tables.discovery import can_be_on_disk, find_tables

if TYPE_CHECKING:
    from hydra_ext.heads.calls import Heads


@dataclass(frozen=True)
class _Activations:
    """What becomes of saved tensors.

    Attributes:
        policy: Of all, or by module; None if all stay. Where they are planned, the policy of those without any.
        planned: How, and the policies that modules have beside the plan; None if nothing is planned.
    """

    policy: Choice | None
    planned: Planned | None = None

    @staticmethod
    def of(chosen: PlannedChoice | None, model: nn.Module) -> _Activations:
        planned = None if chosen is None else planned_of(chosen, model)
        if planned is not None:
            return _Activations(Offload(), planned)
        policy: Any = chosen
        if policy is not None:
            default_policy(policy)  # raises InvalidArgument for an invalid policy
            policies_of(policy, model)
        return _Activations(policy)


class offload:  # noqa: N801 - a verb: it is used as a function
    """Keeps a model's weights on the host and brings each block to the device when it is needed.

    The training loop stays as it is. Parameters are ordinary CPU tensors to optimizers, clipping and ``state_dict()``;
    forward and backward see device tensors. Losses, gradients and weights are bit for bit those of plain PyTorch.
    After the context the model is a plain model again.

    A model that :func:`hydra_ext.materialize` made gets its numbers on entering, each block just before it moves to its
    home. If they are read from a file, the host holds the homes, the block that is moving and 64 MiB of the file.
    Otherwise the constructor is run once for each 2 GiB of blocks, and up to 2 GiB of drawn blocks wait for their
    homes. They wait in the memory that their homes will take.

    Args:
        model: Any module on the CPU, or one as :func:`hydra_ext.materialize` has returned it.
        optimizer: The optimizer of the model's parameters, also inside the wrapper of another library. None for
            evaluation.
        budget: Device bytes for weights, gradients and activations together: an int, or a text such as ``"8GiB"``.
            ``"auto"`` is 94 % of what a GPU has free, memory that torch has reserved there included.
        device: ``"cuda"``, ``"cuda:1"``, ``"simulated"``, a :class:`SimulatedDevice`, or a :class:`SharedDevice` inside
            one of its functions. ``None`` takes CUDA if there is one, otherwise a simulated device.
        blocks: Modules, or their names, that move as one; of an ``nn.ModuleList``, all of its modules together. Other
            blocks are found by size.
        host_budget: Host bytes for weights, gradients, optimizer state, saved tensors that have left the device, and
            working memory together. The rest goes to the disk: state before gradients, gradients before weights. Saved
            tensors get the room that these leave, and go to the disk beyond it. The optimizer, if any, has to be one
            of :mod:`hydra_ext.optim`. Tensors that ``run.sync()``, ``state_dict()`` and operations outside the model
            bring back to the host come on top. So does everything that the end of the context brings back.
        spill_dir: Folder for the rest, on a disk of this machine. It is made if it does not exist. The file in it has
            no name, is readable for this user alone, and is gone however the process ends.
        param_dtype: Dtype in which weights move and compute; by default the model's own.
        grad_dtype: Dtype in which gradients leave the device; by default their own.
        activations: Policy for tensors that the forward saves for backward. ``"auto"`` measures one microbatch and
            plans what stays, what leaves and what is computed again, so that steps fit the budget and are fast; see
            :meth:`Run.plan`. ``hydra_ext.Auto(...)`` is the same with an option. Hooks on saved tensors that are active
            around a forward take precedence. A policy such as ``hydra_ext.Offload()``, or one for each module, as
            :class:`hydra_ext.stash` takes it, is kept to. A mapping or a function may also give ``"auto"`` for the
            whole model, whose name is ``""``. Then policies of modules are constraints of the plan: ``Keep()`` and
            ``Offload()`` are followed, ``Recompute()`` too, and ``Compress()`` allows the plan to compress there. None
            leaves all tensors on the device.
        process_group: Ranks that train copies of this model together. None takes torch.distributed's default group if
            it is initialised and has several ranks; False takes none. The copies have to be alike. They begin with
            rank 0's parameters and buffers, as in ``DistributedDataParallel``; give the optimizers equal states.
        checks: Switches for tests.

    Raises:
        InvalidArgument: An argument is not of the type given here.
        InvalidBudget: The budget is not a size.
        InvalidDevice: The device does not exist, or this build cannot use it.
        BudgetTooSmall: The budget cannot hold the largest block. Nothing was changed.
        HostBudgetTooSmall: On entering: the host budget cannot hold the bytes that have to stay on the host.
        SpillError: ``spill_dir`` cannot be used, or the disk fails, on entering or later.
        UnsupportedModel: The model has parameters that cannot be offloaded.
        AlreadyOffloaded: The model, or a part of it, is inside another context.
        ReplicasDiffer: On entering: the ranks' models are not alike. Nothing was changed.
        ModelChanged: On entering: a parameter on meta is not the one that the constructor made. Nothing was changed.
        InvalidOptimizer: On entering: the optimizer's state is on meta. Nothing was changed.
        WeightsError: On entering: the files have changed since the model was built, and nothing was changed; or reading
            one failed. Blocks that have their numbers by then keep them, and entering again goes on from there.
        BuildDiffers: On entering: the constructor makes another model now. Blocks keep their numbers as above.
        RankFailed: On entering: another rank failed.
        MissingDependency: On entering: compiled models cannot be followed in this version of torch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        budget: int | str,
        device: SimulatedDevice | devices.PlaceMaker | devices.Place | torch.device | str | None = None,
        blocks: Sequence[nn.Module | str] | None = None,
        host_budget: int | str | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        param_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        activations: PlannedChoice | None = "auto",
        process_group: dist.ProcessGroup | Literal[False] | None = None,
        checks: Checks | None = None,
    ) -> None:
        _expect(isinstance(model, nn.Module), "model", model, "a torch.nn.Module")
        optimizer = unwrapped(optimizer)
        known = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
        _expect(known, "optimizer", optimizer, "a torch.optim.Optimizer; the budget has to be named, as budget=")
        if optimizer is not None and not is_made(optimizer):
            raise InvalidArgument(
                f"optimizer= is a {type(optimizer).__name__} with state of its own whose constructor does not call "
                "that of torch.optim.Optimizer, so its steps cannot be followed: let it call super().__init__()"
            )
        _expect(_is_floating(param_dtype), "param_dtype", param_dtype, "a floating dtype, such as torch.bfloat16")
        _expect(_is_floating(grad_dtype), "grad_dtype", grad_dtype, "a floating dtype, such as torch.bfloat16")
        _expect(checks is None or isinstance(checks, Checks), "checks", checks, "a hydra_ext.Checks(...)")
        listed = blocks is None or (isinstance(blocks, Iterable) and not isinstance(blocks, str))
        _expect(listed, "blocks", blocks, "a list of modules, or of their names")
        self._model = model
        self._optimizer = optimizer
        self._place = devices.choose(device)
        self._budget = self._place.free_bytes() if budget == "auto" else parse_bytes(budget)
        self._host_limit = HostLimit.of(host_budget, spill_dir, checks.spill_files if checks is not None else None)
        spills = self._host_limit is None or optimizer is None or isinstance(optimizer, HostOptimizer)
        _expect(
            spills, "optimizer", optimizer, "one of hydra_ext.optim, whose state can go to the disk, or no host_budget="
        )
        self._param_dtype = param_dtype
        self._grad_dtype = grad_dtype
        check_group(process_group)
        self._process_group = process_group
        self._activations = _Activations.of(activations, model)
        self._checks = checks or Checks()
        self._run: Run | None = None
        _refuse_unsupported(model)
        self._layout = self._find_layout(blocks)
        self._largest_block()

    def _find_layout(self, blocks: Sequence[nn.Module | str] | None) -> Layout:
        found = find_tables(self._model, budget=self._budget, blocks=blocks)
        tables = [replace(table, dtype=self._param_dtype, gradient_dtype=self._grad_dtype) for table in found]
        if self._host_limit is not None:
            tables = [table for table in tables if can_be_on_disk(table, self._host_optimizer)]
        buffers = paged_buffers(self._model, self._budget)
        tensors = [inner for parameter in self._model.parameters() for inner in inner_tensors(parameter).values()]
        total = sum(_face_bytes(tensor, self._param_dtype) for tensor in (*tensors, *buffers.values()))
        total -= sum(_face_bytes(table.weight, self._param_dtype) for table in tables)
        largest = block_limit(total, self._budget)
        layout = discover(self._model, largest_bytes=largest, modules=blocks, tables=tables, buffers=buffers)
        if self._param_dtype is not None and layout.composites:
            raise UnsupportedModel(
                f"the parameter '{layout.composites[0].name}' is quantised, and param_dtype={self._param_dtype} would "
                "change its scales: quantise a model of that dtype, and leave out param_dtype="
            )
        return layout

    @property
    def _host_optimizer(self) -> HostOptimizer | None:
        return self._optimizer if isinstance(self._optimizer, HostOptimizer) else None

    def _largest_block(self) -> tuple[str, int]:
        """Name and bytes of the largest block, which fits into the budget."""
        sizes = {block.name: _slot_bytes(block.parameters, self._param_dtype) for block in self._layout.blocks}
        buffers = resident_bytes(self._model, self._layout)
        name, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
        smallest = size + buffers
        if smallest > self._budget:
            raise BudgetTooSmall(
                f"budget={self._budget} cannot hold the largest block '{name}' of {_C.human_bytes(size)}"
                + (f" beside buffers of {_C.human_bytes(buffers)}" if buffers else "")
                + f": give at least {smallest} bytes, and room for activations on top, or name smaller blocks=; "
                "activations can leave the device (activations=) or be computed again (recompute= in run.step), and "
                "take less with fewer microbatches together (round_size=)",
                block=name,
                block_bytes=size,
                needed=smallest,
            )
        return name, size

    def __enter__(self) -> Run:
        with _C.Undisturbed():  # runs that share the device do not see half of what entering changes
            return self._enter()

    def _enter(self) -> Run:
        if self._run is not None:
            raise StateError("this offload context was entered before; make a new one")
        _refuse_nested(self._model)
        self._place.expect_room(self._budget, *self._largest_block())
        replicas = self._meet_others()
        arena = self._place.make_arena()
        backend = self._place.make_backend()
        stash = None
        if self._activations.policy is not None:
            stash = _C.Stash(backend=backend, arena=arena, device=self._place.device, budget=None)
        core = _C.PagedModel(
            backend=backend,
            arena=arena,
            device=self._place.device,
            gradient_bound=self._place.gradient_bound(self._budget),
            budget=self._budget,
            face_dtype=self._param_dtype,
            gradient_dtype=self._grad_dtype,
            poison_hosts=self._checks.poison_hosts,
            fault_path=self._checks.fault_path,
            stash=stash,
        )
        spilling = None
        try:
            spilling = self._make_spilling(core, replicas)
            if stash is not None and spilling is not None:
                spilling.limit(stash)
            move_in(core, self._model, self._layout, replicas, spilling)
        except BaseException:  # re-raised: the core has no other owner yet
            core.close()
            if spilling is not None:
                spilling.bring_tables_home()
            raise
        entered: weakref.WeakSet[Run] = weakref.WeakSet()
        self._run = Run(
            self._model,
            self._layout,
            core,
            budget=self._budget,
            place=self._place,
            replicas=replicas,
            saving=None if stash is None else self._make_saving(stash, entered),
            heads=self._make_heads(),
            spilling=spilling,
        )
        entered.add(self._run)
        try:
            self._run.open(self._optimizer, arena, casts=self._casts())
        except BaseException:  # re-raised: Python does not call __exit__ after a failed __enter__
            self._run.close()
            raise
        return self._run

    def _make_spilling(self, core: _C.PagedModel, replicas: Replicas | None) -> Spilling | None:
        if self._host_limit is None:
            return None
        blocks = self._layout.blocks
        return Spilling(
            core,
            self._layout,
            self._host_optimizer,
            self._host_limit,
            slot_bytes=lambda number: _slot_bytes(blocks[number].parameters, self._param_dtype),
            gradients_stay=replicas is not None,
            saved_leave=self._activations.policy is not None,
        )

    def _make_heads(self) -> Heads | None:
        planned = self._activations.planned
        if planned is None:
            return None
        from hydra_ext.heads.calls import Heads

        return Heads(self._model, self._budget, exact=not planned.auto.inexact_heads)

    def _make_saving(self, stash: _C.Stash, entered: weakref.WeakSet[Run]) -> Saving:
        """Makes the stash's hooks. What they hold does not hold the run, which holds them; ``entered`` has it."""
        layout, budget = self._layout, self._budget
        stays: dict[nn.Module, list[tuple[int, Site]]] = {}

        def whole(module: nn.Module) -> AbstractContextManager[object] | None:
            """In a round other microbatches run before each site, so one around several sites has all blocks pinned."""
            fiber = fibers.current()
            if module not in stays:
                stays[module] = _stay_of(module, layout)
            stay = stays[module]
            if fiber is None or not stay:
                return nullcontext()
            number, site = stay[0]
            blocks = tuple({block for _, inner in stay for block in inner.blocks})
            if sum(layout.blocks[block].nbytes for block in blocks) > budget:
                return None
            return fiber.inside(number, replace(site, blocks=blocks))

        return Saving(
            stash,
            self._activations.policy or Keep(),
            self._model,
            whole,
            optimizer=self._optimizer,
            face_of=lambda parameter: next((run.face_of(parameter) for run in entered), None),
            given=None if self._activations.planned is None else self._activations.planned.given,
        )

    def _casts(self) -> str:
        given = [name for name in ("param_dtype", "grad_dtype") if getattr(self, f"_{name}") is not None]
        return f"{given[0]}= changes types on the way between host and device" if given else ""

    def _meet_others(self) -> Replicas | None:
        group = choose_group(self._process_group)
        if group is not None and self._place.tenant is not None:
            raise InvalidArgument(
                "ranks of a process group cannot share their devices with other runs: give process_group=False, or a "
                "device of its own"
            )
        if group is None:
            check_parameters(self._model, self._optimizer)
            return None
        replicas = Replicas(group, self._place.device)
        replicas.together(lambda: check_parameters(self._model, self._optimizer))
        dtypes = f"param_dtype={self._param_dtype}, grad_dtype={self._grad_dtype}"
        replicas.expect_alike([dtypes, *describe(self._model, self._layout)])
        replicas.follow_first([*self._model.buffers(), *self._layout.stay])
        return replicas

    def __exit__(
        self, type_: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._run is None:
            return
        try:
            if type_ is None:
                self._run.end_steps()
        finally:
            self._run.close()


def _stay_of(module: nn.Module, layout: Layout) -> list[tuple[int, Site]]:
    """The sites inside a module other than itself, with their numbers."""
    inner = {*module.modules()} - {module}
    return [(number, site) for number, site in enumerate(layout.sites) if site.module in inner]


def _expect(condition: bool, name: str, given: object, wanted: str) -> None:
    if not condition:
        raise InvalidArgument(f"{name}={reprlib.repr(given)} is a {type(given).__name__}: give {wanted}")


def _is_floating(dtype: object) -> bool:
    return dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)


def _face_bytes(parameter: torch.Tensor, dtype: torch.dtype | None) -> int:
    itemsize = dtype.itemsize if dtype is not None and parameter.is_floating_point() else parameter.itemsize
    return parameter.numel() * itemsize


def _slot_bytes(parameters: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype | None) -> int:
    alignment = _C.PAGE_ALIGNMENT
    return sum(-(-_face_bytes(parameter, dtype) // alignment) * alignment for _, parameter in parameters)


_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def _refuse_unsupported(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise UnsupportedModel(
                f"'{name or type(model).__name__}' is a scripted module, whose calls cannot be followed; "
                "offload the module it was made from"
            )
        for cls in type(module).__mro__:
            if cls.__name__ in _WRAPPERS and cls.__module__.startswith("torch."):
                raise UnsupportedModel(
                    f"'{name or type(model).__name__}' is a {cls.__name__}, which moves parameters and gradients by "
                    "itself; offload the module that it wraps: ranks of one process group average its gradients"
                )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UnsupportedModel(f"the parameter '{name}' has no shape yet; run one forward before the context")
        if parameter.is_inference():
            raise UnsupportedModel(
                f"the parameter '{name}' was made in inference mode and counts no changes; build the model outside "
                "torch.inference_mode()"
            )
        for path, tensor in inner_tensors(parameter).items():
            _refuse_unpageable(f"{name}.{path}" if path else name, tensor)


def _refuse_unpageable(name: str, parameter: torch.Tensor) -> None:
    if not can_dress(parameter):
        raise UnsupportedModel(
            f"the parameter '{name}' is a {type(parameter).__name__}, a class with __slots__, whose values the "
            "forward could not see; give the class ordinary attributes"
        )
    reason = why_not_fillable(parameter) if parameter.is_meta else _C.why_not_pageable(parameter)
    if reason:
        raise UnsupportedModel(f"the parameter '{name}' {reason}")


def _refuse_nested(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if engine.holds(parameter):
            raise AlreadyOffloaded(f"the parameter '{name}' is inside another offload context; leave that first")
        bring_to_host(parameter)  # raises for one that a context has lost
    for name, module in model.named_modules():
        if root.is_swapped(module):
            raise AlreadyOffloaded(
                f"'{name or type(model).__name__}' is inside another offload context; leave that first"
            )
        for parameter in module._parameters.values():
            if parameter is not None and _C.is_face(parameter):
                raise AlreadyOffloaded(f"'{name}' belongs to a model whose window is open; wrap it outside forward")
