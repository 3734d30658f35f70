"""Turning states into plans and plans into checkpoints: flatten, describe, merge, reshard, check."""
