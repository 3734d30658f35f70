"""Tests of every case that there is: some of the cases in ``make test``, all of them in ``make soak``."""

import pytest


def sweep(stride: int) -> pytest.MarkDecorator:
    """Give a test the argument ``stride``: it tries every ``stride``-th case, and each one in ``make soak``.

    The cases of ``make soak`` are marked ``slow`` as well.
    """
    every = pytest.param(1, id="every", marks=[pytest.mark.slow, pytest.mark.soak])
    return pytest.mark.parametrize("stride", [pytest.param(stride, id="some"), every])
