"""Kernels for the ops that move rows and compute little: gated activations and quantisers."""
