"""The running context: windows, hooks, the autograd engine's wrapper, reports."""
