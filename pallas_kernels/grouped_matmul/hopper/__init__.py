"""What `mosaic_hopper` is made of: steps in PTX for the GPU (`native`), in plain operations elsewhere (`plain`).

All but `native` and `products`, which know `wgmma`, serve `mosaic_blackwell` too.
"""
