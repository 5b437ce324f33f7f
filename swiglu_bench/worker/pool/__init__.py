"""Sweeps over many places: the GPUs of this host, or of the hosts of a Ray cluster. Each case is on one of them."""
