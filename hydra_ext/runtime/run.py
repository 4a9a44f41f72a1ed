"""The run: one model inside its offload context, with the objects that its windows, hooks and reports share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hydra_ext import _C
from hydra_ext.activations.saving import Saving
from hydra_ext.blocks import Layout
from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.optim.host_optimizer import HostOptimizer
from hydra_ext.runtime import compiled, engine, root, sites
from hydra_ext.runtime.arguments import Arguments
from hydra_ext.runtime.averaging import IN_BACKWARD, IN_STEP, Averaging
from hydra_ext.runtime.fit import Fit
from hydra_ext.runtime.placement.devices import Place
from hydra_ext.runtime.placement.faces import refuse_changed, show_faces
from hydra_ext.runtime.placement.homes import Homes
from hydra_ext.runtime.placement.spilling import Spilling
from hydra_ext.runtime.replicas import Replicas
from hydra_ext.runtime.reporting.figures import Callback, StepMeter, TokenCount
from hydra_ext.runtime.reporting.report import Report, make_report
from hydra_ext.runtime.rounds.choice import Choice
from hydra_ext.runtime.rounds.microbatch import Microbatch, Work, checked_seeds
from hydra_ext.runtime.rounds.step import Reduction, StepOptions, StepOutput, Stepper
from hydra_ext.runtime.saving.run_checkpoint import RunCheckpoint
from hydra_ext.runtime.updates import Updates
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.composites import forget_device
from hydra_ext.tables.discovery import open_tables, report_on, table_rows
from hydra_ext.tracing import not_traced

if TYPE_CHECKING:
    from hydra_ext.checkpoint.helper_state import Stateful
    from hydra_ext.checkpoint.loading import Loaded
    from hydra_ext.heads.calls import Heads
    from hydra_ext.plan.steps.forecast import Plan
    from hydra_ext.tables.lookup import TableRows


class Run:
    """The handle that ``with hydra_ext.offload(...) as run`` yields.

    Attributes:
        budget: Device bytes that the run may use.
        device: Device on which the forward's tensors live.
        layout: Blocks of the model, and the modules that use them.
        replicas: Ranks that train copies of the model together; None without other ranks.
        fit: What chooses the treatment of activations; None where the user has.
        tables: Weights of which rows move.
        version: Number of the weight version that modules show, if there are several (:class:`hydra_ext.blocks.Site`).
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    layout: Layout
    core: _C.PagedModel
    replicas: Replicas | None
    tables: Sequence[TableRows]
    device: torch.device
    meter: StepMeter

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        core: _C.PagedModel,
        *,
        budget: int,
        place: Place,
        replicas: Replicas | None = None,
        saving: Saving | None = None,
        heads: Heads | None = None,
        spilling: Spilling | None = None,
    ):
        self.budget, self.device = budget, place.device
        self._place = place
        self._saving = saving
        self._spilling = spilling
        self.tables = table_rows(layout.tables, place.device, {} if spilling is None else spilling.tables)
        self.model, self.optimizer = model, None
        self.layout = layout
        self.core, self.replicas = core, replicas
        self.backwards, self.version, self.spills = 0, 0, spilling is not None
        self._averages = True  # whether the end of a backward averages gradients over the ranks
        self._optimizer_handles: list[RemovableHandle] = []
        self._faces: dict[int, torch.Tensor] = {}
        self.updates: Updates | None = None
        largest = max((block.nbytes for block in layout.blocks), default=0)
        self.meter = StepMeter(core, place, budget=budget)
        self.fit = None if saving is None or heads is None else Fit(weakref.proxy(self), saving, heads, spilling)
        self._stepper = Stepper(self, layout.sites, self.fit or Choice(budget, largest))
        self._checkpoint = RunCheckpoint(self, saving, spilling)
        self.closed = False

    # ---- for users --------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Figures of the run so far: bytes by class, bytes moved, waits by cause, faults. See :class:`Report`."""
        homes = None if self.updates is None else self.updates.homes
        report = make_report(self, self._stepper, homes)
        peak = self._place.peak_bytes()
        saved = None if self._saving is None else self._saving.report()
        peak = report.peak_bytes if peak is None else peak
        return replace(report, peak_bytes=peak, tables=report_on(self.tables), activations=saved)

    def plan(self) -> Plan:
        """How a step treats activations now, foreseen beside measured. ``str()`` of the plan is a table.

        Takes about a second, for the curve over budgets and the advice.

        Raises:
            StateError: no step was planned yet; the budget leaves nothing to plan, just above the smallest one; or the
                user has chosen (``activations=``).
        """
        plan = None if self.fit is None else self.fit.answer(self.meter.peak_bytes)
        if plan is None:
            raise StateError(
                "run.plan(): nothing was planned. With activations='auto' a plan follows a measured microbatch of each "
                "size; just above the smallest budget there is none, and saved tensors leave for lack of room"
            )
        return plan

    def step(
        self,
        microbatches: Iterable[Microbatch],
        fn: Callable[[Microbatch], Any],
        *,
        max_norm: float | None = None,
        round_size: int | None = None,
        recompute: bool | None = None,
        reduction: Reduction = "mean",
        scaler: torch.amp.GradScaler | None = None,
        seeds: Sequence[int] | None = None,
        update: bool = True,
    ) -> StepOutput:
        """Runs one training step over several microbatches.

        A step calls ``(fn(mb) / len(microbatches)).backward()`` for each microbatch, averages gradients over ranks,
        clips them, and calls the optimizer's ``step()`` and ``zero_grad()``. Its bits are those of a loop that calls
        ``torch.manual_seed(seeds[i])`` before microbatch i and, under autocast, sets ``cache_enabled=False``. Unlike
        there, all microbatches pass a block before the next one is fetched.

        ``fn`` runs in threads that take turns; it must not wait for another microbatch. Its side effects outside
        blocks happen in another order than in a loop, and twice if a round runs out of device memory. Such a round is
        undone and run in another way. Microbatches run one at a time if together they would draw random numbers, or
        access state that modules hold, in another order than a loop; if they write to parameters; or if planned.

        Args:
            microbatches: Arguments for ``fn``, one for each call.
            fn: Function that returns the loss, or (loss, metrics), or a mapping with the loss under "loss".
            max_norm: Total norm that gradients are clipped to.
            round_size: Number of microbatches that run together; by default, as planned.
            recompute: Whether backward recomputes all blocks' activations, hooks included; by default, as planned.
            reduction: "mean", or "sum", which leaves out the division.
            scaler: Scaler of the losses; it may skip the step.
            seeds: Random seeds, one for each microbatch; drawn by default.
            update: Whether to clip, step and zero. If not, the gradients wait for ``optimizer.step()`` of the caller.

        Raises:
            StateError: the run has no optimizer.
            ValueError: there are no microbatches, or arguments are out of range or do not go together.
            UnsupportedModel: a recomputed block or the step differs from a loop, and the step cannot be undone.
            torch.OutOfMemoryError: no round that may be tried fits on the device.
            RankFailed, ReplicasDiffer: another rank has failed in this step, or makes other calls than this one.
        """
        self._checkpoint.step_begins()
        given: list[Microbatch] = []

        def whole() -> StepOutput:
            with self._averaging(IN_STEP) as averaging:
                given.extend(microbatches)
                of_each = checked_seeds(seeds, len(given), round_size, reduction)
                works = [Work(fn, each, len(given) if reduction == "mean" else 1, scaler) for each in given]
                options = StepOptions(max_norm, round_size, recompute, reduction, scaler, update)
                return self._stepper.step(works, of_each, options, averaging)

        return self.meter.measured(given, whole, is_whole=update)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defers averaging: backwards inside accumulate this rank's own gradients.

        The next backward outside averages the sums over the ranks, as after ``DistributedDataParallel.no_sync()``.
        Without other ranks this context has no effect.
        """
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    @contextmanager
    def _averaging(self, place: int) -> Iterator[Averaging | None]:
        """A context for gradients that the ranks average together; it yields None without other ranks.

        On an error it tells the other ranks that this one has failed.
        """
        if self.replicas is None:
            yield None
            return
        if self.closed:
            raise StateError("the offload context of this model has ended")
        if not self._averages:
            raise StateError("run.step() averages gradients over the ranks: call it outside run.no_sync()")
        averaging = Averaging(self.replicas, self.core, self.layout, self.tables, place)
        try:
            with self.no_sync():
                yield averaging
            self.replicas.passes += 1
        except BaseException:  # re-raised
            averaging.abandon()
            raise

    def on_step(self, callback: Callback, *, tokens: TokenCount | None = None) -> RemovableHandle:
        """Calls ``callback`` with the :class:`StepFigures` of each step from now on, on the thread that made the step.

        A step is a call of ``run.step``; in a plain loop it lasts from one ``optimizer.step()`` to the next. An
        exception of the callback propagates from that call; the step has been made by then.

        Args:
            callback: Function that takes the figures.
            tokens: Function that counts the tokens of one microbatch of ``run.step``, such as
                ``lambda microbatch: microbatch["input_ids"].numel()``. It is not called in plain loops.

        Returns:
            A handle whose ``remove()`` unregisters the callback.

        Raises:
            StateError: the run has no optimizer, and so no steps.
            InvalidArgument: an argument is not callable.
        """
        if self.optimizer is None:
            raise StateError("run.on_step needs the optimizer: offload(model, optimizer, budget=...)")
        for name, given in (("callback", callback), ("tokens", tokens)):
            if given is not None and not callable(given):
                raise InvalidArgument(f"run.on_step was given {name}={given!r}: give a function")
        return self.meter.on_step(callback, tokens)

    def live_line(self, *, tokens: TokenCount | None = None) -> AbstractContextManager[None]:
        """A context that shows one line with the figures of the latest step.

        If stdout is not a terminal, a line is logged every few seconds instead.

        Raises:
            MissingDependency: stdout is a terminal, and rich is not installed.
            StateError: the run has no optimizer, and so no steps.
        """
        from hydra_ext.runtime.reporting.live import live_line

        return live_line(lambda callback: self.on_step(callback, tokens=tokens))

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """A context that records the work of lanes, compute and the optimizer, and writes it to ``path`` on leaving.

        The file opens in https://ui.perfetto.dev. Leaving waits for an optimizer step under way. On a GPU the row of
        compute shows when the host enqueued a block; the lanes' rows use the device's clock.

        Raises:
            TraceFileError: the file cannot be created or written.
            StateError: a trace is being recorded already, or the offload context has ended.
        """
        if self.closed:
            raise StateError("run.trace: the offload context of this model has ended")
        from hydra_ext.runtime.reporting.trace import Trace

        return Trace(self, path)

    def refresh(self) -> None:
        """Tells the run that parameters were written in a way that no version counter shows (``.data``, numpy).

        Sampled fingerprints detect most of these writes without this call; a write of a few elements may escape them.
        """
        self.core.changes.refresh()

    def sync(self) -> None:
        """Waits for an optimizer step under way, and brings the bytes of all tensors back to the host.

        See :mod:`hydra_ext.optim`.
        """
        from_disk = not self._checkpoint.reads_the_disk
        self.core.moves.bring_all_home(from_disk=from_disk)
        for table in () if self._checkpoint.overwrites else self.tables:
            table.settle(to_host=from_disk)

    @property
    def steps(self) -> int:
        """Number of optimizer steps made, including those before the checkpoint that was loaded."""
        return self.meter.updates

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        extra: Any = None,
        schedule: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        keep: int = 2,
    ) -> Path:
        """Saves everything that the next step depends on to ``folder/step-00001234``. Durable on return.

        A checkpoint has the parameters, buffers, the optimizer's state, random states and ``steps``. After a crash of
        the process or of the machine at any moment, the previous checkpoint or this one is complete. A complete
        checkpoint is never overwritten: if ``step-00001234`` exists, the new one is ``step-00001234-2``. The newest is
        the one saved last. With several ranks, all of them call this method, and rank 0 writes.

        Gradients are not saved: after a load there are none, as after ``zero_grad()``.

        Args:
            folder: Folder of the checkpoints; created if missing.
            extra: Additional data of the caller: None, numbers, strings, and lists and dicts of these. Rank 0's is
                saved.
            schedule, scaler: Learning rate scheduler and ``GradScaler``, whose states are saved as well.
            loader: What gives this rank's data; any object with ``state_dict()`` and ``load_state_dict()``.
            keep: Number of checkpoints to retain in the folder, including this one; older ones are removed afterwards.

        Returns:
            The checkpoint's own folder. Hugging Face's ``from_pretrained`` reads it.

        Raises:
            StateError: the model's forward or backward is under way, or gradients wait for a step.
            InvalidArgument: ``extra`` or ``keep`` has an invalid value.
            UnsupportedState: a checkpoint cannot represent part of the state.
            SaveFailed: the checkpoint could not be written.
            RankFailed: another rank has failed.
        """
        helpers = {"schedule": schedule, "scaler": scaler, "loader": loader}
        return self._checkpoint.save(Path(folder), helpers, extra=extra, keep=keep)

    def load(
        self,
        folder: str | os.PathLike[str],
        *,
        strict: bool = True,
        schedule: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
    ) -> Loaded | None:
        """Resumes from the newest checkpoint in a folder: the next step has the bits that it would have had.

        Every byte is verified before anything is changed. Gradients are dropped. With several ranks, all of them call
        this method and must see the same folder.

        Args:
            folder: Folder of checkpoints, to which another process may be saving, or a single checkpoint.
            strict: Whether a damaged newest checkpoint raises; if False, it warns, and loads the newest intact one.
            schedule, scaler, loader: Objects that :meth:`save` was given, whose states are restored.

        Returns:
            Description of the loaded checkpoint; None if there is none, and training starts from the beginning.

        Raises:
            CheckpointError: the checkpoint is damaged, or was removed before it could be read.
            CheckpointMismatch: the checkpoint is of another model or optimizer, or lacks the loader's state.
            StateError: the model's forward or backward is under way.
            UnsupportedState: no checkpoint can hold the state of this model or optimizer.
            RankFailed: another rank has failed.
        """
        helpers = {"schedule": schedule, "scaler": scaler, "loader": loader}
        return self._checkpoint.load(Path(folder), helpers, strict=strict)

    def save_on_sigterm(
        self,
        folder: str | os.PathLike[str],
        *,
        extra: Callable[[], Any] | None = None,
        schedule: Stateful | None = None,
        scaler: Stateful | None = None,
        loader: Stateful | None = None,
        keep: int = 2,
    ) -> None:
        """From now on SIGTERM saves a checkpoint and ends the process, between two steps.

        The step under way is finished first. The run saves when the next forward with gradients or ``run.step`` begins,
        or when the context ends. So the checkpoint includes the effects of the code that follows ``optimizer.step()``
        in the loop, evaluation included. Random states are saved as ``optimizer.step()`` left them: numbers drawn
        after it, such as those for the next batch, are drawn again after a load. So is the loader's state.

        After the save the previous handler is called; if there was none, ``SystemExit(143)`` is raised. A second
        SIGTERM goes to that handler at once. A signal to one rank counts for all ranks.

        Args:
            folder, schedule, scaler, loader, keep: Arguments of :meth:`save`.
            extra: Called when the last step has ended; its result is saved. That step raises its errors.

        Raises:
            StateError: this is not the main thread, it was called before, or the context has ended.
            UnsupportedState: random states cannot be saved.
        """
        # Absolute, as the working directory may change until the save.
        path, helpers = Path(folder).absolute(), {"schedule": schedule, "scaler": scaler, "loader": loader}
        self._checkpoint.end_on_sigterm(path, helpers, extra=extra, keep=keep)

    def end_steps(self) -> None:
        """Declares that no step follows: a SIGTERM that waits for the next step is handled now."""
        self._checkpoint.end_steps()

    # ---- life -------------------------------------------------------------------------------------------------------

    def open(self, optimizer: torch.optim.Optimizer | None, arena: _C.HostArena, *, casts: str = "") -> None:
        """Moves buffers, swaps the root's class, hooks blocks and optimizer, and joins the autograd engine.

        Args:
            casts: Why types change on the way between host and device; empty if they do not.
        """
        self._place.open(self.model, arena, self.layout)
        self.core.memory.charge_buffers(self._place.uncounted_bytes(self.model, self.layout))
        self._faces = show_faces(self.core, self.layout, self.device)
        open_tables(self.tables, self.core.gate, optimizer)
        for name, module in self.model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # scripted modules with parameters were refused
                self.core.gate.watch(module._parameters, f"the parameters of '{name}'")
                self.core.gate.watch(module._modules, f"the modules of '{name}'")
            if any(buffer is paged for buffer in module._buffers.values() for paged in self.layout.buffers.values()):
                self.core.gate.watch(module._buffers, "")  # forwards may add buffers, and take some away
        if self._saving is not None:
            self._saving.hook()  # inside the sites' calls, where no fiber parks
        if self.fit is not None:
            self.fit.heads.install()
        sites.install(self, self.layout)
        root.swap(self.model, self)
        compiled.join(self)
        self.optimizer = optimizer
        if optimizer is not None:
            self._optimizer_handles = [
                optimizer.register_step_pre_hook(lambda *_: self._before_optimizer_step()),
                optimizer.register_step_post_hook(lambda *_: self._after_optimizer_step()),
            ]
        if isinstance(optimizer, HostOptimizer):
            bound, refusal = self._place.gradient_bound(self.budget), self._why_no_homes(casts)
            homes = Homes(self.core, self.layout, optimizer, budget=self.budget, in_flight=bound, refusal=refusal)
            self.updates = Updates(self, optimizer, homes, self._spilling)
        engine.join(self)

    def _why_no_homes(self, casts: str) -> str:
        if self._spilling is not None:
            return "with host_budget= their weights, gradients and state may be on the disk"
        on_host = self.replicas is not None and not self.replicas.takes_gathered
        return casts or ("gradients are averaged over the ranks on the host" if on_host else "")

    def close(self) -> None:
        """Undoes :meth:`open` and closes the core; an error in one part does not stop the others. Idempotent."""
        if self.closed:
            return
        self.closed = True
        engine.leave(self)
        self.meter.data.end()
        with ExitStack() as stack:  # runs the callbacks in reverse order
            stack.callback(self._checkpoint.close)
            if self.replicas is not None:
                stack.callback(self.replicas.leave)
            stack.callback(self._place.close)
            stack.callback(forget_device, self.model)
            stack.callback(self.core.close)
            stack.callback(self._wait_for_others)
            stack.callback(_C.suspend_charging)
            if root.is_swapped(self.model):
                stack.callback(root.restore, self.model)
            if self._saving is not None:
                if not self.core.gate.open:
                    stack.callback(self._saving.drop_stale)
                stack.callback(self._saving.close)
                stack.callback(self._saving.unhook)
            if self.fit is not None:
                stack.callback(self.fit.heads.remove)
            for table in self.tables:
                stack.callback(table.close)
            stack.callback(sites.remove, self.layout)
            stack.callback(compiled.leave, self)
            for handle in self._optimizer_handles:
                stack.callback(handle.remove)
            if self.updates is not None:
                stack.callback(self.updates.close)

    def _wait_for_others(self) -> None:
        while not self.core.gate.wait_for_others(milliseconds=100):
            pass  # short waits, so that Python can deliver an interrupt between them

    def _before_optimizer_step(self) -> None:
        _C.suspend_charging()
        if self.core.gate.open:
            raise StateError(
                "optimizer.step() was called while the model's forward or backward is under way, here or in another "
                "thread; let that end first"
            )
        self.meter.update_begins()

    def _after_optimizer_step(self) -> None:
        self.core.changes.note_optimizer_step()
        self._checkpoint.gradients_used = True
        before = self.meter.updates
        self.meter.update_ended(deferred=self.updates is not None)
        if self.meter.updates > before:
            self._checkpoint.step_ended()
            if self._place.tenant is not None:
                self._place.tenant.step_ended(self.core)

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """A context in which the model is a plain one, so that it can be copied."""
        self.sync()
        root.restore(self.model)
        self._place.suspend()
        try:
            yield
        finally:
            self._place.resume()
            root.swap(self.model, self)

    # ---- forward and backward ---------------------------------------------------------------------------------------

    @not_traced
    def forward(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes the root's call inside a window."""
        looped = None if self.meter.inside or not torch.is_grad_enabled() else self.fit
        refuse_changed(self.layout.composites)
        if torch.is_grad_enabled():
            self._checkpoint.step_begins()
            if looped is not None:
                looped.forward_begins((args, kwargs))
        if self._saving is not None and not self.core.gate.open:
            self._saving.drop_stale()
        window, token = self.core.window, _C.WindowToken()
        arguments = Arguments(self._place.move_input)
        failed = True
        try:
            # Inside the try: an interrupt that arrives as soon as the call returns finds the window entered.
            window.enter(token, self.forward_kind())
            try:
                args, kwargs = arguments.place((args, kwargs))
                with nullcontext() if self._saving is None else self._saving.inside():
                    output = call(*args, **kwargs)
                if torch.is_grad_enabled():
                    window.returns(token, list(tensors_in(output)))
                failed = False
                return output
            except RuntimeError as error:
                if (absent := compiled.why_absent(error)) is None:
                    raise
                raise absent from None
            finally:
                arguments.give_back()
        finally:
            window.exit(token, failed=failed)
            self._place.inputs.wait()
            if failed and looped is not None:
                looped.pass_fails()

    @not_traced
    def forward_kind(self) -> _C.PassKind:
        return self._place.forward_kind()

    def backward_ended(self, *, accumulated: bool, failed: bool = False) -> None:
        """Averages gradients over the ranks, unless the backward ``accumulated`` none or is nested in another one.

        One that has ``failed`` has raised, and no more is done here.
        """
        if failed:
            if self.fit is not None and not self.meter.inside:
                self.fit.pass_fails()
            return
        is_outermost = not self.core.gate.in_backward
        if is_outermost:
            self._place.backward_ended()
        if self.fit is not None and not self.meter.inside and is_outermost:
            self.fit.backward_ended()
        if accumulated:
            self._checkpoint.gradients_used = False
        if self.replicas is not None and self._averages and accumulated and is_outermost:
            with self._averaging(IN_BACKWARD) as averaging:
                if averaging is not None:
                    averaging.complete()

    def window(self, kind: _C.PassKind) -> _C.Windows:
        """A context in which modules show device parameters."""
        return _C.Windows([self.core], kind)

    def activation_bytes(self) -> int:
        """Bytes on the device that are neither weights nor buffers nor gradients."""
        return self._place.activation_bytes(self.core)

    def face_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._faces.get(id(tensor))

    def to_host(self, gradient: torch.Tensor) -> torch.Tensor:
        """A copy on the host of a gradient that the caller requested by its host parameter."""
        _C.suspend_charging()
        return gradient.clone() if gradient.device.type == "cpu" else gradient.to("cpu")
