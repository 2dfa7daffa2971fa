"""The script of a job. The script is a template from the folder jobs/, into which the values of the
site and of the job are filled."""

import json
import re
import shlex
from pathlib import Path

from ptdmpi.base.errors import InputError
from ptdmpi.preview.sites.job import TrainingJob
from ptdmpi.supervise.environment import jobs_folder

# For each scheduler, the beginning of the script lines that set options. A line with one more # at
# its beginning is commented out.
DIRECTIVES = {
    "slurm": "#SBATCH ",
    "pbs": "#PBS ",
    "lsf": "#BSUB ",
    "flux": "# flux: ",
    "kubernetes": "apiVersion: ",
}
START = '. "${PTDMPI_HOME'  # the beginning of a template's last line, which starts the training


class Template:
    """The lines of a template from the folder jobs/. The methods insert values into these lines."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()

    def has(self, directive: str, option: str) -> bool:
        """Return True if the template has a line for an option of the scheduler. Such a line begins
        with `directive` followed by `option`, and may be commented out."""
        return any(self._is(line, directive, option) for line in self.lines)

    def direct(self, directive: str, option: str, value: object) -> None:
        """Set an option of the scheduler, such as "--nodes=". The line for this option is replaced;
        if the template has no such line, a new line is added."""
        wanted = f"{directive}{option}{value}"
        ours = [n for n, line in enumerate(self.lines) if self._is(line, directive, option)]
        if ours:
            self.lines[ours[0]] = wanted
            return
        last = max(n for n, line in enumerate(self.lines) if line.startswith(directive))
        self.lines.insert(last + 1, wanted)

    def assign(self, name: str, value: str) -> None:
        """Set a shell variable. The line that assigns the variable is replaced; if the template has
        no such line, a new line is added before the line that starts the training."""
        wanted = f"{name}={shlex.quote(value)}"
        ours = [n for n, line in enumerate(self.lines) if line.startswith(f"{name}=")]
        if ours:
            self.lines[ours[0]] = wanted
        else:
            self.before_start(wanted)

    def before_start(self, line: str) -> None:
        """Insert a line before the template's last line, which starts the training."""
        start = next(n for n, line in enumerate(self.lines) if line.startswith(START))
        self.lines.insert(start, line)

    def fill(self, tag: str, value: str) -> None:
        """Replace the value in each YAML line that ends with the comment `tag`. If `value` is
        empty, remove these lines."""
        marked = re.compile(rf"^(\s*[^:#]+: ).*  # {tag}$")
        filled = (marked.sub(lambda match: f"{match[1]}{value}", line) for line in self.lines)
        kept = zip(self.lines, filled, strict=True)
        self.lines = [new for old, new in kept if value or not marked.match(old)]

    @staticmethod
    def _is(line: str, directive: str, option: str) -> bool:
        wanted = f"{directive}{option}"
        return line.startswith((wanted, f"#{wanted}"))


def script_of(job: TrainingJob, file: Path) -> str:
    """Return the script of a job as text. `file` is the path to which the caller will write the
    script. Raise InputError if the site's template was not made for the site's scheduler."""
    folder = jobs_folder()
    template = Template((folder / job.site.template_name).read_text(encoding="utf-8"))
    directive = DIRECTIVES[job.site.scheduler]
    needed = (directive,) if job.site.scheduler == "kubernetes" else (directive, START)
    if not all(any(line.startswith(begin) for line in template.lines) for begin in needed):
        raise InputError(
            f"site {job.site.name}: template: {job.site.template_name} is not a template for "
            f"{job.site.scheduler}"
        )
    if job.site.scheduler == "kubernetes":
        _fill(template, job)
        return "\n".join(template.lines) + "\n"
    options = {"slurm": _slurm, "pbs": _pbs, "lsf": _lsf, "flux": _flux}[job.site.scheduler]
    for option, value in options(job, template).items():
        if value:
            template.direct(directive, option, value)
    site = job.site
    cores = max(1, site.node.cores // job.ranks_per_node)
    variables = {"SETUP": site.setup, "LAUNCH": site.launch, "CONTAINER": site.container}
    if site.scheduler == "pbs":
        variables |= {"RANKS_PER_NODE": str(job.ranks_per_node), "CORES_PER_RANK": str(cores)}
    if site.scheduler == "flux":
        variables |= {"RANKS_PER_NODE": str(job.ranks_per_node), "NODES": str(job.nodes)}
    # Slurm needs no path of the script, because Slurm requeues its own copy of the script
    if site.scheduler != "slurm":
        variables["SCRIPT"] = str(file)
    variables["PTDMPI_HOME"] = str(folder.parent)
    for name, value in variables.items():
        if value:
            template.assign(name, value)
    template.before_start(f"set -- {shlex.join(job.arguments)}")
    return "\n".join(template.lines) + "\n"


def _slurm(job: TrainingJob, template: Template) -> dict[str, object]:
    site, directive = job.site, DIRECTIVES["slurm"]
    by_qos = template.has(directive, "--qos=") and not template.has(directive, "--partition=")
    return {
        "--job-name=": job.name,
        "--account=": site.account,
        "--qos=" if by_qos else "--partition=": site.queue,
        "--nodes=": job.nodes,
        "--ntasks-per-node=": job.ranks_per_node,
        "--gpus-per-node=": site.node.gpus,
        "--cpus-per-task=": max(1, site.node.cores // job.ranks_per_node),
        "--time=": site.time,
    }


def _pbs(job: TrainingJob, template: Template) -> dict[str, object]:
    return {
        "-N ": job.name,
        "-A ": job.site.account,
        "-q ": job.site.queue,
        "-l select=": job.nodes,
        "-l walltime=": job.site.time,
    }


def _lsf(job: TrainingJob, template: Template) -> dict[str, object]:
    gpus = job.site.node.gpus
    if not gpus:
        template.lines = [line for line in template.lines if not line.startswith("#BSUB -gpu")]
    return {
        "-J ": job.name,
        "-P ": job.site.account,
        "-q ": job.site.queue,
        "-n ": job.ranks,
        "-R span": f"[ptile={job.ranks_per_node}]",
        "-gpu num=": f"{gpus}/host" if gpus else "",
        "-W ": job.site.time.rpartition(":")[0],
    }


def _flux(job: TrainingJob, template: Template) -> dict[str, object]:
    return {
        "--job-name=": job.name,
        "--bank=": job.site.account,
        "--queue=": job.site.queue,
        "--nodes=": job.nodes,
        "--time-limit=": f"{job.site.minutes}m",
    }


def _fill(template: Template, job: TrainingJob) -> None:
    """Fill in the template of a job script for Kubernetes. The pods find the configuration in a
    persistent volume claim, at the same path as on this host."""
    site = job.site
    command = ["ptdmpi", "run", "-n", str(job.ranks), "--launcher", site.launch or "mpirun"]
    words = ", ".join(_quoted(word) for word in [*command, *job.arguments])
    values = {
        "job": job.name,
        "account": _quoted(site.account) if site.account else "",
        "queue": _quoted(site.queue) if site.queue else "",
        "ranks": str(job.ranks_per_node),
        "nodes": str(job.nodes),
        "container": _quoted(site.container),
        "command": f"[{words}]",
        "cores": str(site.node.cores),
        "gpus": str(site.node.gpus or ""),
    }
    for tag, value in values.items():
        template.fill(tag, value)


def _quoted(word: str) -> str:
    """Return a word as a double-quoted text of YAML."""
    return json.dumps(word, ensure_ascii=False)  # JSON text is also valid YAML
