"""``python -m holdfast``: the same as ``holdfast``."""

import sys

from holdfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
