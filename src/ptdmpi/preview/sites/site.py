"""Site files: TOML files with the settings that the batch system of a site needs for each job, such
as the account and the time limit."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from ptdmpi.base.disk import home_folder, read_file, write_whole
from ptdmpi.base.errors import InputError
from ptdmpi.base.say import note
from ptdmpi.base.toml import tables_of
from ptdmpi.config.section import FrozenTable, NonNegative, Positive
from ptdmpi.supervise.environment import jobs_folder

SchedulerName = Literal["slurm", "pbs", "lsf", "flux", "kubernetes"]
TimeLimit = Annotated[str, Field(pattern=r"^[0-9]{1,3}:[0-5][0-9]:[0-5][0-9]$")]


def _is_name(text: str) -> str:
    """Return the text if a scheduler reads it as one word; otherwise raise ValueError."""
    if not re.fullmatch(r"[\w.,:@/+=%-]*", text):
        raise ValueError("legal: letters, digits and . , : @ / + = % _ -")
    return text


def _is_line(text: str) -> str:
    """Return the text if it has no control character; otherwise raise ValueError."""
    if not text.isprintable():
        raise ValueError("legal: one line, without control characters")
    return text


def _is_commands(text: str) -> str:
    """Return `text`, which may have several lines. Raise ValueError if it has control characters
    other than line ends and tabs."""
    if not all(line.expandtabs().isprintable() for line in text.split("\n")):
        raise ValueError("legal: lines without control characters")
    return text


# Types of texts that are written into a script. A ScriptName follows a directive of the scheduler,
# such as #SBATCH --account=. A ScriptLine is one line, and ScriptCommands are lines of shell
# commands.
ScriptName = Annotated[str, AfterValidator(_is_name)]
ScriptLine = Annotated[str, AfterValidator(_is_line)]
ScriptCommands = Annotated[str, AfterValidator(_is_commands)]
EXAMPLE = "site.toml"


class NodeShape(FrozenTable):
    """The ranks, GPUs and cores of a node."""

    ranks: Positive
    gpus: NonNegative = 0
    cores: Positive


class Site(FrozenTable):
    """The content of a site file (`jobs/site.toml` explains the keys). If a value is an empty
    string, the template or the scheduler chooses the value. `name` is the name of the site file
    without ".toml"."""

    name: str
    scheduler: SchedulerName
    account: ScriptName
    queue: ScriptName = ""
    time: TimeLimit = "12:00:00"
    setup: ScriptCommands = ""
    launch: ScriptLine = ""
    container: ScriptLine = ""
    cluster: ScriptLine = ""
    template: ScriptLine = ""
    node: NodeShape

    @property
    def minutes(self) -> int:
        """Return the time limit in whole minutes."""
        hours, minutes, _ = map(int, self.time.split(":"))
        return 60 * hours + minutes

    @property
    def template_name(self) -> str:
        """Return the name of this site's script template in jobs/."""
        if self.template:
            return self.template
        if self.scheduler == "kubernetes":
            return "kubernetes.yaml"
        if self.scheduler == "slurm":
            return "slurm-gpu.sbatch" if self.node.gpus else "slurm-cpu.sbatch"
        return f"{self.scheduler}-gpu.sh"


def sites_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of copied site files (see `site_of`), inside the user's configuration
    folder."""
    base = environ.get("XDG_CONFIG_HOME") or home_folder(environ) / ".config"
    return Path(base) / "ptdmpi" / "sites"


def site_of(text: str) -> Site:
    """Return the site that `text` names: `text` is the path of a `.toml` file, or the name of a
    site whose file was given by its path before. A file that is given by its path is copied to
    `sites_folder`, so that its name is enough from then on.

    Raise InputError for an unknown name, and for a file that is not valid.
    """
    folder = sites_folder()
    if not text.endswith(".toml"):
        if not re.fullmatch(r"[\w.-]+", text) or not (folder / f"{text}.toml").is_file():
            known = ", ".join(sorted(path.stem for path in folder.glob("*.toml"))) or "none yet"
            raise InputError(
                f'site "{text}" is unknown; known: {known}. Adapt a copy of '
                f"{jobs_folder() / EXAMPLE}, and give its path once: --site {text}.toml"
            )
        return _read(folder / f"{text}.toml")[0]
    site, content = _read(Path(text))
    remembered = folder / f"{site.name}.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(remembered, content)
    except OSError as error:
        note(f"ptdmpi submit: not remembered in {remembered}: {error.strerror}")
        return site
    note(f"ptdmpi submit: remembered in {remembered}; --site {site.name} is enough from now on")
    return site


def _read(path: Path) -> tuple[Site, bytes]:
    """Return the site in a file, and the content of the file. Raise InputError if the file is not
    valid."""
    try:
        content = read_file(path)
        tree = tables_of(content)
    except OSError as error:
        raise InputError(f"site {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"site {path} is not valid TOML: {error}") from None
    try:
        site = Site.model_validate({**tree, "name": path.stem})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        hint = ""
        if key == "account" and first["type"] == "missing":
            hint = '; account = "" if the scheduler does not ask for one'
        elif key == "time":
            hint = "; write HH:MM:SS"
        text = first["msg"].removeprefix("Value error, ")
        raise InputError(f"site {path}: {key}: {text}{hint}") from None
    if site.container and site.scheduler in ("pbs", "lsf"):
        raise InputError(f"site {path}: container: legal with slurm, flux and kubernetes")
    if site.scheduler == "kubernetes" and not site.container:
        raise InputError(f"site {path}: container is missing: the image that the pods run")
    if not (jobs_folder() / site.template_name).is_file():
        raise InputError(f"site {path}: template: no {site.template_name} in {jobs_folder()}")
    return site, content
