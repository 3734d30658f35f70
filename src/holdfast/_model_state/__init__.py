"""State dicts of models and optimizers: names do not depend on wrappers, and reading changes nothing."""
