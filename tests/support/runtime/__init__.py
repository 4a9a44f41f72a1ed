"""Offloaded runs beside plain ones, on device, host and disk."""
