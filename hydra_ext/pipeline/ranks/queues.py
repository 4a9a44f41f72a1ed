"""Hardware queues of a GPU, in which the kernels of streams wait.

CUDA gives each stream one of a few queues. If there are more streams than queues, some share one, and the kernels of
one stream then wait for those of another. A kernel of NCCL waits for another rank. What stands behind it in its queue
may be what that rank waits for.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)

_SETTING = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = 32  # queues that CUDA makes if it is told to
_BY_ITSELF = 8  # queues that it makes if it is not
_BY_LINK = 2  # streams: that of its communicator, and the link's own


def warn_if_few(links: int, beside: int) -> None:
    """Logs a warning if a rank may have more streams than its GPU has queues.

    Args:
        links: Number of the rank's links whose tensors NCCL carries.
        beside: Number of its other streams.
    """
    streams, queues = _BY_LINK * links + beside, int(os.environ.get(_SETTING, _BY_ITSELF))
    if links and streams > queues:
        logger.warning(
            "this rank has %d links by NCCL, and %d streams with those beside them, but its GPU has %d hardware "
            "queues: streams that share one wait for each other, and ranks may wait for ever. Set %s=%d before the "
            "first use of CUDA",
            links,
            streams,
            queues,
            _SETTING,
            _MOST,
        )
