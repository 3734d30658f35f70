"""The planners that save and load unless the caller brings others, one in each module."""
