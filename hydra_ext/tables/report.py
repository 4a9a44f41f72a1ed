"""What a run reports on its tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DiskReport:
    """Tables at home on the disk.

    Attributes:
        nbytes: Of weights and moments that are there now, and not on the host.
        read_bytes: Rows read from there.
        written_bytes: Rows written there.
    """

    nbytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True)
class TableReport:
    """Weights of which rows move, and what has moved since the run began.

    Attributes:
        names: Their names. They are in no block.
        nbytes: Their bytes.
        rows_moved_bytes: Rows copied from host to device.
        rows_written_back_bytes: Rows that ``max_norm`` has changed, copied from device to host.
        gradients_moved_bytes: Gradients of rows copied from device to host.
        gradients_averaged_bytes: Gradients of rows that this rank has sent to the others, to be averaged. Each row is
            sent once, with its number of 8 bytes.
        stepped_by_rows: Names of those whose steps change the rows with a gradient alone, and of which others catch up.
        disk: Those that are at home on the disk.
    """

    names: tuple[str, ...]
    nbytes: int
    rows_moved_bytes: int
    rows_written_back_bytes: int
    gradients_moved_bytes: int
    gradients_averaged_bytes: int
    stepped_by_rows: tuple[str, ...]
    disk: DiskReport

    def __str__(self) -> str:
        disk = f"; {_mib(self.disk.nbytes)} on the disk, with moments" if self.disk.written_bytes else ""
        return (
            f"{len(self.names)}, {_mib(self.nbytes)}: rows in {_mib(self.rows_moved_bytes)}, gradients out "
            f"{_mib(self.gradients_moved_bytes)}; {len(self.stepped_by_rows)} stepped by rows{disk}"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
