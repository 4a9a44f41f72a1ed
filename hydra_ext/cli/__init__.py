"""The command line, `python -m hydra_ext VERB`. The only part of the package that prints."""
