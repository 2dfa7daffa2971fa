"""The commands of `ptdmpi`, one module each; `ptdmpi.cli` imports them when they are called."""
