"""Tensors of every kind as chunks and as bytes in the memory of the host."""
