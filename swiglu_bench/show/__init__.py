"""What is shown of rows: tables, files, pages, charts, Weights & Biases; nothing here measures."""
