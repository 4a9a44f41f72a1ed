"""Pipelines of small stages in several processes, and what ranks do in tests of them."""
