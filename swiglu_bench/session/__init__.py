"""One case after another in this process: built, checked, timed, turned into rows."""
