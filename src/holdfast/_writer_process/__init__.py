"""The writer process: a process of low priority beside each trainer that writes what the trainer has staged.

Importing this package does not import torch: the process must not do that with its first steps.
"""
