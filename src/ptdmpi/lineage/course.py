"""The course of a run (`Course`): the training data for the next steps of the run, and the manifest
entries that describe the run's data in its checkpoints.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ptdmpi.config import Config, InputError
from ptdmpi.data.order import SampleOrder
from ptdmpi.lineage.adapted import Adapted, Base, judge_adapted, require_kind
from ptdmpi.lineage.judge import Answer, Before, judge, judge_base, settings
from ptdmpi.lineage.trained_on import TrainedOn


class Course:
    """The training data for the next steps of one run. `now` describes the training data that a new
    run with the same configuration would have. The course uses `now` until its method `judge`
    switches to the data of a checkpoint."""

    def __init__(self, config: Config, now: TrainedOn) -> None:
        self.config = config
        self.now = now
        # the settings are read now, because the files that they name may be edited later
        self.settings = settings(config)
        self.answer = Answer(now)
        self.base: Base | None = None  # The frozen base model of adapters.
        # kind of operation -> names of the chosen kernels; empty until kernels are chosen
        self.kernels: Mapping[str, Sequence[str]] = {}
        # names of the arithmetics of the ranks' processors, which determine the last bits of
        # results (see `train.records.arithmetic`); empty until they are known
        self.arithmetic: Sequence[str] = []
        self._order: SampleOrder | None = None

    def judge(
        self, kind: Literal["resume", "initial"], path: Path, manifest: Mapping[str, Any]
    ) -> None:
        """Continue with the data on which the checkpoint at `path` was trained. Raise InputError,
        on every rank, if this run may not resume from the checkpoint (`kind` "resume") or begin
        with the checkpoint's weights (`kind` "initial")."""
        if self.base is not None:
            judge_adapted(path, manifest, self.config.adapt, self.base)
        if kind == "resume":
            kept = manifest.get("kernels", {})
            # a checkpoint of an older version of ptdmpi has only a list of attention kernels
            self.kernels = kept if isinstance(kept, Mapping) else {"attention": kept}
            names = manifest.get("arithmetic")
            self.arithmetic = [str(name) for name in names] if isinstance(names, list) else []
        self.go_on(judge(kind, Before.of(path, manifest), self.config, self.now))

    def go_on(self, answer: Answer) -> None:
        """Continue with the data that `answer` describes. `answer` is a result of the function
        `judge`, which this rank or another rank has called."""
        self.answer = answer
        self._order = None

    def stand_on(
        self, base: Base, path: Path, manifest: Mapping[str, Any], tokenizer_sha256: str | None
    ) -> None:
        """Use the model at `path` as the frozen base model of the adapters. Raise InputError if the
        checkpoint at `path` contains only adapters, if the model's tokenizer differs from the
        tokenizer of the data, or if the model's configuration does not fit.
        """
        require_kind(path, manifest)
        before = Before.of(path, manifest)
        judge_base(before, self.config, self.now)
        if before.trained_on is None:
            self.require_tokenizer(path, tokenizer_sha256)
        self.base = base

    def require_tokenizer(self, path: Path, sha256: str | None) -> None:
        """Raise InputError if the weights at `path` have another tokenizer than the data. `sha256`
        is the hash of the weights' tokenizer. If `sha256` is None, this tokenizer is unknown, and
        nothing is checked."""
        if sha256 not in (None, self.now.tokenizer_sha256):
            raise InputError(
                f"{path} has a tokenizer of sha256 {sha256[:12]}, the shards were made with "
                f"{self.now.tokenizer} (sha256 {self.now.tokenizer_sha256[:12]}), so every token "
                "id would mean another text; legal: shards made with the tokenizer of the weights"
            )

    @property
    def trained_on(self) -> TrainedOn:
        """Return a description of the data of the next steps and of all earlier steps."""
        return self.answer.trained_on

    @property
    def order(self) -> SampleOrder:
        """Return the order of the samples for the next step of the run and for all later steps."""
        if self._order is None:
            last = self.trained_on.last
            self._order = last.order([part.epochs for part in self.config.data.train])
        return self._order

    def check(self) -> None:
        """Raise InputError if the run would use a dataset for more epochs than its `epochs`
        allows."""
        self.order.check(self.samples(self.config.run.steps))

    def samples(self, step: int) -> int:
        """Return the number of samples consumed after `step` steps."""
        return self.trained_on.last.samples_after(step)

    def tokens(self, step: int) -> int:
        """Return the number of tokens trained on after `step` steps."""
        return self.trained_on.last.tokens_after(step)

    def drawn(self, step: int) -> dict[str, list[float]]:
        """Return a dict with two lists: the numbers of samples ("samples_drawn") and of epochs
        ("epochs") that were used after `step` steps. Each list has one number for each dataset that
        the run has seen."""
        sources = self.trained_on.last.drawn(self.order, step)
        return {
            "samples_drawn": [source.drawn for source in sources],
            "epochs": [source.drawn / source.samples for source in sources],
        }

    def in_manifest(self) -> dict[str, Any]:
        """Return the entries about the run for the manifest of a checkpoint."""
        method = self.config.data_parallel.method
        adapted: dict[str, Any] = {}
        if self.base is not None:
            adapted = Adapted(self.config.adapt, self.base, self.config.task).in_manifest()
        return {
            **adapted,
            "trained_on": self.trained_on.as_json(),
            "settings": self.settings,
            "kernels": {kind: list(ways) for kind, ways in self.kernels.items()},
            "arithmetic": list(self.arithmetic),
            "data_parallel": {"method": method, "replicas": self.config.data_size},
        }
