"""The command line: options in, one call, tables out. Nothing here computes."""
