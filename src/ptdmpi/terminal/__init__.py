"""Code that the command-line programs `ptdmpi` and `ptdmpi-data` share: options, help, exit codes,
and one-line error messages."""
