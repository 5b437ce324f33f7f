"""This machine: what it is, its GPU through NVML, locks, measured ceilings, what would spoil a measurement."""
