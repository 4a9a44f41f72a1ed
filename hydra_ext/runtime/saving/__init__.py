"""Saving a run, resuming it, and handling SIGTERM."""
