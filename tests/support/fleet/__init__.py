"""Jobs that workers can import, and the plain loop that they are compared with."""
