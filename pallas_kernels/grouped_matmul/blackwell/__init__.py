"""What `mosaic_blackwell` is made of: its tuning, its roles, and their steps in PTX and in plain operations."""
