"""The steps of a run: folders of one root, found, described, chosen and deleted. Imports no torch."""
