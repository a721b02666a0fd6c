"""Layers converted once: a checkpoint's weights in the layout that a device wants, as orbax checkpoints."""
