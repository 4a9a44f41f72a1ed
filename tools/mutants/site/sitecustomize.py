"""Loaded by every process of a traced test."""

import os

if "MUTANTS_TEST" in os.environ:
    from mutants.tracing import trace_process

    trace_process()
