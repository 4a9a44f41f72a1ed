"""Warnings about rounds that run in another way than the user asked for."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def tell_again(size: int, why: str) -> None:
    """Warns that a round of ``size`` microbatches was undone and runs in another way."""
    logger.warning(
        "run.step undoes a round of %d microbatches and retries it in another way, calling fn for them again: side "
        "effects of fn outside the model happen twice. report().retries counts these rounds from now on. %s",
        size,
        why,
    )


def tell_alone(why: str) -> None:
    """Warns that microbatches run one at a time from now on."""
    logger.warning("run.step runs one microbatch at a time from now on: %s", why)


def tell_deviation(error: object) -> None:
    """Warns that a step is repeated because of a block that is not recomputed from now on."""
    logger.warning("run.step makes a step again: %s", error)
