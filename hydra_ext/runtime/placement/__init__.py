"""Where things live: the device and its budget, homes on device, host and disk, faces of parameters."""
