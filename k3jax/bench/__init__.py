"""`k3jax bench`: how fast the experts' products are on this device, beside what it can do and what others reach."""
