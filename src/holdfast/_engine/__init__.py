"""The two pipelines, a save and a load, one straight function each."""
