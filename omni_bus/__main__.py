"""``python -m omni_bus``: the ``omni-bus`` command where it is not on the path."""

import sys

from omni_bus.cli import main

if __name__ == "__main__":
    sys.exit(main())
