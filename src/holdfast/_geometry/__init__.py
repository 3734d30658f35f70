"""Owns boxes in row-major arrays: where they meet and what they cover.

A box is a place (``offsets``) and an extent (``lengths``), one number per dimension. A box without
dimensions is a scalar: one element. A box with a length of 0 is legal and holds nothing. Everything here
is integers and tuples; no array is ever made.
"""

from holdfast._geometry.box import Box, contains, intersect, row_major_strides, volume
from holdfast._geometry.cover import CoverProblem, check_cover, cover_of

__all__ = [
    "Box",
    "CoverProblem",
    "check_cover",
    "contains",
    "cover_of",
    "intersect",
    "row_major_strides",
    "volume",
]
