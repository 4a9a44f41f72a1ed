"""The command line, `hydra-ext VERB` or `python -m hydra_ext VERB`. The only part of the package that prints."""
