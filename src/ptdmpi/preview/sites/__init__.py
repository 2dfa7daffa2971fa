"""Jobs for a batch system: the settings of a site, the job script, and the command that submits the
script."""
