"""Common code of the command-line programs `ptdmpi` and `ptdmpi-data`: options, help, exit codes,
and one-line error messages."""
