"""The contract matrix: what each implementation can be asked for, found out by asking."""
