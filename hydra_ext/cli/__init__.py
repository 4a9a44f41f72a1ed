"""The command line, `hydra-ext VERB` or `python -m hydra_ext VERB`. No other part of the package prints."""
