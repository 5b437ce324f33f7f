"""The way of a case: admitted, timed and judged, turned into rows. What each process does, not where it runs."""
