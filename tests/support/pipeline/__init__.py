"""Pipelines of small stages in several processes, and the work of their ranks in tests."""
