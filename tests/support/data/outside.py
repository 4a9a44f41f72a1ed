"""Memory of worker processes, measured from another process: its arguments are a process and a file to write to.

Each line is a measurement: bytes of the process, its children and theirs, as proportional set size. A file with that
name and ``.over`` behind it ends it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def below(process: int) -> list[int]:
    """All processes that a process has started, and that these have."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError):
                found += [int(each) for each in (task / "children").read_text().split()]
    return [*found, *(each for child in found for each in below(child))]


def taken(process: int) -> int:
    """Bytes, with the process's part of pages that it has in common with others."""
    found = 0
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "Pss":
                found += 1024 * int(rest.split()[0])
    return found


def main() -> None:
    first, out = int(sys.argv[1]), sys.argv[2]
    while Path(f"/proc/{first}").exists() and not Path(out + ".over").exists():
        measured = sum(taken(each) for each in [first, *below(first)])
        with open(out, "a") as file:
            file.write(f"{measured}\n")


if __name__ == "__main__":
    main()
