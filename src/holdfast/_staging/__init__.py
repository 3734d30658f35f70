"""Staging: the copy of a state that a background save writes from, and the buffers that it lies in."""
