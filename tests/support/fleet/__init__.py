"""Fleets in virtual time, and what runs them."""
