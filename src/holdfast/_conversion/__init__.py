"""Conversion between formats: what a source holds, what is taken of it, how it is written and checked."""
