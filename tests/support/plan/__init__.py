"""Judges of plans, which share no code with the planners."""
