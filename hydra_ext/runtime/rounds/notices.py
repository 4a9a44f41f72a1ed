"""What the user is told of rounds that are run otherwise than they were asked for."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def tell_again(size: int, why: str) -> None:
    """A round of so many microbatches has been undone, and is run otherwise."""
    logger.warning(
        "run.step undoes a round of %d microbatches and tries it otherwise, calling fn for them again: what fn "
        "does outside the model is done twice. report().retries counts such rounds from now on. %s",
        size,
        why,
    )


def tell_alone(why: str) -> None:
    """Rounds have one microbatch from now on."""
    logger.warning("run.step runs one microbatch at a time from now on: %s", why)


def tell_deviation(error: object) -> None:
    """A block is not made again from now on."""
    logger.warning("run.step makes a step again: %s", error)
