"""The row of all commands, what is declared of its figures, the CSV files, finished runs read back. No torch."""
