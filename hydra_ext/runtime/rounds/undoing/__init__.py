"""Undoing rounds and steps: contents of modules, buffers, the modules that hold an object, and reads of attributes."""
