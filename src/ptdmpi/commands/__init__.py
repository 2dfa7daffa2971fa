"""The commands of `ptdmpi`, one module each; `ptdmpi.cli` imports one when it runs."""
