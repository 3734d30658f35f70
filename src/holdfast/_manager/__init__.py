"""What a checkpoint manager does besides saving and loading: signals, agreement of ranks, deletions."""
