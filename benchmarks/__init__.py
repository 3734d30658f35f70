"""Holdfast side by side with torch.distributed.checkpoint, on the same states in the same run.

``python -m benchmarks --list`` names the cases; docs/benchmarks.md says how they are measured.
"""
