"""Jobs of a batch system: the site, the script, and the command that submits it."""
