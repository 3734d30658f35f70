"""Saves in the background: which run, what their callers hold, how a program ends while one runs."""
