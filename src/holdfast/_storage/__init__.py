"""Checkpoints over any ByteStore: items into files, items out of files, and the commit."""
