"""A rank with more streams than its GPU has hardware queues is told what to set."""

from __future__ import annotations

import logging

import pytest

from hydra_ext.pipeline.ranks.queues import warn_if_few


@pytest.mark.parametrize(
    ("links", "beside", "setting", "told"),
    [
        (2, 4, None, False),  # eight streams, and as many queues
        (4, 1, None, True),
        (2, 4, "4", True),
        (4, 4, "12", False),
        (4, 4, "11", True),
        (0, 9, None, False),  # nothing waits for another rank
    ],
)
def test_more_streams_than_queues_are_told(
    links: int,
    beside: int,
    setting: str | None,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", setting)
    with caplog.at_level(logging.WARNING):
        warn_if_few(links, beside)
    assert [f"{2 * links + beside} streams" in text for text in caplog.messages] == [True] * told
    assert all("CUDA_DEVICE_MAX_CONNECTIONS=32" in text for text in caplog.messages)
