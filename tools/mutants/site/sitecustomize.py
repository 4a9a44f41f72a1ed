"""Loaded by every process of a test on trace or on trial."""

import os
import sys

# An editable install would go before the copy of the package on PYTHONPATH.
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]

if "MUTANTS_TEST" in os.environ:
    from mutants.tracing import trace_process

    trace_process()
