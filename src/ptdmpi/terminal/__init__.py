"""At the terminal, for both programs: shared options, errors of one line, progress."""
