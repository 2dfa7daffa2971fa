"""The commands of `ptdmpi`, each in one module. `ptdmpi.cli` imports a module only when its command
runs."""
