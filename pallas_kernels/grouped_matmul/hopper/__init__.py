"""The steps of the Hopper kernel in `mosaic_hopper`: PTX for the GPU (`native`), plain operations elsewhere (`plain`)."""
