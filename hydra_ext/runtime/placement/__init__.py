"""Placement of a model's tensors: the device and its budget, homes on device, host and disk, faces of parameters."""
