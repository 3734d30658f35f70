"""Bytes in and out: stores, files, and the streams that transform them."""
