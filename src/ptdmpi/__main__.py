"""`python -m ptdmpi` is the command `ptdmpi`."""

from ptdmpi.cli import main

main()
