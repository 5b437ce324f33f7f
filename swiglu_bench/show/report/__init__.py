"""Runs on the disk as one HTML page, or as pictures: load, sections, ranking, charts, words, page. No torch in here."""
