"""What `mosaic_hopper` is made of: its steps in PTX (`native`, `products`), and in plain operations (`plain`)."""
