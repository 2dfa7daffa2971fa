"""The commands of `ptdmpi`, one module for each command. `ptdmpi.cli` imports a module only when
its command runs."""
