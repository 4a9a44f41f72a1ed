"""The report of a run: one documented schema, as an object, a dict and a text."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hydra_ext import _C
from hydra_ext.activations.report import StashReport
from hydra_ext.blocks import Layout
from hydra_ext.runtime.replicas import Replicas
from hydra_ext.runtime.reporting.figures import DataReport, StepMeter

if TYPE_CHECKING:
    from hydra_ext.tables.report import TableReport


@dataclass(frozen=True)
class Report:
    """Figures of a run since it began. Bytes are bytes, times seconds.

    Attributes:
        budget_bytes: Most bytes that the device may hold.
        peak_bytes: Most bytes that the device has held; on a GPU, the most that torch's allocator has reserved. The
            next six figures are the bytes by class at the peak of the run's ledger.
        peak_weights_bytes: Slots.
        peak_gradients_bytes: Gradients on their way to the host.
        peak_activations_bytes: Tensors, such as activations and inputs, that existed when the block in use was reached.
        peak_workspace_bytes: Tensors that were allocated inside that block.
        peak_buffers_bytes: Buffers.
        peak_optimizer_bytes: Optimizer state at home on the device.
        parameter_bytes: Bytes of all blocks, in the types that they have on the device.
        blocks: Number of blocks.
        weights_moved_bytes: Weights copied from host to device.
        gradients_moved_bytes: Gradients copied from device to host.
        homes: Names of the blocks whose home is the device now, with their weights, gradients and optimizer state.
        homes_bytes: Device bytes of these blocks.
        homes_moved_bytes: Bytes moved in both directions to change homes.
        homes_reason: Reason why no other block has its home on the device.
        weights_written_back_bytes: Bytes copied from device to host for weights that the forward wrote in place.
        loads: Number of fills of a slot.
        prefetched: Number of these fills that ran ahead of their use.
        evictions: Number of slots taken from a block with valid bytes.
        spills: Number of these evictions that an allocation caused because the budget was full.
        faults: Number of operations that met an absent parameter which no hook had announced.
        order_changes: Number of passes whose blocks ran in another order than in the pass before.
        deferred_updates: Number of optimizer steps that ran behind the next forward.
        update_seconds: Working time of their threads.
        update_bytes: Host memory that they read and wrote.
        disk_bytes: Bytes whose home is the disk now, rounded up to multiples of the disk's unit: weights, gradients and
            optimizer state.
        disk_weight_bytes: Part of ``disk_bytes`` that is weights.
        disk_gradient_bytes: Part of ``disk_bytes`` that is gradients.
        disk_read_bytes, disk_written_bytes: Bytes read from the disk, and written to it.
        disk_working_bytes: Host memory for bytes on their way to or from the disk.
        waited_for_disk_seconds: Time that updates, fills, and moves to the host waited for the disk.
        waited_for_weights_seconds: Time that compute waited for blocks that a hook had announced.
        waited_for_faults_seconds: Time that compute waited for blocks at faults.
        waited_for_gradients_seconds: Time that the host waited for gradients to arrive.
        waited_at_window_end_seconds: Time that ends of forwards and backwards waited for transfers under way.
        waited_for_updates_seconds: Time that callers waited for an optimizer step under way.
        windows: Number of forwards and backwards inside the context.
        rounds: Number of rounds of ``run.step``: microbatches that pass the blocks together.
        refusals: Number of rounds whose microbatches could not run together; after the first refusal microbatches run
            one at a time.
        fallbacks: Number of microbatches that ``run.step`` ran one at a time.
        retries: Number of rounds that ``run.step`` undid and ran again. They ran out of device memory, or showed state
            that it has to watch or blocks that it must not recompute. ``fn`` was called again for their microbatches.
        ranks: Number of ranks that train copies of the model together.
        reduced_bytes: Bytes of gradients that this rank has averaged with the others, without those of tables.
        waited_for_ranks_seconds: Time that this rank waited for the others, without the waits of a GPU's streams.
        data: Waits for data.
        tables: Report on weights of which rows move; None if there are none.
        activations: Report on saved tensors; None without ``activations=``.
    """

    budget_bytes: int
    peak_bytes: int
    peak_weights_bytes: int
    peak_gradients_bytes: int
    peak_activations_bytes: int
    peak_workspace_bytes: int
    peak_buffers_bytes: int
    peak_optimizer_bytes: int
    parameter_bytes: int
    blocks: int
    weights_moved_bytes: int
    gradients_moved_bytes: int
    homes: tuple[str, ...]
    homes_bytes: int
    homes_moved_bytes: int
    homes_reason: str
    weights_written_back_bytes: int
    loads: int
    prefetched: int
    evictions: int
    spills: int
    faults: int
    order_changes: int
    deferred_updates: int
    update_seconds: float
    update_bytes: int
    disk_bytes: int
    disk_weight_bytes: int
    disk_gradient_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    disk_working_bytes: int
    waited_for_disk_seconds: float
    waited_for_weights_seconds: float
    waited_for_faults_seconds: float
    waited_for_gradients_seconds: float
    waited_at_window_end_seconds: float
    waited_for_updates_seconds: float
    windows: int
    rounds: int
    refusals: int
    fallbacks: int
    retries: int
    ranks: int
    reduced_bytes: int
    waited_for_ranks_seconds: float
    data: DataReport
    tables: TableReport | None = None
    activations: StashReport | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"device   peak {_mib(self.peak_bytes)} of {_mib(self.budget_bytes)}: weights "
            f"{_mib(self.peak_weights_bytes)}, gradients {_mib(self.peak_gradients_bytes)}, activations "
            f"{_mib(self.peak_activations_bytes)}, workspace {_mib(self.peak_workspace_bytes)}, buffers "
            f"{_mib(self.peak_buffers_bytes)}"
            + (f", optimizer state {_mib(self.peak_optimizer_bytes)}" if self.peak_optimizer_bytes else ""),
            f"moved    weights in {_mib(self.weights_moved_bytes)} ({self.loads} loads, {self.prefetched} ahead of "
            f"time), gradients out {_mib(self.gradients_moved_bytes)}",
            f"blocks   {self.blocks}, {_mib(self.parameter_bytes)} together; {self.evictions} evictions "
            f"({self.spills} by allocations), {self.faults} faults, {self.order_changes} changes of order in "
            f"{self.windows} windows",
            f"waited   {self.waited_for_weights_seconds:.3f} s for weights, {self.waited_for_faults_seconds:.3f} s "
            f"for faults, {self.waited_for_gradients_seconds:.3f} s for gradients, "
            f"{self.waited_at_window_end_seconds:.3f} s at the ends of windows",
        ]
        if self.rounds or self.fallbacks:
            lines.append(
                f"steps    {self.rounds} rounds, {self.refusals} refused, {self.retries} run again, "
                f"{self.fallbacks} microbatches one at a time"
            )
        if self.homes:
            lines.append(
                f"homes    {len(self.homes)} blocks on the device ({', '.join(self.homes) or 'none'}), "
                f"{_mib(self.homes_bytes)}; no others: {self.homes_reason or 'there are none'}"
            )
        if self.deferred_updates:
            lines.append(
                f"updates  {self.deferred_updates} behind the next forward, {self.update_seconds:.3f} s, "
                f"{self.waited_for_updates_seconds:.3f} s waited for"
            )
        if self.disk_bytes or self.disk_written_bytes:
            lines.append(
                f"disk     {_mib(self.disk_weight_bytes)} of weights, {_mib(self.disk_gradient_bytes)} of gradients, "
                f"{_mib(self.disk_bytes - self.disk_weight_bytes - self.disk_gradient_bytes)} of optimizer state; "
                f"{_mib(self.disk_read_bytes)} read, {_mib(self.disk_written_bytes)} written, "
                f"{self.waited_for_disk_seconds:.3f} s waited for"
            )
        if self.tables is not None:
            lines.append(f"tables   {self.tables}")
        if self.ranks > 1:
            lines.append(
                f"ranks    {self.ranks}, gradients averaged {_mib(self.reduced_bytes)}, "
                f"{self.waited_for_ranks_seconds:.3f} s waited for the others"
            )
        if self.data.waits:
            lines.append(f"data     {self.data}")
        if self.activations is not None:
            lines += ["saved tensors", textwrap.indent(str(self.activations), "  ")]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from hydra_ext.notebooks import Bar, html_of, seconds_said, size_said

        held = {
            "weights": self.peak_weights_bytes,
            "gradients": self.peak_gradients_bytes,
            "activations": self.peak_activations_bytes,
            "workspace": self.peak_workspace_bytes,
            "buffers": self.peak_buffers_bytes,
            "optimizer state": self.peak_optimizer_bytes,
        }
        waited = {
            "weights": self.waited_for_weights_seconds,
            "faults": self.waited_for_faults_seconds,
            "gradients": self.waited_for_gradients_seconds,
            "ends of windows": self.waited_at_window_end_seconds,
            "updates": self.waited_for_updates_seconds,
            "other ranks": self.waited_for_ranks_seconds,
            "data": self.data.seconds,
        }
        return html_of(
            str(self),
            Bar("device memory at its peak", held, size_said, whole=self.budget_bytes),
            Bar("waited for", waited, seconds_said),
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


class StepCounts(Protocol):
    """The counts of ``run.step``."""

    rounds: int
    refusals: int
    fallbacks: int
    retries: int


class HomeChoice(Protocol):
    """The blocks whose home is the device, and the reason why no others are."""

    reason: str

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def nbytes(self) -> int: ...


class ReportedRun(Protocol):
    budget: int
    layout: Layout
    core: _C.PagedModel
    replicas: Replicas | None
    meter: StepMeter


def make_report(run: ReportedRun, steps: StepCounts, homes: HomeChoice | None) -> Report:
    core, layout, replicas = run.core, run.layout, run.replicas
    pager, gradients, ledger = core.pager.statistics, core.gradients.statistics, core.memory.ledger
    disk = core.homes.disk.statistics
    return Report(
        budget_bytes=run.budget,
        peak_bytes=ledger.peak,
        peak_weights_bytes=ledger.peak_by(_C.MemoryClass.WEIGHTS),
        peak_gradients_bytes=ledger.peak_by(_C.MemoryClass.GRADIENTS),
        peak_activations_bytes=ledger.peak_by(_C.MemoryClass.ACTIVATIONS) - ledger.peak_workspace,
        peak_workspace_bytes=ledger.peak_workspace,
        peak_buffers_bytes=ledger.peak_by(_C.MemoryClass.BUFFERS),
        peak_optimizer_bytes=ledger.peak_by(_C.MemoryClass.OPTIMIZER),
        parameter_bytes=sum(face.nbytes for face in core.blocks.faces()),
        blocks=len(layout.blocks),
        weights_moved_bytes=pager.loaded_bytes,
        gradients_moved_bytes=gradients.bytes,
        homes=homes.names if homes is not None else (),
        homes_bytes=homes.nbytes if homes is not None else 0,
        homes_moved_bytes=core.homes.statistics.moved_bytes,
        homes_reason=homes.reason if homes is not None else "the optimizer is none of hydra_ext.optim",
        weights_written_back_bytes=pager.written_back_bytes,
        loads=pager.loads,
        prefetched=pager.prefetched,
        evictions=pager.evictions,
        spills=pager.spills,
        faults=pager.faults,
        order_changes=pager.order_changes,
        deferred_updates=core.update.deferred,
        update_seconds=core.update.seconds,
        update_bytes=core.update.bytes,
        disk_bytes=disk.weight_bytes + disk.gradient_bytes + disk.state_bytes,
        disk_weight_bytes=disk.weight_bytes,
        disk_gradient_bytes=disk.gradient_bytes,
        disk_read_bytes=disk.read_bytes,
        disk_written_bytes=disk.written_bytes,
        disk_working_bytes=disk.working_bytes,
        waited_for_disk_seconds=disk.wait_seconds,
        waited_for_weights_seconds=pager.hook_wait_seconds,
        waited_for_faults_seconds=pager.fault_wait_seconds,
        waited_for_gradients_seconds=gradients.wait_seconds,
        waited_at_window_end_seconds=pager.drain_wait_seconds,
        waited_for_updates_seconds=core.update.wait_seconds,
        windows=core.gate.opens,
        rounds=steps.rounds,
        refusals=steps.refusals,
        fallbacks=steps.fallbacks,
        retries=steps.retries,
        ranks=1 if replicas is None else replicas.size,
        reduced_bytes=0 if replicas is None else replicas.reduced_bytes,
        waited_for_ranks_seconds=0.0 if replicas is None else replicas.waited_seconds,
        data=run.meter.data.report(),
    )
