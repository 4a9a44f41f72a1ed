"""`python -m hydra_ext`."""

import sys

from hydra_ext.cli import main

if __name__ == "__main__":
    sys.exit(main.run())
