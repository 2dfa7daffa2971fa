"""The checkpoint that a run would resume from."""

from pathlib import Path
from typing import Any

from ptdmpi.base.words import counted
from ptdmpi.checkpoint import directory as files
from ptdmpi.checkpoint.base import base_at
from ptdmpi.checkpoint.examine import newest
from ptdmpi.checkpoint.load import require_kinds
from ptdmpi.checkpoint.manifest import sound_manifest
from ptdmpi.config import Config, InputError
from ptdmpi.inference.tokenizer import known_tokenizer
from ptdmpi.lineage.course import Course
from ptdmpi.plan.layer.low_bit import LowBit
from ptdmpi.train.standing import require_no_saves, standing_of


def resumed(config: Config, course: Course) -> dict[str, Any]:
    """Return the step and the path of the checkpoint that the run would resume from.

    In the returned dict, the entry "changed" lists the differences between this configuration and
    the configuration that wrote the checkpoint. The entry "says" is a text for the user: it names
    the checkpoint from which the run resumes, and the differences. If the run begins anew, "step"
    is 0 and "path" is None. Raise InputError if the run may not resume.
    """
    if config.adapt.adapts:
        _stand_on_base(config, course)
    own = Path(config.run.dir) / "checkpoints"
    wanted = config.checkpoint.resume
    existing = files.of_run(own)
    if wanted == "auto" and not existing:
        require_no_saves(config)
    if wanted == "never" or (wanted == "auto" and not existing):
        said = _begins_anew(config, own, len(existing))
        return {"step": 0, "path": None, "changed": [], "says": said}
    named = own if wanted == "auto" else Path(wanted)
    if wanted != "auto" and files.went_on_from(own, files.named(named)):
        named = own
    try:
        path = newest(named)
    except InputError as error:
        raise InputError(f"checkpoint.resume = {wanted}: {error}") from None
    manifest = sound_manifest(path)
    require_kinds(path, manifest, (*config.optimizer.moments, *config.data_parallel.kinds))
    course.judge("resume", path, manifest.said)
    step = manifest.progress.step
    changed = list(course.answer.changed)
    if step >= config.run.steps and named != own:
        raise InputError(
            f"checkpoint.resume = {wanted}: {step} steps are trained, and run.steps = "
            f"{config.run.steps}: nothing is left to do; legal: run.steps above {step}"
        )
    said = f"resumes after step {step} from {path}"
    if step >= config.run.steps:
        said = (
            f"has nothing to train: {path} has {counted(step, 'step')}; legal: run.steps above "
            f"{step}, or another run.name"
        )
    elif named == own and (over := standing_of(config, step).over):
        said = (
            f"is over, stopped early after step {step}: {over}; legal: a higher "
            "run.stop_after_worse, or 0, or another run.name"
        )
    if changed:
        said += f"; changed since: {', '.join(changed)}"
    if config.checkpoint.initial:
        said += "; checkpoint.initial is not used"
    return {"step": step, "path": str(path), "changed": changed, "says": said}


def _stand_on_base(config: Config, course: Course) -> None:
    """Raise the InputError that the run would raise if its adapters do not fit the base model."""
    path = Path(config.adapt.base)
    directory, base = base_at(path, LowBit.of(config.quantize))
    said = sound_manifest(directory).said
    course.stand_on(base, directory, said, known_tokenizer(path))


def _begins_anew(config: Config, own: Path, existing: int) -> str:
    """Return the text of the entry "says" for a run that begins at step 0. `own` is the folder of
    the run's checkpoints, and `existing` is the number of checkpoints in this folder. The run will
    move these checkpoints to another folder."""
    said = "begins anew"
    if existing:
        said += f"; the {counted(existing, 'checkpoint')} of {own} will be set aside"
    elif config.checkpoint.initial:
        said += f", from the weights of {newest(Path(config.checkpoint.initial))}"
    return said
