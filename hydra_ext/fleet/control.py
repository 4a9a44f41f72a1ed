"""What people ask of a fleet while it runs: files in its folder, which its process reads and removes.

A request that is made while the fleet does not run is answered when it resumes.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_FOLDER = "requests"
_numbers = count()


class Wish(str, Enum):
    """What is asked."""

    STOP = "stop"  # save and end; the job can be restarted
    RESTART = "restart"  # go on after a stop, or after it was set aside
    ADD = "add"  # a new job, perhaps from the newest checkpoint of another one


@dataclass(frozen=True, kw_only=True)
class Request:
    """
    Attributes:
        name: Of the job.
        job: For a new job: as :meth:`hydra_ext.fleet.Job.describe` gives it.
        parent: For a new job: whose newest checkpoint it begins with; None for the beginning.
    """

    wish: Wish
    name: str
    job: Mapping[str, Any] | None = None
    parent: str | None = None


def ask(fleet: Path, request: Request) -> None:
    """Leaves a request in a fleet's folder."""
    folder = fleet / _FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{time.time_ns():020}-{os.getpid()}-{next(_numbers)}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(
        json.dumps({"wish": request.wish.value, "name": request.name, "job": request.job, "parent": request.parent})
    )
    os.replace(draft, path)


def requests(fleet: Path) -> Iterator[Request]:
    """The requests in a fleet's folder, the oldest first. Each is removed once the caller asks for the next one.

    One that cannot be read is set apart, and a warning is logged.
    """
    for path in sorted((fleet / _FOLDER).glob("*.json")):
        try:
            found = json.loads(path.read_text())
            request = Request(wish=Wish(found["wish"]), name=found["name"], job=found["job"], parent=found["parent"])
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s is no request, and is left out: %r", path, error)
            path.rename(path.with_suffix(".damaged"))
            continue
        yield request
        path.unlink()


def is_asked(fleet: Path) -> bool:
    """Whether requests wait."""
    return any(True for _ in (fleet / _FOLDER).glob("*.json"))
