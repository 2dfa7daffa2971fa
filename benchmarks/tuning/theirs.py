"""Training of the same adapters with `peft` and `transformers`, from the same initial weights.

    python -m benchmarks.tuning.theirs begin HF FOLDER RANK ALPHA
    python -m benchmarks.tuning.theirs train RUN HF BEGIN MERGED

`begin` writes new adapters for all linear layers of the model directory HF into FOLDER. `train`
trains the adapters, starting from BEGIN, on the data and with the learning rates of RUN, a complete
training run on one rank. `train` prints JSON with the losses and with the greatest differences of
logits: between RUN and MERGED for each data type, between RUN in float32 and in float64, and
between RUN and the model that `peft` has trained.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptdmpi.comm import launch
from ptdmpi.model.batch import Microbatch

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model_of(path: Path) -> Any:
    """Return the model at `path` in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )


def begin(path: Path, folder: Path, rank: int, alpha: float) -> None:
    """Write adapters with the initial values of `peft`: A is random, and B is zero."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=LINEARS, task_type="CAUSAL_LM"
    )
    peft.get_peft_model(model_of(path), config).save_pretrained(folder)


def seen(batch: Microbatch) -> dict[str, Tensor]:
    """Return a microbatch as arguments for a model of `transformers`: ids [rows, tokens]. If a row
    may have several documents, also return positions, and a mask [rows, 1, queries, keys] of the
    keys that each query attends to."""
    ids = batch.inputs.t()
    if batch.documents is None:
        return {"input_ids": ids}
    numbers = batch.documents.numbers
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return {
        "input_ids": ids,
        "position_ids": batch.documents.positions.t(),
        "attention_mask": same & torch.ones(same.shape[-2:], dtype=torch.bool).tril(),
    }


def loss_of(model: Any, batch: Microbatch) -> Tensor:
    """Return the sum of a microbatch's losses, weighted by the label weights."""
    logits = model(**seen(batch)).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.t().flatten(), reduction="none"
    )
    if batch.weights is None:
        return losses.sum()
    return (losses * batch.weights.t().flatten()).sum()


def stepped(
    model: Any, config: Any, batches: list[list[Microbatch]], rates: list[float]
) -> list[float]:
    """Train the adapters of `model` with AdamW on the batches, with one learning rate per step, and
    return the loss of each step."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    own = config.optimizer
    optimizer = torch.optim.AdamW(
        trained, betas=(own.beta1, own.beta2), eps=own.eps, weight_decay=own.weight_decay
    )
    losses = []
    for step, rate in zip(batches, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        tokens = sum(batch.tokens for batch in step)
        total = 0.0
        for batch in step:
            loss = loss_of(model, batch) / tokens
            loss.backward()
            total += float(loss.detach())
        if own.clip_norm:
            torch.nn.utils.clip_grad_norm_(trained, own.clip_norm)
        optimizer.step()
        losses.append(total)
    return losses


def apart(values: Tensor, reference: Tensor) -> float:
    """Return the greatest difference of two tensors, relative to the greatest magnitude of
    `reference`."""
    return float((values - reference).abs().max() / reference.abs().max())


def train(run: Path, path: Path, begun: Path, merged: Path) -> dict[str, Any]:
    """Train the adapters in `begun` with `peft`, on the data and with the learning rates of the run
    `run`. Return the losses, and the differences of logits that the docstring of this module lists.
    `merged` is the merged model."""
    import peft

    from ptdmpi.comm.world import World
    from ptdmpi.config import load, resolve
    from ptdmpi.inference.model import open_inference
    from ptdmpi.plan.layout.grid import grid_of
    from ptdmpi.train.feed import Feed

    world = World()
    torch.set_num_threads(1)
    config = resolve(load(run / "config.toml"), 1)
    feed = Feed(config, world.split(grid_of(config)), torch.device("cpu"))
    with contextlib.closing(feed.steps(0)) as steps:
        batches = [feed.place(next(steps)) for _ in range(config.run.steps)]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [record["learning_rate"] for record in records if "loss" in record]

    def logits(precision: str, path: Path, adapter: Path | None) -> Tensor:
        """Return ptdmpi's logits [tokens, vocabulary] for the tokens of the first row, computed in
        the data type `precision` by the model at `path`, with the adapters `adapter` if they are
        given."""
        opened, _ = open_inference(path, world, None, precision, adapter=adapter)
        with torch.no_grad():
            (stage,) = opened.stages.values()
            return stage.heads(opened.hidden(ids))[0][:, 0, : feed.vocab_size].double()

    ids = batches[0][0].inputs[:, :1]
    base = Path(config.adapt.base)
    adapted = {kind: logits(kind, base, run) for kind in ("fp32", "fp64")}
    whole = {kind: logits(kind, merged, None) for kind in adapted}
    model = peft.PeftModel.from_pretrained(model_of(path), str(begun), is_trainable=True)
    model.eval()
    losses = stepped(model, config, batches, rates)
    with torch.no_grad():
        own = model(input_ids=ids.t()).logits[0]
    return {
        "losses": losses,
        "merged": {kind: apart(whole[kind], adapted[kind]) for kind in adapted},
        "rounding": apart(adapted["fp32"], adapted["fp64"]),
        "theirs": apart(adapted["fp32"], own.double()),
    }


def main() -> None:
    """Run `begin` or `train`; the command line says which."""
    doing, *words = sys.argv[1:]
    paths = [Path(word) for word in words[:4]]
    if doing == "begin":
        begin(paths[0], paths[1], int(words[2]), float(words[3]))
        return
    launch.prepare()
    print(json.dumps(train(*paths)))


if __name__ == "__main__":
    main()
