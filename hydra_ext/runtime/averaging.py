"""Averages gradients over the ranks while backward runs.

A rank's gradient of the step is the sum over its microbatches. The mean is the sum over ranks in the gradient's own
dtype, divided by their number, and has the same bits on every rank. Two ranks add in one order only. With more ranks
the backend determines the order, and the mean is within (size - 1) roundings of the gradients' largest partial sum.

Ranks may take different paths through the model. To match collectives, each rank issues exactly the same ones,
whatever its microbatches did:

1. one *agreement*: has a rank failed, are all at the same place, do they train the same parameters;
2. for every block with trained parameters, from the last to the first: the marks of its parameters, then their
   gradients, or zeros where the rank has none. NCCL sums those of one dtype together. If backward has produced a
   gradient on no rank since it was last averaged, it stays as it is, or stays None;
3. for all trained tables together: their marks, kinds and numbers of rows with a gradient; then, from each rank that
   has any, these rows. They are added in the order of the ranks. If a mark says that a rank has failed, no rows follow.

A block is issued once its gradients are complete and all blocks after it have been issued. The rank waits for it one
stay later, so communication overlaps with the backward of the blocks before it.

A rank that fails after the agreement continues with zeros and tells the others in the marks; then every rank raises.
If that rank can retry, as after running out of device memory, every rank undoes the step and makes it again instead.
A rank that fails after the averaging has made one step less, which the next agreement detects.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.errors import RankFailed, ReplicasDiffer, StateError
from hydra_ext.optim.layout import as_parameter_lies
from hydra_ext.optim.rows import gradient_of
from hydra_ext.runtime.replicas import Reduction, Replicas

if TYPE_CHECKING:
    from hydra_ext.tables.lookup import TableRows
    from hydra_ext.tables.means import Share

logger = logging.getLogger(__name__)

# Marks of a parameter; the ranks take their maximum. A mark of _FAILED + n says that rank n has failed.
_NONE, _UNCHANGED, _ARRIVED, _UNFIT, _AGAIN, _FAILED = range(6)

IN_STEP, IN_BACKWARD = range(2)  # callers that average gradients: run.step, or a backward


class StepAgain(Exception):
    """A rank has to make the step again after its last backward began: every rank undoes the step and repeats it."""


@dataclass
class _Share:
    """One parameter's contribution to the reduction of its block.

    Attributes:
        index: Index of the parameter in its block.
        mark: Mark that this rank sends for the parameter.
        buffer: Contribution of this rank, and the sum afterwards, with the layout of the parameter.
        from_device: Whether the buffer was taken from the device, to which the mean is returned.
    """

    index: int
    parameter: Tensor
    mark: int
    buffer: Tensor
    from_device: bool = False


@dataclass
class _BlockReduction:
    """A block whose reductions have begun: first the marks, then the shares."""

    block: int
    shares: list[_Share]
    reductions: list[Reduction] = field(default_factory=list)

    def mark(self, mark: int) -> None:
        for share in self.shares:
            share.mark = mark

    def issue(self, replicas: Replicas) -> None:
        """Issues the reductions that have not been issued yet."""
        if not self.reductions:
            self.reductions.append(replicas.start_maximum([share.mark for share in self.shares]))
        while len(self.reductions) <= len(self.shares):
            left = self.shares[len(self.reductions) - 1 :]
            self.reductions += replicas.start_sums([share.buffer for share in left])


class _Agreement:
    """A collective check that no rank has failed, and that all are at the same place and train the same parameters.

    Args:
        place: Either :data:`IN_STEP` or :data:`IN_BACKWARD`.

    Attributes:
        made: Whether every rank has asked, and all agree.
    """

    def __init__(self, replicas: Replicas, layout: Layout, place: int) -> None:
        self.made = False
        self._replicas = replicas
        self._layout = layout
        self._place = place
        self._answers: Reduction | None = None

    @property
    def is_asked(self) -> bool:
        return self._answers is not None

    def ask(self, *, failed: bool) -> None:
        in_blocks = [parameter for block in self._layout.blocks for _, parameter in block.parameters]
        pattern = bytes(p.requires_grad for p in [*in_blocks, *(table.weight for table in self._layout.tables)])
        same = [self._place, self._replicas.passes, zlib.crc32(pattern)]
        failure = self._replicas.rank + 1 if failed else 0
        with _C.Uncharged():
            self._answers = self._replicas.start_maximum([failure, *same, *(-value for value in same)])

    def conclude(self) -> None:
        """Waits for the answers, if this rank has asked.

        Raises:
            RankFailed: a rank has asked because its step has failed.
            ReplicasDiffer: the ranks do not agree.
        """
        if self._answers is None:
            return
        failure, *ranges = self._replicas.wait(self._answers).tolist()
        if failure:
            raise _failure_of(failure - 1)
        greatest, least = ranges[: len(ranges) // 2], [-value for value in ranges[len(ranges) // 2 :]]
        reasons = (
            "some ranks are in run.step, others in a backward()",
            "some ranks have made more steps than others: one has failed after its gradients were averaged",
            "the ranks train different parameters: set requires_grad alike on all of them",
        )
        for reason, high, low in zip(reasons, greatest, least, strict=True):
            if high != low:
                raise ReplicasDiffer(f"the ranks have gone different ways: {reason}")
        self.made = True


class _Order:
    """The order in which blocks are issued, and when: from the last one with trained parameters to the first.

    Attributes:
        trained: Trained parameters of each block, with their indices in it; set by :meth:`begin`.
        left: Blocks still to be issued, the next one last.
    """

    def __init__(self, layout: Layout) -> None:
        self.trained: list[list[tuple[int, Tensor]]] = []
        self.left: list[int] = []
        self._layout = layout
        self._last_turns: list[int] = []  # by block, the last turn that adds to its gradients
        self._seen = 0  # number of turns that had run at the last call of looked()

    def begin(self) -> None:
        blocks = self._layout.blocks
        self.trained = [[(i, p) for i, (_, p) in enumerate(block.parameters) if p.requires_grad] for block in blocks]
        self.left = [number for number, trained in enumerate(self.trained) if trained]

    def follow(self, staged: _C.StagedBackward, turns: int, faces: Sequence[Tensor]) -> None:
        hosts = [parameter for block in self._layout.blocks for _, parameter in block.parameters]
        if staged.nested:  # it is unknown which gradients the nested backwards add to
            self._last_turns = [turns - 1] * len(self._layout.blocks)
            return
        by_leaf = staged.last_turns([*faces, *hosts])
        by_parameter = iter([max(pair) for pair in zip(by_leaf[: len(hosts)], by_leaf[len(hosts) :], strict=True)])
        self._last_turns = [max(next(by_parameter) for _ in block.parameters) for block in self._layout.blocks]

    def finished(self, turns: int) -> int | None:
        """The next block to issue, if its gradients are complete after this number of turns; else None.

        The last block is kept until the backward has ended: with its marks this rank may have to report a failure.
        """
        return self.left[-1] if len(self.left) > 1 and self._last_turns[self.left[-1]] < turns else None

    def finished_before(self, block: int) -> bool:
        """Whether the block's gradients were complete at the last call of :meth:`looked`."""
        return self._last_turns[block] < self._seen

    def looked(self, turns: int) -> None:
        """Notes that finished blocks were issued after this number of turns."""
        self._seen = turns


class _Reductions:
    """Blocks whose reductions have begun, in order, and the results of the ranks' marks.

    Attributes:
        failed: Rank that has failed, or None.
    """

    def __init__(self, replicas: Replicas, layout: Layout) -> None:
        self.failed: int | None = None
        self._again = False  # a rank makes the step again
        self._unfit: list[str] = []  # names of parameters whose gradients cannot be averaged
        self._replicas = replicas
        self._layout = layout
        self._under_way: list[_BlockReduction] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, block: int, shares: list[_Share]) -> None:
        reduction = _BlockReduction(block, shares)
        self._under_way.append(reduction)
        reduction.issue(self._replicas)

    def issue_all(self, mark: int) -> None:
        """Issues every reduction that is not issued yet; marks that have not been sent become ``mark``."""
        for reduction in self._under_way:
            if not reduction.reductions:
                reduction.mark(mark)
            reduction.issue(self._replicas)

    def wait(self, deliver: Callable[[int, _Share], None] | None = None, *, blocks: int | None = None) -> None:
        """Waits for reductions, in order.

        Args:
            deliver: Function that takes a block and a share with its sum, for gradients that some rank has produced.
            blocks: Number of blocks to wait for; all by default.
        """
        for _ in range(len(self._under_way) if blocks is None else blocks):
            reduction = self._under_way[0]
            marks, *sums = reduction.reductions
            greatest = self._replicas.wait(marks).tolist()
            for share, mark, each in zip(reduction.shares, greatest, sums, strict=True):
                self._replicas.wait(each)
                name, _ = self._layout.blocks[reduction.block].parameters[share.index]
                if self.hear(mark, name) and deliver is not None:
                    deliver(reduction.block, share)
            self._under_way.pop(0)

    def hear(self, mark: int, name: str) -> bool:
        """Notes the greatest mark of all ranks for a parameter. Returns whether its gradient becomes the mean."""
        if mark >= _FAILED:
            self.failed = mark - _FAILED
        elif mark == _AGAIN:
            self._again = True
        elif mark == _UNFIT:
            self._unfit.append(f"'{name}'")
        return mark == _ARRIVED

    def expect_means(self) -> None:
        """Checks the marks of all ranks: every gradient has become its mean.

        Raises:
            RankFailed, StepAgain, StateError: see :meth:`Averaging.complete`.
        """
        if self.failed is not None:
            raise _failure_of(self.failed)
        if self._again:
            raise StepAgain
        if self._unfit:
            raise StateError(
                f"the gradient of {', '.join(self._unfit)} is sparse, or has a graph of its own, on some rank, and "
                "cannot be averaged: make it dense, without create_graph"
            )


class _Tables:
    """Averages the gradients of tables by rows, after those of all blocks.

    Every rank calls :meth:`announce` and :meth:`finish`. Further calls do nothing, until :meth:`begin`.
    """

    def __init__(self, replicas: Replicas, tables: Sequence[TableRows]) -> None:
        self._replicas = replicas
        self._tables = tables
        self._arrived: set[TableRows] = set()  # those whose gradients backward has produced, also before an undo
        self.begin()

    def begin(self) -> None:
        """Starts over."""
        self._trained = [table for table in self._tables if table.host.requires_grad]
        self._shares: list[Share] = []
        self._heads: Reduction | None = None
        self._sent: dict[int, Reduction] | None = None
        self._ended = False

    @property
    def left(self) -> bool:
        """Whether this rank has not told its marks yet."""
        return bool(self._trained) and self._heads is None

    def written(self) -> str:
        """The name of a table that something has written to since the backward began; empty without one."""
        return next((f"'{table.name}'" for table in self._trained if table.was_written), "")

    def announce(self, mark: int | None = None) -> None:
        """Starts to tell the marks, and which rows follow. With ``mark``, this rank has this one and no rows."""
        if not self.left:
            return
        from hydra_ext.tables.means import no_share, share_of

        if mark is None:
            self._arrived |= {table for table in self._trained if table.take_arrived()}
        marks = [self._mark(table) if mark is None else mark for table in self._trained]
        self._shares = [
            share_of(table, self._replicas.size) if own < _UNFIT else no_share(table)
            for table, own in zip(self._trained, marks, strict=True)
        ]
        heads = [(own, share.kind, len(share.rows)) for own, share in zip(marks, self._shares, strict=True)]
        self._heads = self._replicas.start_telling([number for head in heads for number in head])

    def _mark(self, table: TableRows) -> int:
        gradient = gradient_of(table.host)
        if gradient is None:
            return _NONE
        by_rows = gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1
        if gradient.requires_grad or not (by_rows or gradient.layout == torch.strided):
            return _UNFIT
        return _ARRIVED if table in self._arrived else _UNCHANGED

    def finish(self, hear: Callable[[int, str], bool], *, deliver: bool) -> None:
        """Waits for the marks of all ranks, and for the rows that follow.

        Args:
            hear: Function that takes the greatest mark of a table and its name, and returns whether it gets a mean.
            deliver: Whether to make the means this rank's gradients.
        """
        if self._heads is None or self._ended:
            return
        from hydra_ext.tables import means

        heads = self._replicas.wait(self._heads).view(self._replicas.size, len(self._trained), 3)
        greatest = heads[:, :, 0].amax(0).tolist()
        for index, kinds in enumerate(heads[:, :, 1].T.tolist()):
            if len({*kinds} - {means.NONE}) > 1:
                greatest[index] = max(greatest[index], _UNFIT)
        follow = [index for index, mark in enumerate(greatest) if hear(mark, self._trained[index].name)]
        if follow and max(greatest) < _AGAIN:
            of_ranks = self._exchange(follow, heads[:, follow, 1:].tolist())
            for index, *shares in zip(follow, *of_ranks, strict=True) if deliver else ():
                means.put_mean(self._trained[index], shares)
        self._ended = True

    def _exchange(self, follow: Sequence[int], heads: Sequence[Sequence[Sequence[int]]]) -> list[list[Share]]:
        """The shares of each rank in these tables, whose kind and number of rows are given for each rank and table."""
        from hydra_ext.tables.means import packed, row_bytes, unpacked

        tables = [self._trained[index] for index in follow]
        sizes = [
            [count * row_bytes(table) for table, (_, count) in zip(tables, of_rank, strict=True)] for of_rank in heads
        ]
        if self._sent is None:
            data = packed([self._shares[index] for index in follow])
            self._sent = self._replicas.start_exchange(data, [sum(of_rank) for of_rank in sizes])
            for table, size in zip(tables, sizes[self._replicas.rank], strict=True):
                table.moved.averaged += size
        received = {rank: self._replicas.wait(sent) for rank, sent in self._sent.items()}
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return [unpacked(received.get(rank, nothing), tables, of_rank) for rank, of_rank in enumerate(heads)]


class Averaging:
    """Averages the gradients of one step, or of one backward.

    Args:
        place: Either :data:`IN_STEP` or :data:`IN_BACKWARD`.
    """

    def __init__(
        self, replicas: Replicas, core: _C.PagedModel, layout: Layout, tables: Sequence[TableRows], place: int
    ) -> None:
        self._replicas = replicas
        self._core = core
        self._layout = layout
        self._place = place
        self._tables = _Tables(replicas, tables)
        self._arrived: dict[int, list[bool]] = {}  # by block: gradients that backward had produced before an undo
        self._reset()

    def _reset(self) -> None:
        self._agreement = _Agreement(self._replicas, self._layout, self._place)
        self._order = _Order(self._layout)
        self._reductions = _Reductions(self._replicas, self._layout)
        self._settled: dict[int, list[bool]] = {}  # by block: which gradients backward has produced

    def agree(self) -> None:
        """The first call waits until every rank has made it, and checks that they agree.

        Raises:
            RankFailed: a rank's step has failed.
            ReplicasDiffer: a rank is at another place, or trains other parameters.
        """
        if not self._agreement.made:
            self._ask(failed=False)
            self._agreement.conclude()

    def _ask(self, *, failed: bool) -> None:
        self._order.begin()
        self._tables.begin()
        self._agreement.ask(failed=failed)

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def follow(self, staged: _C.StagedBackward, turns: int) -> None:
        """Prepares for a backward in this number of turns, so that :meth:`advance` may be called between them."""
        self._order.follow(staged, turns, self._core.blocks.faces())

    @torch.no_grad()
    def advance(self, turns: int) -> None:
        """Delivers finished averages, and issues the blocks whose gradients are complete after this number of turns.

        It is called before gathered gradients leave the device.
        """
        with _C.Uncharged():
            self._reductions.wait(self._deliver)
            while (block := self._order.finished(turns)) is not None:
                gathered = self._gathered(block)
                on_its_way = not any(gradient is not None for gradient in gathered)
                if on_its_way and not self._order.finished_before(block):
                    break  # its transfer to the host overlaps with the next turns
                self._issue(gathered)
        self._order.looked(turns)

    @torch.no_grad()
    def complete(self) -> None:
        """Averages all remaining gradients. Each gradient is its mean once any open window has closed.

        Raises:
            RankFailed: a rank has failed.
            StepAgain: a rank makes the step again, so every rank has to; see :meth:`begin_again`.
            StateError: a gradient cannot be averaged, or a parameter was written to.
            ReplicasDiffer: see :meth:`agree`.
        """
        self.agree()
        moved = self._core.changes.moved() or self._tables.written()
        if moved:
            raise StateError(
                f"something wrote to {moved} during the backward. An optimizer that steps inside backward has this "
                "rank's gradients only: step after backward, or give process_group=False"
            )
        with _C.Uncharged():
            while self._order.left:
                before = len(self._reductions)
                self._issue(self._gathered(self._order.left[-1]))
                self._reductions.wait(self._deliver, blocks=before)
            self._tables.announce()
            self._reductions.wait(self._deliver)
            self._tables.finish(self._reductions.hear, deliver=True)
        self._reductions.expect_means()

    def abandon(self) -> None:
        """Tells the other ranks that this one has failed, and sends zeros for the gradients that they wait for.

        No-op after :meth:`complete`, and after a failed agreement.
        """
        try:
            with torch.no_grad(), _C.Uncharged():
                if not self._agreement.is_asked:
                    self._ask(failed=True)
                if not self._agreement.made:
                    self._agreement.conclude()
                self._answer(_FAILED + self._replicas.rank)
        except (RankFailed, ReplicasDiffer):
            pass  # the other ranks raise it as well
        except RuntimeError as error:  # raised by torch.distributed; the caller is raising another error already
            logger.warning("the other ranks could not be told of this rank's failure: %s", error)

    @torch.no_grad()
    def ask_again(self) -> bool:
        """Tells the other ranks to make the step again, as this rank will, and sends zeros for its gradients.

        Returns False if it is too late to tell them.

        Raises:
            RankFailed: another rank has failed meanwhile.
        """
        if not self._agreement.made:
            return True  # the other ranks still wait in the agreement
        if not (self._order.left or self._tables.left):
            return False
        with _C.Uncharged():
            self._answer(_AGAIN)
        if self._reductions.failed is not None:
            raise _failure_of(self._reductions.failed)
        return True

    def begin_again(self) -> None:
        """Starts over for another attempt at the step. The caller has undone the changes to gradients."""
        self._arrived.update(self._settled)
        self._reset()

    def _answer(self, mark: int) -> None:
        """Reduces all remaining blocks and tables, with this mark and with zeros."""
        self._reductions.issue_all(mark)
        self._reductions.wait()
        while self._order.left:
            block = self._order.left[-1]
            self._begin(block, [_Share(i, p, mark, _zeros_like(p)) for i, p in self._order.trained[block]])
            self._reductions.wait()
        self._tables.announce(mark)
        self._tables.finish(self._reductions.hear, deliver=False)

    # ---- one block --------------------------------------------------------------------------------------------------

    def _gathered(self, block: int) -> list[Tensor | None]:
        """The block's gradients that are still on the device, if the group reduces there; None for each other one."""
        if self._replicas.takes_gathered:
            return self._core.gradients.take_gathered(block)
        return [None] * len(self._layout.blocks[block].parameters)

    def _issue(self, gathered: Sequence[Tensor | None]) -> None:
        block = self._order.left[-1]
        arrived = self._core.gradients.finish(block)
        earlier = self._arrived.get(block, [False] * len(arrived))
        arrived = self._settled[block] = [now or before for now, before in zip(arrived, earlier, strict=True)]
        trained = self._order.trained[block]
        self._begin(block, [_share(i, parameter, gathered[i], arrived[i]) for i, parameter in trained])

    def _begin(self, block: int, shares: list[_Share]) -> None:
        self._order.left.pop()
        self._reductions.begin(block, shares)

    def _deliver(self, block: int, share: _Share) -> None:
        mean = share.buffer.div_(self._replicas.size)
        if share.from_device:
            self._core.gradients.return_gathered(block, share.index, mean)
        elif share.parameter.grad is None:
            share.parameter.grad = mean
        elif share.parameter.grad is not mean:
            share.parameter.grad.copy_(mean)


def _share(index: int, parameter: Tensor, gathered: Tensor | None, arrived: bool) -> _Share:
    if gathered is not None:
        return _Share(index, parameter, _ARRIVED if arrived else _UNCHANGED, gathered, from_device=True)
    gradient = parameter.grad
    if gradient is None:
        return _Share(index, parameter, _NONE, _zeros_like(parameter))
    if gradient.layout != torch.strided or gradient.requires_grad:
        return _Share(index, parameter, _UNFIT, _zeros_like(parameter))
    lying = as_parameter_lies(gradient, parameter)
    if arrived:
        return _Share(index, parameter, _ARRIVED, lying)
    return _Share(index, parameter, _UNCHANGED, lying.clone())  # a copy, as the gradient may have to stay as it is


def _zeros_like(parameter: Tensor) -> Tensor:
    size, stride = parameter.size(), parameter.stride()
    return torch.empty_strided(size, stride, dtype=parameter.dtype, device="cpu").zero_()


def _failure_of(rank: int) -> RankFailed:
    return RankFailed(
        f"rank {rank} has failed in this step, so the gradients are not averaged: that rank's own error says why. If "
        "it continues, call optimizer.zero_grad() and continue as well",
        rank=rank,
    )
