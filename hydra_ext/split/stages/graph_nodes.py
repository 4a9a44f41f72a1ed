"""In the place of the graph of a value that has not come to a stage."""

from __future__ import annotations

from typing import Any

from hydra_ext.errors import SplitError


class GraphElsewhere:
    """That there is one can be asked, as ``tensor.grad_fn is not None``; nothing else."""

    def __getattr__(self, name: str) -> Any:
        raise SplitError(
            f"grad_fn.{name} is asked of a value of another stage, whose graph is there: do that in a block, or give "
            "stages= explicitly"
        )
