"""What a checkpoint is on disk: manifests, torch's metadata and items. Torch-free."""
