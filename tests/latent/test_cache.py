"""Generation with latent attention: its cache has latent vectors, and changes no token."""

import pytest
import torch

from ptdmpi.comm.world import World
from ptdmpi.generate.generator import Prompt, generate
from ptdmpi.generate.sampling import GREEDY
from ptdmpi.inference.model import InferenceModel, open_inference
from tests import _stored
from tests._rows import tensors
from tests.parallel import parallel

V, LENGTH = 51, 160
MODEL = {
    "kind": "deepseek",
    "head_size": 10,
    "rope_head_size": 4,
    "value_head_size": 6,
    "kv_lora_rank": 8,
    "ffn_hidden": 48,
    "seq_length": LENGTH,
}
CASES = {
    "direct": {},
    "compressed": {"q_lora_rank": 6},
    "values of whole heads": {"value_head_size": 10},
    "window": {"sliding_window": 3},
    "cap": {"attention_softcap": 0.5},
}
NEW = 6


def without_cache(model: InferenceModel, ids: list[int]) -> list[int]:
    """Return the most probable next tokens, each from the logits of the whole text."""
    text = list(ids)
    (stage,) = model.stages.values()
    for _ in range(NEW):
        x = model.hidden(torch.tensor(text)[:, None])
        text.append(int(stage.head(x)[-1, 0][:V].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("name", CASES)
def test_the_cache_changes_no_token(tmp_path, name):
    """Also after a prompt that is longer than a block of queries."""
    _stored.stored(tmp_path / "run", V, **MODEL | CASES[name])
    model, _ = open_inference(tmp_path / "run", World(), None, None)
    prompts = [[3, 1, 4, 1, 5], [9], [number % V for number in range(140)]]
    texts = generate(model, [Prompt(ids, NEW) for ids in prompts], GREEDY, ())
    for ids, text in zip(prompts, texts, strict=True):
        assert text.ids == without_cache(model, ids)


@parallel(ranks=[1, 2])
def test_the_cache_has_one_latent_vector_and_one_rotary_key_for_each_token(comm, tmp_path):
    """On every tensor rank, whatever the number of heads is."""
    if comm.rank == 0:
        _stored.stored(tmp_path / "run", V, **MODEL)
    comm.Barrier()
    model, _ = open_inference(tmp_path / "run", World(comm), f"t={comm.size}", None)
    rows, capacity = 3, 16
    cache = model.new_cache(rows, capacity)
    kept = [x for x in tensors(vars(cache)) if x.dtype == model.dtype and x.ndim == 3]
    layers = model.config.model.layers
    assert len(kept) == layers
    assert sum(x.numel() for x in kept) == layers * rows * capacity * (8 + 4)
