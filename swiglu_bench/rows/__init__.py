"""Rows and their files: one dataclass per kind of row, the CSV files, finished runs read back. No torch."""
