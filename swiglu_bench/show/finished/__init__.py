"""Finished runs: shown again, listed, compared, and what to use according to them. Nothing is measured here."""
