"""A checkpoint that somebody looks into: values by key and by slice, for torch or for numpy."""
