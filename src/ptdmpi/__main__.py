"""Run the command `ptdmpi` by `python -m ptdmpi`."""

from ptdmpi.cli import main

main()
