"""Layers over a file of tokens, on one device, on a mesh or on several hosts: `scripts/evaluate.py` runs it."""
