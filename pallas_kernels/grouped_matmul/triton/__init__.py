"""The Triton kernels of `grouped_matmul`: what a block works on, the two main loops, and what becomes of a sum."""
