"""May a run go on with what it is given now? One answer for every kind of start.

The same as before; or refused, in one line that says what, where, and what is legal; or changed by
name (`data.change = "from here"`), and then said.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from ptdmpi.config import Config, InputError, ModelConfig
from ptdmpi.config.section import OnResume
from ptdmpi.lineage.trained_on import Source, Stretch, TrainedOn, changed_at
from ptdmpi.plan.layout.topology import file_sha256

# keys of [model] that may change between one start of a run and the next
FREE_TO_CHANGE = {
    key for key in ModelConfig.model_fields if ModelConfig.on_resume(key) is not OnResume.BOUND
}
# without these the tensors of a checkpoint, whose shapes fit, are another function
HEADS = ("heads", "kv_heads", "head_size")
# beneath adapters besides: a name for other keys, what shapes say, and how long texts are
FREE_BENEATH = FREE_TO_CHANGE | {"kind", "vocab_size", "seq_length"}
# what `Config.with_head` sets: a head for a task, which trains, stands in place of the base's own
NEW_HEAD = {"output_head", "classes", "tie_embeddings", "sentence_order"}
FROM_HERE = "from here"
# Keys whose values a checkpoint records. Those that fix the order of samples are judged by the
# stretches of `TrainedOn` instead, which know the data by their content.
RECORDED = (OnResume.BOUND, OnResume.REPORTED)


@dataclass(frozen=True)
class Before:
    """A checkpoint as its manifest has it. `trained_on` None: an older version wrote it, and what
    it was trained on is not known beyond `samples` and `seed`."""

    path: Path
    step: int
    samples: int
    seed: int
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    trained_on: TrainedOn | None

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> "Before":
        """Raises InputError where the manifest says what no version of this program writes."""
        progress = manifest["progress"]
        numbers = (progress["step"], progress["samples"], progress["seed"])
        try:
            trained_on = TrainedOn.from_json(manifest.get("trained_on"))
        except ValueError as error:
            raise InputError(f"checkpoint {path}: {error}") from None
        return cls(path, *numbers, manifest["model"], manifest.get("settings", {}), trained_on)


@dataclass(frozen=True)
class Answer:
    """With what a run goes on: `changed` says what is other than before, data first, one text each;
    `note` what is not known."""

    trained_on: TrainedOn
    changed: tuple[str, ...] = ()
    note: str = ""


def settings(config: Config) -> dict[str, Any]:
    """Return what a checkpoint records of the configuration: `section.key` -> value as JSON, of
    every key that is bound or reported on resume. Raises InputError where a file that is named
    there is gone."""
    recorded: dict[str, Any] = {}
    for name, section in Config.sections().items():
        table = getattr(config, name).model_dump(mode="json")
        for key, value in table.items():
            if section.on_resume(key) in RECORDED:
                recorded[f"{name}.{key}"] = value
    graph = file_sha256(config.data_parallel)
    if graph is not None:  # a file is edited under the name that it has
        recorded["data_parallel.topology sha256"] = graph[:12]
    return recorded


def judge(
    kind: Literal["resume", "initial"], before: Before, config: Config, now: TrainedOn
) -> Answer:
    """Whether a run may go on from, or begin with the weights of, the checkpoint `before`, when it
    is given `config` and the data of `now` (as of a run that begins). Raises InputError."""
    _require_same_tokenizer(before, now)
    if kind == "resume":
        begin = ", or another run.dir with checkpoint.initial to begin from its weights"
        _require_same_model(before, config, _keys_without(FREE_TO_CHANGE), begin)
        _require_same_settings(before, config)
    else:
        _require_same_model(before, config, HEADS)
    told = tuple(_told(before, config))
    if kind == "initial":
        told = tuple(text for text in told if text.startswith("model."))
        return Answer(now, told, "" if before.trained_on else _unknown(before))
    known = before.trained_on or _as_far_as_known(before, now)
    differences = list(_differences(known.last, now.last))
    if not differences:
        return Answer(known, told, "" if before.trained_on else _unknown(before))
    if config.data.change != FROM_HERE:
        raise InputError(
            f"{before.path}: {'; '.join(differences)}: samples would be skipped or seen twice; "
            f'legal: what was before, or data.change = "{FROM_HERE}"'
        )
    return Answer(changed_at(known, now, before.step), (*differences, *told))


def judge_base(before: Before, config: Config, now: TrainedOn) -> None:
    """Raises InputError if adapters that are trained on the data of `now` cannot stand on the
    weights of `before`: they would train beside another function of these than `generate`,
    `evaluate` and `adapter merge` put them beside, who take the shape of the base."""
    _require_same_tokenizer(before, now)
    free = FREE_BENEATH if config.task.kind == "none" else FREE_BENEATH | NEW_HEAD
    _require_same_model(before, config, _keys_without(free))


def _require_same_tokenizer(before: Before, now: TrainedOn) -> None:
    known = before.trained_on
    if known is not None and known.tokenizer_sha256 != now.tokenizer_sha256:
        raise InputError(
            f"checkpoint {before.path}: it was trained with tokenizer {known.tokenizer} (sha256 "
            f"{known.tokenizer_sha256[:12]}), {now.last.sources[0].path} was made with "
            f"{now.tokenizer} (sha256 {now.tokenizer_sha256[:12]}): every id would mean another "
            "text; legal: shards made with the tokenizer of before"
        )


def _keys_without(free: Set[str]) -> list[str]:
    """Keys of [model], in their order."""
    return [key for key in ModelConfig.model_fields if key not in free]


def _require_same_model(
    before: Before, config: Config, keys: Iterable[str], otherwise: str = ""
) -> None:
    """The shapes fit; but other heads or another activation make another function of them.
    `otherwise`: what is legal besides, of other keys than the heads."""
    here = config.model.model_dump()
    # a key that an older checkpoint lacks had the value that it has by default
    known = ModelConfig.model_validate(before.model).model_dump() if before.model else {}
    for key in keys:
        stored = known.get(key, here[key])
        if stored != here[key]:
            raise InputError(
                f"checkpoint {before.path}: it was trained with model.{key} = {stored}, this run "
                f"has {here[key]}; legal: the value of before{'' if key in HEADS else otherwise}"
            )


def _require_same_settings(before: Before, config: Config) -> None:
    """Raise InputError if a bound key outside [model] has another value than in the checkpoint. A
    checkpoint of an older version may not have recorded the key: then nothing is known of it."""
    now = settings(config)
    for name, section in Config.sections().items():
        for key in section.model_fields:
            full = f"{name}.{key}"
            bound = name != "model" and section.on_resume(key) is OnResume.BOUND
            if bound and full in before.settings and before.settings[full] != now[full]:
                raise InputError(
                    f"checkpoint {before.path}: it was trained with {full} = "
                    f"{before.settings[full]}, this run has {now[full]}; legal: the value of before"
                )


def _told(before: Before, config: Config) -> Iterator[str]:
    """Yield the recorded settings that have changed, one text each; of a checkpoint of an older
    version, those of the model."""
    old = {f"model.{key}": value for key, value in before.model.items()} | dict(before.settings)
    for key, value in settings(config).items():
        if key in old and old[key] != value:
            yield f"{key} {old[key]} -> {value}"


def _unknown(before: Before) -> str:
    return f"what {before.path} was trained on is not known: an older version wrote it"


def _as_far_as_known(before: Before, now: TrainedOn) -> TrainedOn:
    """The data of now, with the seed and the batch of a checkpoint that says no more."""
    size = before.samples // before.step if before.step else now.last.global_size
    return replace(now, stretches=(replace(now.last, seed=before.seed, global_size=size),))


def _differences(old: Stretch, new: Stretch) -> Iterator[str]:
    """What makes another order of samples, one text each."""
    if old.seed != new.seed:
        yield f"run.seed {old.seed} -> {new.seed}"
    if old.global_size != new.global_size:
        yield f"batch.global_size {old.global_size} -> {new.global_size}"
    if old.ranks != new.ranks:
        yield f"data.train {_dealt(old)} -> {_dealt(new)}"
    if _shares(old.sources) != _shares(new.sources):
        yield f"data.train {_mixture(old.sources)} -> {_mixture(new.sources)}"


def _dealt(stretch: Stretch) -> str:
    if stretch.ranks == 1:
        return "drawn from by all data ranks"
    return f'dealt to {stretch.ranks} data ranks (data.split = "by_rank")'


def _shares(sources: tuple[Source, ...]) -> list[tuple[str, Fraction]]:
    """Weights count by what they are of their sum."""
    total = sum(Fraction(one.weight) for one in sources)
    return [(one.sha256, Fraction(one.weight) / total) for one in sources]


def _mixture(sources: tuple[Source, ...]) -> str:
    return " + ".join(
        f"{one.path} ({one.sha256[:8]}{f', weight {one.weight}' if len(sources) > 1 else ''})"
        for one in sources
    )
