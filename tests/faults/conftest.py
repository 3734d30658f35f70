"""Lets the fault tests import what they share, from wherever they are run."""

import os
import sys

# Tests are imported one by one; only `python -m pytest` finds their folders by itself.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
