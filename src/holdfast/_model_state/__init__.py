"""State dicts of models and optimizers: named alike whatever wraps the model, read without a change."""
