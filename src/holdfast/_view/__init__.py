"""Looking into a checkpoint: values by key and by slice, for torch or for numpy."""
