"""Values that are not tensors: into the form that torch.load reads, and back without running their code."""
