"""The steps of the kernel in `mosaic_hopper`: PTX for the GPU (`native`), plain operations elsewhere (`plain`)."""
