"""Policies for the tensors that autograd saves for backward, and the places where those tensors are kept."""
