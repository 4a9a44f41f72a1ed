"""Tests of the emulated machine are collected only where it runs: `make emulated-test`."""

from __future__ import annotations

import sys

_TESTS = [
    "test_clock.py",
    "test_machine.py",
    "test_nccl.py",
    "test_operators.py",
    "test_pinning.py",
    "test_workspaces.py",
]
collect_ignore = [] if "emulated_cuda" in sys.modules else _TESTS
