"""What `mosaic_blackwell` is made of; what it shares with Hopper's kernel is in `hopper`."""
