"""
The native core of hydra_ext: memory, transfer, paging, optimizers, schedules, and their use from torch.
"""

from __future__ import annotations
import collections.abc
import torch
import typing
from . import codec
from . import testing

__all__: list[str] = [
    "Action",
    "ActionKind",
    "ActivationOption",
    "ActivationPlan",
    "ActivationSegment",
    "Activity",
    "ActivityKind",
    "ActivityLog",
    "ActivityRecord",
    "ActivityRow",
    "AdamStep",
    "Arrivals",
    "BlockHomes",
    "BlockUpdate",
    "ChainPartition",
    "Charged",
    "CheckpointClass",
    "CheckpointPlan",
    "CheckpointStepKind",
    "CopyStatistics",
    "DISK_ALIGNMENT",
    "DISK_LEAST_BYTES",
    "DISK_WORKING_SETS",
    "DeviceBackend",
    "DeviceTurns",
    "DiskStatistics",
    "FaceWrites",
    "FaultInjector",
    "Faulting",
    "FileOperations",
    "GradientPath",
    "GradientStatistics",
    "HomeMoves",
    "HomeStatistics",
    "HostArena",
    "HostChanges",
    "InstructionSet",
    "LaneStatistics",
    "LayerBounds",
    "LayerFigures",
    "LeavingNorm",
    "Ledger",
    "MemoryClass",
    "MemoryMoment",
    "MemorySample",
    "MemoryTimeline",
    "ModelBlocks",
    "ModelDisk",
    "ModelMemory",
    "ModelWindow",
    "OverwrittenLog",
    "PAGE_ALIGNMENT",
    "PagedModel",
    "Pager",
    "PagerStatistics",
    "PassKind",
    "PendingUpdate",
    "PlannedStage",
    "ROW_NOTES_BYTES",
    "RecomputeScope",
    "RoundStay",
    "RowFile",
    "STASH_LEAST_BYTES",
    "STASH_WORKING_BYTES",
    "SavedDigest",
    "SavedTensor",
    "Schedule",
    "SchedulePeaks",
    "ScheduleStream",
    "SgdStep",
    "SharedBackend",
    "SharedBlock",
    "SharedRegion",
    "SimulatedDevice",
    "SiteVisit",
    "StagedBackward",
    "StallLog",
    "Stash",
    "StashPart",
    "StashPass",
    "StashScope",
    "StashStatistics",
    "Staying",
    "StepRecord",
    "StepWork",
    "StepWorkKind",
    "TensorPlan",
    "ThreadContext",
    "ThreadPool",
    "TimedAction",
    "Timeline",
    "Treatment",
    "Uncharged",
    "Undisturbed",
    "UnitPolicy",
    "UnitSchedule",
    "UnitScheduler",
    "Verification",
    "WindowGate",
    "WindowToken",
    "Windows",
    "bare",
    "catch_up_rows",
    "clip_factor",
    "codec",
    "give_memory",
    "human_bytes",
    "is_alone",
    "is_face",
    "judge_activations",
    "least_activation_budget",
    "make_bare",
    "make_schedule",
    "norm_of_sums",
    "on_simulated_device",
    "other_leaves",
    "parse_schedule",
    "partition_chain",
    "partition_pipeline",
    "plan_activations",
    "plan_checkpoints",
    "plan_jobs",
    "random_states",
    "reached_leaves",
    "reached_models",
    "record_step",
    "reduced_by_place",
    "rounding_seed",
    "scale_gradient",
    "seat",
    "simulate_activations",
    "simulate_units",
    "split_unequally",
    "step_rows",
    "sums_of_squares",
    "supported_instruction_sets",
    "suspend_charging",
    "testing",
    "why_not_pageable",
    "write_rows",
]

class PassKind:
    """
    Members:

      FORWARD

      BACKWARD

      INFERENCE
    """

    BACKWARD: typing.ClassVar[PassKind]
    FORWARD: typing.ClassVar[PassKind]
    INFERENCE: typing.ClassVar[PassKind]
    __members__: typing.ClassVar[dict[str, PassKind]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ActivityRow:
    """
    Members:

      COMPUTE

      TO_DEVICE

      TO_HOST

      OPTIMIZER
    """

    COMPUTE: typing.ClassVar[ActivityRow]
    OPTIMIZER: typing.ClassVar[ActivityRow]
    TO_DEVICE: typing.ClassVar[ActivityRow]
    TO_HOST: typing.ClassVar[ActivityRow]
    __members__: typing.ClassVar[dict[str, ActivityRow]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ActivityKind:
    """
    Members:

      PASS

      BLOCK

      COPY

      HOST_WORK

      UPDATE

      WAIT_FOR_WEIGHTS

      WAIT_FOR_FAULT

      WAIT_FOR_ROOM

      WAIT_FOR_GRADIENTS

      WAIT_FOR_TRANSFERS

      WAIT_FOR_UPDATE
    """

    BLOCK: typing.ClassVar[ActivityKind]
    COPY: typing.ClassVar[ActivityKind]
    HOST_WORK: typing.ClassVar[ActivityKind]
    PASS: typing.ClassVar[ActivityKind]
    UPDATE: typing.ClassVar[ActivityKind]
    WAIT_FOR_FAULT: typing.ClassVar[ActivityKind]
    WAIT_FOR_GRADIENTS: typing.ClassVar[ActivityKind]
    WAIT_FOR_ROOM: typing.ClassVar[ActivityKind]
    WAIT_FOR_TRANSFERS: typing.ClassVar[ActivityKind]
    WAIT_FOR_UPDATE: typing.ClassVar[ActivityKind]
    WAIT_FOR_WEIGHTS: typing.ClassVar[ActivityKind]
    __members__: typing.ClassVar[dict[str, ActivityKind]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Activity:
    """
    Times are those of time.monotonic_ns().
    """
    @property
    def begin(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def continued(self) -> bool: ...
    @property
    def end(self) -> int: ...
    @property
    def kind(self) -> ActivityKind: ...
    @property
    def part(self) -> str: ...
    @property
    def pass_kind(self) -> PassKind: ...
    @property
    def pass_number(self) -> int: ...
    @property
    def row(self) -> ActivityRow: ...
    @property
    def thread(self) -> int: ...

class MemoryMoment:
    """
    Device bytes in use, in the order of MemoryClass.
    """
    @property
    def bytes(self) -> typing.Annotated[list[int], "FixedSize(5)"]: ...
    @property
    def time(self) -> int: ...

class ActivityRecord:
    @property
    def activities(self) -> list[Activity]: ...
    @property
    def begin(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def memory(self) -> list[MemoryMoment]: ...

class ActivityLog:
    """
    Records what lanes, compute threads and optimizer threads did.
    """
    def start(self, room: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def stop(self) -> ActivityRecord: ...
    @property
    def recording(self) -> bool: ...

class DeviceTurns:
    """
    Turns of several runs on one device.
    """
    def __init__(self, note: collections.abc.Callable, restore: collections.abc.Callable) -> None:
        """
        `note` keeps a tenant's state of the process, and `restore` sets it. Both may be called twice.
        """
    def admit(self) -> int: ...
    def computed(self, tenant: typing.SupportsInt | typing.SupportsIndex) -> float:
        """
        Seconds of the tenant's turns.
        """
    def interrupt(self, tenant: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Raises KeyboardInterrupt inside the tenant's stay.
        """
    def stay(self, tenant: typing.SupportsInt | typing.SupportsIndex, function: collections.abc.Callable) -> typing.Any:
        """
        Waits for the turn, and calls the function in it.
        """
    @property
    def switches(self) -> int: ...

class Undisturbed:
    """
    A scope in which the calling thread's tenant keeps the turn.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class MemoryClass:
    """
    Members:

      WEIGHTS

      GRADIENTS

      ACTIVATIONS

      BUFFERS

      OPTIMIZER
    """

    ACTIVATIONS: typing.ClassVar[MemoryClass]
    BUFFERS: typing.ClassVar[MemoryClass]
    GRADIENTS: typing.ClassVar[MemoryClass]
    OPTIMIZER: typing.ClassVar[MemoryClass]
    WEIGHTS: typing.ClassVar[MemoryClass]
    __members__: typing.ClassVar[dict[str, MemoryClass]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Ledger:
    """
    Bytes in use by class, against one limit.
    """
    def discharge(self, cls: MemoryClass, bytes: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def in_use_by(self, cls: MemoryClass) -> int: ...
    def peak_by(self, cls: MemoryClass) -> int:
        """
        Bytes of one class at the moment of the highest total.
        """
    def reset_peak(self) -> None: ...
    def set_limit(self, limit: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def take_peak(self) -> int:
        """
        The highest total since the last call.
        """
    def try_charge(self, cls: MemoryClass, bytes: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    @property
    def in_use(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def peak_workspace(self) -> int:
        """
        Activations at the highest total that were allocated since the pass reached the block in use.
        """

class HostArena:
    def __init__(self) -> None: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def pageable_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...

class LaneStatistics:
    @property
    def busy_seconds(self) -> float: ...
    @property
    def bytes(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def jobs(self) -> int: ...

class FileOperations:
    pass

class FaultInjector:
    pass

class StallLog:
    """
    Seconds in which a device's compute waited for lanes.
    """
    def seconds(
        self, first: typing.SupportsInt | typing.SupportsIndex, end: typing.SupportsInt | typing.SupportsIndex
    ) -> float:
        """
        Of the stalls from one number up to and without another. Waits until the device has ended them.
        """
    def start(self) -> None:
        """
        Turns the log on. It is empty then.
        """
    def stop(self) -> None: ...
    @property
    def count(self) -> int: ...

class DeviceBackend:
    @property
    def activity(self) -> ActivityLog: ...
    @property
    def name(self) -> str: ...
    @property
    def stalls(self) -> StallLog:
        """
        None if compute runs on the host's threads.
        """
    @property
    def to_device_statistics(self) -> LaneStatistics: ...
    @property
    def to_host_statistics(self) -> LaneStatistics: ...

class SimulatedDevice(DeviceBackend):
    def __init__(
        self,
        *,
        to_device_bytes_per_second: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        to_host_bytes_per_second: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        latency_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        host_memory_bytes_per_second: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        poison: bool = True,
        asynchronous: bool = False,
        kernel_delay_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.001,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        faults: FaultInjector = None,
    ) -> None: ...
    def first_hazard(self) -> str: ...
    def hazards(self) -> int: ...

class SharedBackend(DeviceBackend):
    """
    One of several runs' views of a device: its figures are those of this run.
    """
    def __init__(self, device: DeviceBackend) -> None: ...

class PagerStatistics:
    @property
    def drain_wait_seconds(self) -> float: ...
    @property
    def evictions(self) -> int: ...
    @property
    def fault_wait_seconds(self) -> float: ...
    @property
    def faults(self) -> int: ...
    @property
    def hook_wait_seconds(self) -> float: ...
    @property
    def loaded_bytes(self) -> int: ...
    @property
    def loads(self) -> int: ...
    @property
    def order_changes(self) -> int: ...
    @property
    def prefetched(self) -> int: ...
    @property
    def spills(self) -> int: ...
    @property
    def write_backs(self) -> int: ...
    @property
    def written_back_bytes(self) -> int: ...

class InstructionSet:
    """
    Members:

      PORTABLE

      AVX2

      AVX512
    """

    AVX2: typing.ClassVar[InstructionSet]
    AVX512: typing.ClassVar[InstructionSet]
    PORTABLE: typing.ClassVar[InstructionSet]
    __members__: typing.ClassVar[dict[str, InstructionSet]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ThreadPool:
    """
    Threads that share the work of one call; the caller is one of them.
    """
    def __init__(self, threads: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def threads(self) -> int: ...

class AdamStep:
    """
    The scalars of one step of Adam or AdamW.
    """
    def __init__(
        self,
        *,
        learning_rate: typing.SupportsFloat | typing.SupportsIndex,
        beta1: typing.SupportsFloat | typing.SupportsIndex,
        beta2: typing.SupportsFloat | typing.SupportsIndex,
        epsilon: typing.SupportsFloat | typing.SupportsIndex,
        weight_decay: typing.SupportsFloat | typing.SupportsIndex,
        decoupled: bool,
        step: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...

class SgdStep:
    """
    The scalars of one step of SGD.
    """
    def __init__(
        self,
        *,
        learning_rate: typing.SupportsFloat | typing.SupportsIndex,
        momentum: typing.SupportsFloat | typing.SupportsIndex,
        dampening: typing.SupportsFloat | typing.SupportsIndex,
        weight_decay: typing.SupportsFloat | typing.SupportsIndex,
        nesterov: bool,
        first: bool,
    ) -> None: ...

class TensorPlan:
    """
    The updates of one optimizer step.
    """
    def __init__(self, instructions: InstructionSet | None = None) -> None: ...
    def add(
        self,
        step: AdamStep | SgdStep,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        *,
        master: torch.Tensor | None = None,
        first_moment: torch.Tensor | None = None,
        second_moment: torch.Tensor | None = None,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        new_weights: torch.Tensor | None = None,
    ) -> None: ...
    def run(self, pool: ThreadPool, scale: typing.SupportsFloat | typing.SupportsIndex = 1.0) -> None:
        """
        Runs the updates on the host.
        """

class RowFile:
    """
    Rows of a tensor, all zeros at first, at home in a file without a name.
    """
    def __init__(
        self,
        folder: str,
        rows: typing.SupportsInt | typing.SupportsIndex,
        row_bytes: typing.SupportsInt | typing.SupportsIndex,
        files: FileOperations = None,
    ) -> None: ...
    def blank(self, rows: torch.Tensor) -> torch.Tensor:
        """
        Which of the rows have had no write, and so are zeros still.
        """
    def read(self, rows: torch.Tensor, to: torch.Tensor) -> None:
        """
        Reads the rows with these numbers.
        """
    def read_ahead(self, rows: torch.Tensor) -> None:
        """
        Has the system read the rows soon.
        """
    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """
        Writes the rows with these numbers, each named once.
        """
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...

class SharedBlock:
    """
    A block of a shared region, as a buffer.
    """
    @property
    def begin(self) -> int:
        """
        Where it starts in the region.
        """

class SharedRegion:
    """
    Memory that this process shares with its workers.
    """
    def __init__(self, most: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def allocate(self, bytes: typing.SupportsInt | typing.SupportsIndex) -> SharedBlock | None:
        """
        A block; None if there is no room below the limit.
        """
    def trim(self) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def allocated(self) -> int: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def limit(self) -> int: ...
    @limit.setter
    def limit(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def most(self) -> int: ...
    @property
    def used(self) -> int: ...

class ActionKind:
    """
    Members:

      FORWARD

      BACKWARD

      REDUCE

      BEGIN_UPDATE

      UPDATE

      SEND_ACTIVATION

      RECEIVE_ACTIVATION

      SEND_GRADIENT

      RECEIVE_GRADIENT
    """

    BACKWARD: typing.ClassVar[ActionKind]
    BEGIN_UPDATE: typing.ClassVar[ActionKind]
    FORWARD: typing.ClassVar[ActionKind]
    RECEIVE_ACTIVATION: typing.ClassVar[ActionKind]
    RECEIVE_GRADIENT: typing.ClassVar[ActionKind]
    REDUCE: typing.ClassVar[ActionKind]
    SEND_ACTIVATION: typing.ClassVar[ActionKind]
    SEND_GRADIENT: typing.ClassVar[ActionKind]
    UPDATE: typing.ClassVar[ActionKind]
    __members__: typing.ClassVar[dict[str, ActionKind]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Action:
    """
    One entry of a schedule; immutable.
    """
    def __eq__(self, arg0: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(
        self,
        kind: ActionKind,
        *,
        stage: typing.SupportsInt | typing.SupportsIndex,
        batch: typing.SupportsInt | typing.SupportsIndex,
        microbatch: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def batch(self) -> int:
        """
        Counted from the start of training; in a body, from the step's first batch.
        """
    @property
    def kind(self) -> ActionKind: ...
    @property
    def microbatch(self) -> int:
        """
        0 for REDUCE, BEGIN_UPDATE and UPDATE, which concern a whole batch.
        """
    @property
    def stage(self) -> int: ...
    @property
    def token(self) -> str:
        """
        Kind, stage and microbatch as a schedule's text has them.
        """

class ScheduleStream:
    """
    One rank's actions, step after step, from the first batch on.
    """
    def drain(self) -> list[Action]: ...
    def evaluation(
        self,
        batch: typing.SupportsInt | typing.SupportsIndex,
        *,
        microbatches: typing.SupportsInt | typing.SupportsIndex,
    ) -> list[Action]: ...
    def next_batch(self, microbatches: typing.SupportsInt | typing.SupportsIndex) -> list[Action]: ...
    @property
    def batches(self) -> int: ...

class Schedule:
    """
    The actions of every rank in one step; immutable.
    """
    def __eq__(self, arg0: typing.Any) -> bool: ...
    def __hash__(self) -> int: ...
    def body(self, rank: typing.SupportsInt | typing.SupportsIndex) -> list[Action]: ...
    def buffers(self, stage: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def rank_of(self, stage: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def simulate(
        self,
        batches: typing.SupportsInt | typing.SupportsIndex,
        *,
        forward: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
        backward: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
        update: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
        reduce: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
        transfer: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
        latency: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
        overlap: bool,
        global_norm: bool,
    ) -> Timeline: ...
    def stages_of(self, rank: typing.SupportsInt | typing.SupportsIndex) -> list[int]: ...
    def stream(
        self,
        rank: typing.SupportsInt | typing.SupportsIndex,
        *,
        first_batch: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> ScheduleStream: ...
    def unroll(self, batches: typing.SupportsInt | typing.SupportsIndex) -> list[list[Action]]: ...
    def verify(
        self,
        *,
        in_flight: typing.SupportsInt | typing.SupportsIndex | None = None,
        versions: typing.SupportsInt | typing.SupportsIndex | None = None,
        gradients: typing.SupportsInt | typing.SupportsIndex | None = None,
    ) -> Verification: ...
    def verify_actions(
        self,
        ranks: collections.abc.Sequence[collections.abc.Sequence[Action]],
        *,
        microbatches: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    ) -> Verification: ...
    def version_of(
        self, stage: typing.SupportsInt | typing.SupportsIndex, batch: typing.SupportsInt | typing.SupportsIndex
    ) -> int: ...
    def with_communication(self) -> Schedule: ...
    @property
    def communicates(self) -> bool: ...
    @property
    def flushes(self) -> bool: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def recipe(self) -> str | None: ...
    @property
    def rule(self) -> str: ...
    @property
    def stages(self) -> int: ...
    @property
    def text(self) -> str: ...

class SchedulePeaks:
    """
    The largest counts at any one time.
    """
    def __repr__(self) -> str: ...
    @property
    def gradients(self) -> int:
        """
        Batches between their first backward and their update.
        """
    @property
    def in_flight(self) -> int:
        """
        Microbatches between forward and backward, whose stashes are alive.
        """
    @property
    def versions(self) -> int:
        """
        Versions of the weights that are newest, in use, or being written.
        """

class Verification:
    """
    The needs of a schedule that can run.
    """
    @property
    def batches(self) -> int:
        """
        The number of batches that the verifier ran through.
        """
    @property
    def ranks(self) -> list[SchedulePeaks]:
        """
        The peaks of each rank, over all its stages.
        """
    @property
    def rendezvous(self) -> bool:
        """
        Whether the schedule also runs if each send blocks until its receive is posted.
        """
    @property
    def stages(self) -> list[SchedulePeaks]:
        """
        The peaks of each stage.
        """

class TimedAction:
    """
    An action with its times, in seconds from the start of the first action.
    """
    @property
    def action(self) -> Action: ...
    @property
    def end(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def start(self) -> float: ...

class Timeline:
    """
    The times of a schedule's actions.
    """
    @property
    def actions(self) -> list[TimedAction]:
        """
        All actions, rank by rank, in the order of each rank.
        """
    @property
    def bubbles(self) -> list[float]: ...
    @property
    def busy(self) -> list[float]: ...
    @property
    def makespan(self) -> float: ...
    @property
    def period(self) -> float: ...

class PlannedStage:
    @property
    def begin(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def communication_seconds(self) -> float: ...
    @property
    def compute_seconds(self) -> float: ...
    @property
    def end(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class ChainPartition:
    @property
    def crossing_bytes(self) -> int: ...
    @property
    def period_seconds(self) -> float: ...
    @property
    def stages(self) -> list[PlannedStage]: ...

class ActivationOption:
    """
    Members:

      KEEP

      OFFLOAD

      COMPRESS

      RECOMPUTE

      RECOMPUTE_OFFLOADED
    """

    COMPRESS: typing.ClassVar[ActivationOption]
    KEEP: typing.ClassVar[ActivationOption]
    OFFLOAD: typing.ClassVar[ActivationOption]
    RECOMPUTE: typing.ClassVar[ActivationOption]
    RECOMPUTE_OFFLOADED: typing.ClassVar[ActivationOption]
    __members__: typing.ClassVar[dict[str, ActivationOption]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class RecomputeScope:
    """
    Members:

      NEVER

      ALONE

      IN_ROUNDS
    """

    ALONE: typing.ClassVar[RecomputeScope]
    IN_ROUNDS: typing.ClassVar[RecomputeScope]
    NEVER: typing.ClassVar[RecomputeScope]
    __members__: typing.ClassVar[dict[str, RecomputeScope]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class ActivationSegment:
    """
    One microbatch of modules that run in one piece.
    """
    def __init__(
        self,
        *,
        forward_seconds: typing.SupportsFloat | typing.SupportsIndex,
        backward_seconds: typing.SupportsFloat | typing.SupportsIndex,
        saved_fresh: typing.SupportsInt | typing.SupportsIndex,
        saved_all: typing.SupportsInt | typing.SupportsIndex,
        inputs_fresh: typing.SupportsInt | typing.SupportsIndex,
        inputs_all: typing.SupportsInt | typing.SupportsIndex,
        parked_bytes: typing.SupportsInt | typing.SupportsIndex,
        forward_bytes: typing.SupportsInt | typing.SupportsIndex,
        backward_bytes: typing.SupportsInt | typing.SupportsIndex,
        live_gradient_bytes: typing.SupportsInt | typing.SupportsIndex,
        weight_bytes: typing.SupportsInt | typing.SupportsIndex,
        slot_bytes: typing.SupportsInt | typing.SupportsIndex,
        gradient_bytes: typing.SupportsInt | typing.SupportsIndex,
        recompute: RecomputeScope = ...,
        stream_bytes: typing.SupportsInt | typing.SupportsIndex | None = None,
        coding_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        options: collections.abc.Sequence[ActivationOption] | None = None,
        second: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
        | None = None,
    ) -> None: ...

class ActivationPlan:
    @property
    def compute_seconds(self) -> float: ...
    @property
    def cut(self) -> int: ...
    @property
    def options(self) -> list[ActivationOption]: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def round_size(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def stash_bytes(self) -> int: ...
    @property
    def to_device_seconds(self) -> float: ...
    @property
    def to_host_seconds(self) -> float: ...

class StepWorkKind:
    """
    Members:

      FORWARD

      RECOMPUTE

      BACKWARD

      UPDATE

      BRING_WEIGHTS

      BRING_STASH

      SEND_STASH

      SEND_GRADIENTS
    """

    BACKWARD: typing.ClassVar[StepWorkKind]
    BRING_STASH: typing.ClassVar[StepWorkKind]
    BRING_WEIGHTS: typing.ClassVar[StepWorkKind]
    FORWARD: typing.ClassVar[StepWorkKind]
    RECOMPUTE: typing.ClassVar[StepWorkKind]
    SEND_GRADIENTS: typing.ClassVar[StepWorkKind]
    SEND_STASH: typing.ClassVar[StepWorkKind]
    UPDATE: typing.ClassVar[StepWorkKind]
    __members__: typing.ClassVar[dict[str, StepWorkKind]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class StepWork:
    """
    What compute or a lane does, in seconds since the step began.
    """
    @property
    def begin(self) -> float: ...
    @property
    def bytes(self) -> int:
        """
        That are moved.
        """
    @property
    def end(self) -> float: ...
    @property
    def kind(self) -> StepWorkKind: ...
    @property
    def segment(self) -> int | None:
        """
        Its number; none for an update.
        """

class StepRecord:
    @property
    def stays(self) -> list[float]:
        """
        When each round begins in each segment: forward, then backward from the last segment on.
        """
    @property
    def work(self) -> list[StepWork]:
        """
        What each lane does is in the order of time.
        """

class CheckpointClass:
    """
    Members:

      PERSISTENT

      FLAT
    """

    FLAT: typing.ClassVar[CheckpointClass]
    PERSISTENT: typing.ClassVar[CheckpointClass]
    __members__: typing.ClassVar[dict[str, CheckpointClass]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class CheckpointStepKind:
    """
    Members:

      FORWARD

      FORWARD_SAVING

      BACKWARD

      DROP
    """

    BACKWARD: typing.ClassVar[CheckpointStepKind]
    DROP: typing.ClassVar[CheckpointStepKind]
    FORWARD: typing.ClassVar[CheckpointStepKind]
    FORWARD_SAVING: typing.ClassVar[CheckpointStepKind]
    __members__: typing.ClassVar[dict[str, CheckpointStepKind]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class CheckpointPlan:
    @property
    def bound(self) -> float: ...
    @property
    def steps(self) -> list[tuple[CheckpointStepKind, int]]: ...
    @property
    def time(self) -> float: ...

class UnitPolicy:
    """
    Members:

      LONGEST

      LONGEST_RESIDENT

      ROUND_ROBIN

      RANDOM

      SHORTEST
    """

    LONGEST: typing.ClassVar[UnitPolicy]
    LONGEST_RESIDENT: typing.ClassVar[UnitPolicy]
    RANDOM: typing.ClassVar[UnitPolicy]
    ROUND_ROBIN: typing.ClassVar[UnitPolicy]
    SHORTEST: typing.ClassVar[UnitPolicy]
    __members__: typing.ClassVar[dict[str, UnitPolicy]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class UnitSchedule:
    @property
    def bound(self) -> float: ...
    @property
    def busy_seconds(self) -> list[float]: ...
    @property
    def load_seconds(self) -> float: ...
    @property
    def makespan(self) -> float: ...
    @property
    def runs(self) -> list[list[tuple[int, int, int, float]]]:
        """
        Of each device: (job, first unit, last unit, start).
        """
    @property
    def stalled_seconds(self) -> float: ...
    @property
    def units(self) -> int: ...

class UnitScheduler:
    def __init__(
        self,
        devices: typing.SupportsInt | typing.SupportsIndex,
        jobs: collections.abc.Sequence[
            tuple[
                str,
                collections.abc.Sequence[
                    tuple[
                        typing.SupportsFloat | typing.SupportsIndex,
                        typing.SupportsInt | typing.SupportsIndex,
                        typing.SupportsFloat | typing.SupportsIndex,
                    ]
                ],
                typing.SupportsInt | typing.SupportsIndex,
            ]
        ],
        *,
        link: typing.SupportsFloat | typing.SupportsIndex | None,
        policy: UnitPolicy,
        seed: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def ahead(
        self, device: typing.SupportsInt | typing.SupportsIndex, now: typing.SupportsFloat | typing.SupportsIndex
    ) -> int | None: ...
    def finished(self, device: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def next(
        self, device: typing.SupportsInt | typing.SupportsIndex, now: typing.SupportsFloat | typing.SupportsIndex
    ) -> tuple[int, int, float, float] | None:
        """
        Returns (job, unit, begin, end), or None if no unit is eligible.
        """
    def remaining(self, job: typing.SupportsInt | typing.SupportsIndex) -> float: ...
    @property
    def load_seconds(self) -> float: ...
    @property
    def units_left(self) -> int: ...

class GradientStatistics:
    @property
    def bytes(self) -> int: ...
    @property
    def gradients(self) -> int: ...
    @property
    def leaving(self) -> int: ...
    @property
    def synchronous(self) -> int: ...
    @property
    def wait_seconds(self) -> float: ...

class LeavingNorm:
    """
    Sums the squares of gradients as they reach the host.
    """
    def begin(self, pool: ThreadPool) -> None:
        """
        Starts summing: gradients that arrive from now on count as the step's last.
        """
    def end(self) -> None:
        """
        Stops summing, after a failed step.
        """
    def forget(self) -> None:
        """
        Discards all sums, after a change to gradients that the engine did not see.
        """
    def take(self, hosts: collections.abc.Sequence[torch.Tensor]) -> list[float | None]:
        """
        Stops summing. Returns each host parameter's sum of squared gradients, or None where it is unknown.
        """
    @property
    def taken(self) -> int: ...

class MemorySample:
    """
    The bytes on the device when a pass reached a block.
    """
    def bytes(self, cls: MemoryClass) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def kind(self) -> PassKind: ...

class WindowToken:
    def __init__(self) -> None: ...

class BlockUpdate:
    """
    The part of an optimizer step that updates one block, or several together.
    """
    def __init__(
        self,
        blocks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        plan: TensorPlan,
        tensors: collections.abc.Sequence[torch.Tensor],
    ) -> None: ...

class SiteVisit:
    def __init__(self) -> None: ...

class StashStatistics:
    @property
    def backward_wait_seconds(self) -> float: ...
    @property
    def encoded(self) -> int: ...
    @property
    def encoded_bytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def intervals(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def peak_held_bytes(self) -> int: ...
    @property
    def prefetched(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def stayed(self) -> int: ...
    @property
    def stream_bytes(self) -> int: ...
    @property
    def tensors(self) -> int: ...
    @property
    def to_device_bytes(self) -> int: ...
    @property
    def to_host_bytes(self) -> int: ...
    @property
    def wait_seconds(self) -> float: ...

class StashPass:
    """
    From when nothing was saved until there was nothing again.
    """
    def __init__(self) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def saved_bytes(self) -> int: ...

class CopyStatistics:
    """
    Copies off the device, in host memory and on the disk.
    """
    @property
    def disk_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def peak_host_bytes(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def reading_seconds(self) -> float: ...
    @property
    def writing_seconds(self) -> float: ...
    @property
    def written_bytes(self) -> int: ...

class LayerFigures:
    @property
    def bound(self) -> float: ...
    @property
    def forwards(self) -> int: ...
    @property
    def relative_error(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def weight(self) -> torch.Tensor: ...

class LayerBounds:
    """
    How far off each layer's stored input may be.
    """
    def __init__(
        self,
        *,
        fixed: typing.SupportsFloat | typing.SupportsIndex | None,
        fraction: typing.SupportsFloat | typing.SupportsIndex,
        every: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def layers(self) -> list[LayerFigures]: ...
    def set_momentum(
        self, weight: torch.Tensor, over_gradient: typing.SupportsFloat | typing.SupportsIndex
    ) -> None: ...

class Staying:
    """
    How long tensors that may leave stay on the device.

    Members:

      NEVER

      WHILE_ROOM

      LONGEST
    """

    LONGEST: typing.ClassVar[Staying]
    NEVER: typing.ClassVar[Staying]
    WHILE_ROOM: typing.ClassVar[Staying]
    __members__: typing.ClassVar[dict[str, Staying]]
    def __eq__(self, other: typing.Any) -> bool: ...
    def __getstate__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __index__(self) -> int: ...
    def __init__(self, value: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __int__(self) -> int: ...
    def __ne__(self, other: typing.Any) -> bool: ...
    def __repr__(self) -> str: ...
    def __setstate__(self, state: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __str__(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Treatment:
    """
    What is to become of what a thread saves.
    """
    @staticmethod
    def compress(bounds: LayerBounds, *, staying: Staying = ...) -> Treatment: ...
    @staticmethod
    def keep() -> Treatment: ...
    @staticmethod
    def move(*, staying: Staying = ...) -> Treatment: ...
    @staticmethod
    def move_convolution_inputs() -> Treatment: ...

class StashPart:
    """
    What became of what a part of a model saved, in bytes.
    """
    @property
    def encoded(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def moved(self) -> int: ...
    @property
    def stayed(self) -> int: ...
    @property
    def streams(self) -> int: ...

class Stash:
    """
    Saved tensors, off the device until backward.
    """
    def __init__(
        self,
        *,
        backend: DeviceBackend,
        arena: HostArena,
        device: torch.device,
        budget: typing.SupportsInt | typing.SupportsIndex | None,
    ) -> None: ...
    def close(self) -> None: ...
    def copies(self) -> CopyStatistics: ...
    def exact(self) -> dict[str, tuple[int, int]]:
        """
        Intervals and bytes that were not encoded, by the operator that needs them exactly.
        """
    def last_pass(self) -> StashPass | None:
        """
        The last one that has ended.
        """
    def limit_host(
        self, bytes: typing.SupportsInt | typing.SupportsIndex, folder: str, files: FileOperations = None
    ) -> None:
        """
        Host bytes of copies, and the folder for the others. Called once, before the first is made.
        """
    def pack(self, tensor: torch.Tensor) -> SavedTensor: ...
    def parts(self) -> dict[int, StashPart]: ...
    def protect(self, tensors: collections.abc.Sequence[torch.Tensor]) -> None: ...
    def set_budget(self, budget: typing.SupportsInt | typing.SupportsIndex | None) -> None:
        """
        None: as much as transfers need. Intervals above the budget leave.
        """
    def statistics(self) -> StashStatistics:
        """
        Once the transfers under way have ended.
        """
    def unpack(self, saved: SavedTensor) -> torch.Tensor: ...

class SavedTensor:
    """
    What a stash hands to autograd.
    """

class StashScope:
    """
    What the calling thread saves in a stash from begin() to end() is treated so, and counted for that part.
    """
    def __init__(
        self, stash: Stash, *, treatment: Treatment = None, part: typing.SupportsInt | typing.SupportsIndex = -1
    ) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def set_treatment(self, treatment: Treatment = None) -> None:
        """
        Of calls that begin from now on. None continues that of the scope around it.
        """

class PagedModel:
    """
    One model under one budget, by its parts.
    """
    def __init__(
        self,
        *,
        backend: DeviceBackend,
        arena: HostArena,
        budget: typing.SupportsInt | typing.SupportsIndex,
        face_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype | None = None,
        gradient_bound: typing.SupportsInt | typing.SupportsIndex = 0,
        poison_hosts: bool = False,
        fault_path: bool = True,
        device: torch.device = ...,
        stash: Stash = None,
    ) -> None: ...
    def add_block(self, name: str, parameters: collections.abc.Sequence[tuple[str, torch.Tensor]]) -> int: ...
    def close(self) -> None: ...
    @property
    def arrivals(self) -> Arrivals: ...
    @property
    def blocks(self) -> ModelBlocks: ...
    @property
    def changes(self) -> HostChanges: ...
    @property
    def gate(self) -> WindowGate: ...
    @property
    def gradients(self) -> GradientPath: ...
    @property
    def homes(self) -> BlockHomes: ...
    @property
    def memory(self) -> ModelMemory: ...
    @property
    def moves(self) -> HomeMoves: ...
    @property
    def pager(self) -> Pager: ...
    @property
    def rounds(self) -> RoundStay: ...
    @property
    def update(self) -> PendingUpdate: ...
    @property
    def window(self) -> ModelWindow: ...

class ModelMemory:
    """
    The budget on the device, and the host arena.
    """
    def charge_buffers(self, bytes: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def backend(self) -> DeviceBackend: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def slack(self) -> int:
        """
        The part of the budget that plans leave free for the device's allocator, in bytes.
        """
    @property
    def slot_bytes(self) -> int:
        """
        Bytes that the device has given to slots and has not got back.
        """

class ModelBlocks:
    """
    The blocks, and both faces of their parameters.
    """
    def faces(self) -> list[torch.Tensor]: ...
    def overlapping(self, others: collections.abc.Sequence[torch.Tensor]) -> list[list[int]]:
        """
        Groups of blocks whose parameters overlap in memory; -1 stands for parameters outside the model.
        """
    def set_trained(self, trained: bytes) -> None: ...
    def trained(self) -> bytes:
        """
        Whether each face requires a gradient: b'1' or b'0'.
        """
    @property
    def foreign_bytes(self) -> int: ...

class Pager:
    """
    Which block is in which slot.
    """
    def forget_activations(self) -> None:
        """
        What activations took so far is no measure of what they will take from now on.
        """
    def recorded(self, kind: PassKind) -> list[tuple[int, int]]:
        """
        What the last pass of a kind ran: blocks, and the bytes activations took while each was in use.
        """
    @property
    def pins(self) -> int: ...
    @property
    def resident_blocks(self) -> list[int]:
        """
        Blocks whose bytes are on the device, or on their way there.
        """
    @property
    def resident_bytes(self) -> int: ...
    @property
    def statistics(self) -> PagerStatistics: ...

class OverwrittenLog:
    """
    What a step overwrites in the parameters of one model while this exists.
    """
    def take(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """
        Name, host parameter and earlier numbers of each one that was written to since the last call.
        """
    @property
    def is_elsewhere(self) -> bool:
        """
        Whether other threads have entered the model, and the step's have not.
        """

class HostChanges:
    """
    What is written to parameters, on either side.
    """
    def log_overwritten(self, is_own: bool) -> OverwrittenLog:
        """
        A log of what is overwritten in parameters from now on. is_own: whether the step trains this model.
        """
    def moved(self) -> str:
        """
        Names of parameters that were written to since the window opened, or last was open.
        """
    def note_optimizer_step(self) -> None: ...
    def refresh(self) -> None: ...

class PendingUpdate:
    """
    An optimizer step that runs while the model goes on.
    """
    def defer(
        self,
        updates: collections.abc.Sequence[BlockUpdate],
        pool: ThreadPool,
        scale: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    ) -> None: ...
    def finish(self) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def deferred(self) -> int:
        """
        Steps so far.
        """
    @property
    def seconds(self) -> float: ...
    @property
    def wait_seconds(self) -> float: ...

class GradientPath:
    """
    The way of gradients to where they are at home.
    """
    def begin_early(self) -> None: ...
    def drop_early(self) -> None: ...
    def finish(self, block: typing.SupportsInt | typing.SupportsIndex) -> list[bool]:
        """
        Nothing is to be added to the block's gradients in this window. Returns which of them have changed.
        """
    def return_gathered(
        self,
        block: typing.SupportsInt | typing.SupportsIndex,
        index: typing.SupportsInt | typing.SupportsIndex,
        gradient: torch.Tensor,
    ) -> None: ...
    def run_hooks(self) -> None:
        """
        Runs the post-accumulate hooks of parameters that one microbatch's backward has brought gradients to.
        """
    def send_to_disk(
        self, block: typing.SupportsInt | typing.SupportsIndex, backlog: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def take_gathered(self, block: typing.SupportsInt | typing.SupportsIndex) -> list[torch.Tensor | None]:
        """
        What was gathered on the device and is all there is of a block's gradients, or copies of what is at home there, by parameter.
        """
    @property
    def norm(self) -> LeavingNorm: ...
    @property
    def statistics(self) -> GradientStatistics: ...

class Uncharged:
    """
    What the thread allocates inside is charged to no device.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class Charged:
    """
    What the thread allocates inside is charged to one simulated device.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self, limit: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def ledger(self) -> Ledger: ...

class HomeStatistics:
    @property
    def moved_bytes(self) -> int: ...
    @property
    def returned(self) -> int: ...
    @property
    def settled(self) -> int: ...

class DiskStatistics:
    @property
    def gradient_bytes(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def spared_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def wait_seconds(self) -> float: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def working_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...

class ModelDisk:
    """
    The disk as a home, if there is one.
    """
    def make(
        self, block: typing.SupportsInt | typing.SupportsIndex, like: torch.Tensor, dtype: torch.dtype, *, copies: bool
    ) -> torch.Tensor:
        """
        A tensor of the optimizer's state that is at home there.
        """
    def open(
        self,
        folder: str,
        sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        files: FileOperations = None,
    ) -> None: ...
    @property
    def fills(self) -> int: ...
    @property
    def statistics(self) -> DiskStatistics: ...

class BlockHomes:
    """
    Where blocks are at home, besides the host.
    """
    @property
    def disk(self) -> ModelDisk: ...
    @property
    def on_device(self) -> list[int]:
        """
        Blocks whose home is the device.
        """
    @property
    def statistics(self) -> HomeStatistics:
        """
        Of the device.
        """

class HomeMoves:
    """
    Moves of blocks between their homes.
    """
    def bring_all_home(self, *, from_disk: bool) -> None: ...
    def bring_home(self, block: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def read_from_disk(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """
        A copy of what is on the disk; None if it is not.
        """
    def settle_on_device(
        self, block: typing.SupportsInt | typing.SupportsIndex, state: collections.abc.Sequence[torch.Tensor]
    ) -> bool:
        """
        The device becomes the block's home, if it can.
        """
    def settle_state_on_disk(
        self, block: typing.SupportsInt | typing.SupportsIndex, state: collections.abc.Sequence[torch.Tensor]
    ) -> None:
        """
        The disk becomes the home of the block's optimizer state.
        """
    def settle_weights_on_disk(self, block: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        The disk becomes the home of the block's weights, if it can.
        """
    def update(
        self, update: BlockUpdate, pool: ThreadPool, scale: typing.SupportsFloat | typing.SupportsIndex = 1.0
    ) -> None:
        """
        Runs a block's part of an optimizer step now, where its home is.
        """

class WindowGate:
    """
    Which threads are inside, and what modules show meanwhile.
    """
    def show(self, host: typing.Any, face: typing.Any) -> None:
        """
        The face stands in the host's place while a window is open.
        """
    def wait_for_others(self, milliseconds: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        False when other threads are still inside after that time.
        """
    def watch(self, dictionary: dict, name: str) -> None: ...
    @property
    def foreign_entries(self) -> int: ...
    @property
    def in_backward(self) -> bool:
        """
        Whether some thread is inside a backward.
        """
    @property
    def open(self) -> bool: ...
    @property
    def opens(self) -> int: ...

class ModelWindow:
    """
    Windows, and visits of sites.
    """
    def begin_visit(
        self,
        visit: SiteVisit,
        blocks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        kind: PassKind,
    ) -> None: ...
    def end_visit(self, visit: SiteVisit, *, failed: bool) -> None: ...
    def enter(self, token: WindowToken, kind: PassKind) -> None: ...
    def exit(self, token: WindowToken, *, failed: bool) -> None: ...
    @typing.overload
    def returns(self, token: WindowToken, outputs: collections.abc.Sequence[torch.Tensor]) -> None: ...
    @typing.overload
    def returns(self, visit: SiteVisit, outputs: collections.abc.Sequence[torch.Tensor]) -> None: ...

class Windows:
    """
    The windows of several models, entered and left together.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self, models: collections.abc.Sequence[PagedModel], kind: PassKind) -> None: ...

class MemoryTimeline:
    """
    What the device held when passes reached blocks.
    """
    def advise(self, remedies: str) -> None:
        """
        What helps beside a larger budget, for messages. Called before the first pass.
        """
    def record(self, samples: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def samples(self) -> list[MemorySample]: ...

class Arrivals:
    """
    Passes arrive at blocks, and leave them.
    """
    def set_version(self, version: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def dropped_copies(self) -> int: ...
    @property
    def timeline(self) -> MemoryTimeline: ...

class RoundStay:
    """
    Blocks that a round stays in.
    """
    def drop_copies(self) -> None: ...
    def stay_in(
        self, blocks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], kind: PassKind
    ) -> None: ...

class Faulting:
    """
    Inside, operators bring device parameters that are away, also below __torch_dispatch__.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self) -> None: ...

class FaceWrites:
    """
    What this thread writes to device parameters inside, to be undone afterwards.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self) -> None: ...
    def undo(self) -> None:
        """
        Restores the parameters' numbers and versions.
        """

class SavedDigest:
    """
    What a call saved for backward, or gave, in a few bytes.
    """
    def __init__(self, parameters: collections.abc.Sequence[torch.Tensor]) -> None: ...
    def add(self, tensor: torch.Tensor) -> bool:
        """
        False, and nothing is added, if the tensor cannot be compared.
        """
    def equals(self, other: SavedDigest) -> bool:
        """
        Whether the same was added in the same order.
        """
    def fresh(self) -> SavedDigest:
        """
        With the same parameters, and nothing added.
        """
    @property
    def count(self) -> int: ...

class ThreadContext:
    """
    What torch keeps of the calling thread, for another thread.
    """
    def __init__(self) -> None: ...
    def enter(self) -> None:
        """
        For good; autocast keeps no casts from here on.
        """

class StagedBackward:
    """
    Runs the graphs of several microbatches piece by piece.
    """
    def __init__(self) -> None: ...
    def add(
        self, loss: torch.Tensor, marks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None:
        """
        The next microbatch; marks: the sequence numbers that its pieces begin at.
        """
    def last_turns(self, leaves: collections.abc.Sequence[torch.Tensor]) -> list[int]:
        """
        By leaf, the last turn in which something is accumulated into it; -1 where nothing is.
        """
    def leaves(self) -> list[torch.Tensor]:
        """
        What the graphs accumulate into, once all are added.
        """
    def plan(
        self,
        turns: collections.abc.Sequence[
            tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        ],
    ) -> None:
        """
        turns: (microbatch, piece), all of them.
        """
    def run(self, turn: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def run_last_piece(self, gradients: GradientPath) -> None:
        """
        Of the microbatch that was added last.
        """
    @property
    def held(self) -> int: ...
    @property
    def nested(self) -> bool: ...
    @property
    def refusal(self) -> str: ...

def bare(tensor: torch.Tensor) -> None:
    """
    Frees the tensor's bytes. It stays what it is otherwise.
    """

def catch_up_rows(
    tensors: collections.abc.Sequence[torch.Tensor],
    rows: torch.Tensor,
    made: torch.Tensor,
    first: typing.SupportsInt | typing.SupportsIndex,
    missed: collections.abc.Sequence[tuple[AdamStep | SgdStep, bool]],
    pool: ThreadPool,
) -> None:
    """
    Makes the steps that rows of a table have missed, with a gradient of zero.
    """

def clip_factor(
    norm: typing.SupportsFloat | typing.SupportsIndex, max_norm: typing.SupportsFloat | typing.SupportsIndex
) -> float: ...
def give_memory(tensor: torch.Tensor) -> None:
    """
    Gives a tensor without bytes memory again.
    """

def human_bytes(bytes: typing.SupportsInt | typing.SupportsIndex) -> str:
    """
    Formats bytes for messages, with a binary unit.
    """

def is_alone(tensor: torch.Tensor) -> bool:
    """
    Whether the tensor's bytes have no other owner.
    """

def is_face(tensor: torch.Tensor) -> bool:
    """
    Whether the tensor is a device parameter or a view of one.
    """

def judge_activations(
    cuts: collections.abc.Sequence[collections.abc.Sequence[ActivationSegment]],
    plan: ActivationPlan,
    *,
    microbatches: typing.SupportsInt | typing.SupportsIndex,
    budget: typing.SupportsInt | typing.SupportsIndex,
    to_device: typing.SupportsFloat | typing.SupportsIndex,
    to_host: typing.SupportsFloat | typing.SupportsIndex,
    update_seconds: typing.SupportsFloat | typing.SupportsIndex,
    host_bytes: typing.SupportsInt | typing.SupportsIndex,
    disk: typing.SupportsFloat | typing.SupportsIndex,
) -> ActivationPlan:
    """
    The plan with the seconds that its treatment takes in this problem.
    """

def least_activation_budget(
    cuts: collections.abc.Sequence[collections.abc.Sequence[ActivationSegment]],
    *,
    round_sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
) -> int:
    """
    The least budget that any treatment fits.
    """

def make_bare(like: torch.Tensor) -> torch.Tensor:
    """
    A tensor of zero bytes with the sizes of another one.
    """

def make_schedule(
    kind: str,
    *,
    stages: typing.SupportsInt | typing.SupportsIndex,
    ranks: typing.SupportsInt | typing.SupportsIndex,
    microbatches: typing.SupportsInt | typing.SupportsIndex,
    vertical_sync: bool,
    ahead: typing.SupportsInt | typing.SupportsIndex,
) -> Schedule: ...
def norm_of_sums(sums: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]) -> float: ...
def on_simulated_device(tensor: torch.Tensor) -> bool:
    """
    Whether the tensor's bytes are charged to a simulated device.
    """

def other_leaves(roots: collections.abc.Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """
    The leaves that the graph behind the roots reaches, without device parameters.
    """

def parse_schedule(text: str) -> Schedule: ...
def partition_chain(
    events: collections.abc.Sequence[
        tuple[
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ],
    boundaries: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, bool]],
    shared: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        ]
    ],
    *,
    bandwidth: typing.SupportsFloat | typing.SupportsIndex,
    latency: typing.SupportsFloat | typing.SupportsIndex,
    overlapped: bool,
    versions: typing.SupportsInt | typing.SupportsIndex,
    limits: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex | None],
) -> ChainPartition:
    """
    Events are (forward seconds, backward seconds, parameter bytes, activation bytes), boundaries (crossing bytes, possible), shared parameters (bytes, events).
    """

def partition_pipeline(
    layers: collections.abc.Sequence[
        tuple[
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
        ]
    ],
    edges: collections.abc.Sequence[
        tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
    ],
    *,
    levels: collections.abc.Sequence[
        tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
    ],
    memory_cap: typing.SupportsFloat | typing.SupportsIndex | None,
    straight: bool,
    fewer: bool,
    transfers: bool,
) -> typing.Any:
    """
    Layers are (compute ms, activation bytes, parameter bytes), levels (machines, bytes per second), the inner one first. Returns (objective ms, bound ms, [(replicas, layers, inner stages)]), or None if nothing fits.
    """

def plan_activations(
    cuts: collections.abc.Sequence[collections.abc.Sequence[ActivationSegment]],
    *,
    microbatches: typing.SupportsInt | typing.SupportsIndex,
    budget: typing.SupportsInt | typing.SupportsIndex,
    to_device: typing.SupportsFloat | typing.SupportsIndex = ...,
    to_host: typing.SupportsFloat | typing.SupportsIndex = ...,
    host_bytes: typing.SupportsInt | typing.SupportsIndex = 9223372036854775807,
    update_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    round_sizes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
    effort: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    disk: typing.SupportsFloat | typing.SupportsIndex = 0.0,
) -> ActivationPlan:
    """
    The fastest treatment found that fits. Lanes are in bytes a second. No round_sizes: all that are worth trying.
    """

def plan_checkpoints(
    input_bytes: typing.SupportsInt | typing.SupportsIndex,
    stages: collections.abc.Sequence[
        tuple[
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ],
    *,
    memory: typing.SupportsInt | typing.SupportsIndex,
    type: CheckpointClass,
) -> CheckpointPlan | None:
    """
    Stages are (forward time, backward time, output bytes, saved bytes, forward transient, backward transient). Steps count from 0.
    """

def plan_jobs(
    nodes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
    jobs: collections.abc.Sequence[
        tuple[
            str,
            collections.abc.Sequence[
                tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
            ],
        ]
    ],
    *,
    seed: typing.SupportsInt | typing.SupportsIndex,
    effort: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[list[tuple[int, int, float]], float, float]:
    """
    Nodes are GPUs, jobs (name, [(GPUs, seconds)]). Returns placements (option, node, start), makespan and bound.
    """

def random_states(generators: collections.abc.Sequence[torch.Generator]) -> list[torch.Tensor]:
    """
    Of each generator; charged to no device.
    """

def reached_leaves(
    roots: collections.abc.Sequence[torch.Tensor], leaves: collections.abc.Sequence[torch.Tensor]
) -> list[bool]:
    """
    Which of the leaves the graph behind the roots reaches.
    """

def reached_models(
    roots: collections.abc.Sequence[torch.Tensor], models: collections.abc.Sequence[PagedModel]
) -> list[PagedModel]:
    """
    Those of the models that the graph behind the roots belongs to.
    """

def record_step(
    segments: collections.abc.Sequence[ActivationSegment],
    *,
    options: collections.abc.Sequence[ActivationOption],
    round_size: typing.SupportsInt | typing.SupportsIndex,
    stash_bytes: typing.SupportsInt | typing.SupportsIndex,
    microbatches: typing.SupportsInt | typing.SupportsIndex,
    budget: typing.SupportsInt | typing.SupportsIndex,
    to_device: typing.SupportsFloat | typing.SupportsIndex = ...,
    to_host: typing.SupportsFloat | typing.SupportsIndex = ...,
    update_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    host_bytes: typing.SupportsInt | typing.SupportsIndex = 9223372036854775807,
    disk: typing.SupportsFloat | typing.SupportsIndex = 0.0,
) -> StepRecord:
    """
    The record of the step that simulate_activations simulates.
    """

def reduced_by_place(tensor: torch.Tensor) -> torch.Tensor:
    """
    One number that depends on every number of the tensor and its place, as it is found on GPUs.
    """

def rounding_seed(
    step: typing.SupportsInt | typing.SupportsIndex, ordinal: typing.SupportsInt | typing.SupportsIndex
) -> int:
    """
    The seed of a parameter's stochastic rounding in one step.
    """

def scale_gradient(gradient: torch.Tensor, factor: typing.SupportsFloat | typing.SupportsIndex) -> None:
    """
    In place, wherever the gradient's home is.
    """

def seat() -> tuple[int, int] | None:
    """
    The shared device and the tenant of the calling thread; None in other threads.
    """

def simulate_activations(
    segments: collections.abc.Sequence[ActivationSegment],
    *,
    options: collections.abc.Sequence[ActivationOption],
    round_size: typing.SupportsInt | typing.SupportsIndex,
    stash_bytes: typing.SupportsInt | typing.SupportsIndex,
    microbatches: typing.SupportsInt | typing.SupportsIndex,
    budget: typing.SupportsInt | typing.SupportsIndex,
    to_device: typing.SupportsFloat | typing.SupportsIndex = ...,
    to_host: typing.SupportsFloat | typing.SupportsIndex = ...,
    update_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    host_bytes: typing.SupportsInt | typing.SupportsIndex = 9223372036854775807,
    disk: typing.SupportsFloat | typing.SupportsIndex = 0.0,
) -> tuple[float, float, float, float, int]:
    """
    Seconds of the step, of compute, of the lanes to device and host, and the peak's bytes.
    """

def simulate_units(
    devices: typing.SupportsInt | typing.SupportsIndex,
    jobs: collections.abc.Sequence[
        tuple[
            str,
            collections.abc.Sequence[
                tuple[
                    typing.SupportsFloat | typing.SupportsIndex,
                    typing.SupportsInt | typing.SupportsIndex,
                    typing.SupportsFloat | typing.SupportsIndex,
                ]
            ],
            typing.SupportsInt | typing.SupportsIndex,
        ]
    ],
    *,
    link: typing.SupportsFloat | typing.SupportsIndex | None,
    policy: UnitPolicy,
    seed: typing.SupportsInt | typing.SupportsIndex,
) -> UnitSchedule:
    """
    Jobs are (name, [(seconds, shard, bytes)], repeats), the link bytes per second or None.
    """

def split_unequally(
    layers: collections.abc.Sequence[
        tuple[
            typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(3)"],
            typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(3)"],
            typing.SupportsFloat | typing.SupportsIndex,
        ]
    ],
    edges: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
        ]
    ],
    *,
    memory: typing.SupportsFloat | typing.SupportsIndex,
    bandwidth: typing.SupportsFloat | typing.SupportsIndex,
    devices: typing.SupportsInt | typing.SupportsIndex,
    microbatches: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[list[tuple[int, list[int], list[int]]], float, float | None]:
    """
    Layers are (kept, recomputed, parameter bytes), each way (time, bytes a microbatch, fixed bytes); edges (from, to, bytes). Returns stages (replicas, layers, recomputed layers), time and bound.
    """

def step_rows(
    tensors: collections.abc.Sequence[torch.Tensor],
    rows: torch.Tensor,
    made: torch.Tensor,
    step: AdamStep | SgdStep,
    gradient: torch.Tensor,
    number: typing.SupportsInt | typing.SupportsIndex,
    pool: ThreadPool,
) -> None:
    """
    Makes one step of rows of a table, and notes its number for them.
    """

def sums_of_squares(
    tensors: collections.abc.Sequence[torch.Tensor], pool: ThreadPool, instructions: InstructionSet | None = None
) -> list[float]: ...
def supported_instruction_sets() -> list[InstructionSet]:
    """
    The instruction sets that this machine can run, from slow to fast.
    """

def suspend_charging() -> None:
    """
    Nothing the calling thread allocates is charged from here on, until it enters a window.
    """

def why_not_pageable(parameter: torch.Tensor) -> str:
    """
    Why the parameter cannot be offloaded; empty when it can.
    """

def write_rows(
    files: collections.abc.Sequence[RowFile],
    rows: torch.Tensor,
    values: collections.abc.Sequence[torch.Tensor],
    made: torch.Tensor,
    now: torch.Tensor,
) -> None:
    """
    Writes rows of several files, which are lost together if the disk fails, and the steps that they have made.
    """

DISK_ALIGNMENT: int = 4096
DISK_LEAST_BYTES: int = 16384
DISK_WORKING_SETS: int = 3
PAGE_ALIGNMENT: int = 512
ROW_NOTES_BYTES: int = 5
STASH_LEAST_BYTES: int = 20480
STASH_WORKING_BYTES: int = 41943040
