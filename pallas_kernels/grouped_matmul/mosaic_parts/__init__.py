"""What Mosaic's kernels share, for Hopper and for Blackwell: schedule tables, copies, decode, epilogue, memory."""
