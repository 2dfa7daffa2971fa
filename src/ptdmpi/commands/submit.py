"""`ptdmpi submit`: print the job script of a training run, or submit it to the scheduler."""

import subprocess
import sys
from pathlib import Path
from shutil import which

import click

from ptdmpi.base.disk import write_whole
from ptdmpi.base.say import note
from ptdmpi.config import InputError
from ptdmpi.terminal.options import PATH, SET
from ptdmpi.terminal.program import Command

# Maps each scheduler to its command for submitting a script. "<" means that the command reads the
# script from its standard input.
SUBMIT = {
    "slurm": ("sbatch",),
    "pbs": ("qsub",),
    "lsf": ("bsub", "<"),
    "flux": ("flux", "batch"),
    "kubernetes": ("kubectl", "create", "-f"),
}


@click.command(cls=Command)
@click.argument("config", type=PATH)
@click.option(
    "--site",
    required=True,
    metavar="NAME",
    help="Name of a site that ptdmpi remembers, or a site file.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1),
    help="Number of nodes [default: as many as the layout needs].",
)
@SET
@click.option(
    "--plan", "planned", is_flag=True, help="Search for the best layout on the site's cluster."
)
@click.option("--now", is_flag=True, help="Write the script next to CONFIG, and submit it.")
def command(
    config: Path,
    *,
    site: str,
    nodes: int | None,
    settings: tuple[str, ...],
    planned: bool,
    now: bool,
) -> None:
    """Print a job script that trains the model described by the TOML file CONFIG, for example

    ptdmpi submit first.toml --site mycluster --nodes 2

    A site file gives the scheduler, account, queue, software and nodes of a cluster. ptdmpi
    remembers the site, so that later only its name is needed. The script is made from a template in
    jobs/ for Slurm, PBS, LSF, Flux or Kubernetes.
    """
    from ptdmpi.preview.sites.job import job_of
    from ptdmpi.preview.sites.script import script_of
    from ptdmpi.preview.sites.site import site_of

    place = site_of(site)
    job = job_of(config, settings, place, nodes, planned=planned)
    suffix = "yaml" if place.scheduler == "kubernetes" else "sh"
    file = config.with_name(f"{config.stem}.{place.scheduler}.{suffix}")
    script = script_of(job, file)
    if not now:
        note(f"ptdmpi submit: save this script as {file}; --now does that, and submits it")
        click.echo(script, nl=False)
        return
    _submit(place.scheduler, file, script)


def _submit(scheduler: str, file: Path, script: str) -> None:
    """Write the script to `file`, submit it to the scheduler, and print the scheduler's output.

    Raise InputError if the scheduler's command is not installed, if `file` cannot be written, or if
    the scheduler refuses the job.
    """
    program, *options = SUBMIT[scheduler]
    if which(program) is None:
        raise InputError(
            f"no {program} on PATH: submit where the scheduler is, or leave out --now, which "
            "prints the script"
        )
    try:
        write_whole(file, script)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    words = [program, *options, str(file)]
    if "<" in options:
        words = [program]
    # a command that reads the script from the file ignores its standard input
    done = subprocess.run(words, input=script, text=True, capture_output=True, check=False)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise InputError(f"{program} refused {file}: {reason}")
    note(f"ptdmpi submit: {file} is submitted")
    sys.stdout.write(done.stdout)
