"""The copy of a state that a background save writes from."""
