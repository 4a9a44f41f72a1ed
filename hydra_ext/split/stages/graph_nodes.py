"""A stand-in for the graph node of a value that has not come to a stage."""

from __future__ import annotations

from typing import Any

from hydra_ext.errors import SplitError


class GraphElsewhere:
    """The ``grad_fn`` of such a value. It can only be compared with None; a read of any attribute raises."""

    def __getattr__(self, name: str) -> Any:
        raise SplitError(
            f"grad_fn.{name} is read of a value whose graph is on another stage: read it in a block, or give stages= "
            "explicitly"
        )
