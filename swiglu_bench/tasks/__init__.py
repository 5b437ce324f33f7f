"""What a command does beyond a sweep."""
