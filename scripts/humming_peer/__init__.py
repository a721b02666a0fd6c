"""What `scripts/peer_humming.py` and `scripts/peer_humming_layer.py` are made of. No JAX, but torch and humming."""
