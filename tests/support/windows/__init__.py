"""Typical user code around forward and backward, one function each."""
