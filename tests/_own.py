"""Losses, an optimizer and a dataset as a user would write them, importable by their names."""

import os
from dataclasses import dataclass

import numpy as np
import torch

from ptdmpi.model.parameters import Split, declare
from ptdmpi.plan.layer.account import Item, MemoryPass
from ptdmpi.plan.layer.operator import OwnOperator
from ptdmpi.plan.layer.parts import Linear, Scale
from tests._runs import VOCAB_SIZE

WIDTH = 16


def plain(inputs):
    """The cross-entropy, from the parts that a loss may use."""
    return inputs.of_tokens(-inputs.log_probabilities())


def even(inputs):
    """The cross-entropy of the labels whose id is even; other labels do not count."""
    counts = (inputs.batch.labels % 2 == 0).double()
    if inputs.batch.weights is not None:
        counts = counts * inputs.batch.weights
    losses = -inputs.log_probabilities() * counts
    return losses.sum(), counts.sum()


def smoothed(inputs):
    """Label smoothing, which reads every logit: padded columns may not be among them."""
    logs = inputs.log_softmax()
    mean = inputs.sum_over_vocabulary(logs.sum(-1)) / inputs.vocab_size
    return inputs.of_tokens(-0.9 * inputs.log_probabilities(logs) - 0.1 * mean)


def squared(inputs):
    """A loss of sequences: the square of the sequence's log-probability."""
    return inputs.of_sequences(inputs.sum_over_sequence(inputs.log_probabilities()) ** 2)


def several(inputs):
    """A loss of four ids at each position and of all columns of the vocabulary."""
    labels = inputs.batch.labels
    ids = (labels[..., None] + torch.tensor([0, 1, 7, 30])) % inputs.vocab_size
    logs = inputs.log_softmax()
    every = inputs.gather(logs)
    given = inputs.log_probabilities(logs, ids)
    difference = (inputs.log_probabilities(ids=ids[..., 1]) - every.gather(-1, ids)[..., 1]).abs()
    assert every.shape[-1] == inputs.vocab_size and difference.max() < 1e-9
    weights = torch.linspace(0.5, 1.5, inputs.vocab_size)
    shares = torch.tensor([0.6, 0.2, 0.1, 0.1])
    return inputs.of_tokens(every.exp() ** 2 @ weights.to(every) - given @ shares.to(given))


@dataclass(frozen=True)
class Gain(OwnOperator):
    """[s, b, WIDTH / t] -> the same: a gain for each channel, and SiLU."""

    weight: Scale

    def parts(self):
        return {self.name: self.weight}

    def module(self, build):
        return Gained(build.axis.size)

    def forward(self, sizes):
        yield MemoryPass(3 * self._elements(sizes) * sizes.compute_bytes)

    def backward(self, sizes):
        yield MemoryPass(4 * self._elements(sizes) * sizes.compute_bytes)

    def kept(self, sizes, mode):
        yield Item(f"{self.name}.input", 2 * self._elements(sizes), sizes.compute_bytes)

    def operands(self, sizes):
        yield Item(f"{self.name}.weight", sizes.share(WIDTH), sizes.compute_bytes)

    def _elements(self, sizes):
        return sizes.tokens * sizes.share(WIDTH)


class Gained(torch.nn.Module):
    """The module of `Gain`."""

    def __init__(self, tensor):
        super().__init__()
        self.weight = declare(tensor, (WIDTH,), 0.5, split=Split(0, (WIDTH,)))

    def forward(self, x, context):
        return torch.nn.functional.silu(x * self.weight)


def gained(build):
    """A sublayer with a parameter of its own between two linears."""
    model = build.model
    down = Linear(model.hidden, (WIDTH,), bias=False, init_std=0.2, split="columns")
    up = Linear(WIDTH, (model.hidden,), bias=False, init_std=0.2, split="rows")
    return build.sublayer(
        "gained",
        4,
        build.product("gained.down", down, "y", "y"),
        Gain("gained.core", ("y",), ("y",), Scale(WIDTH, trains=not model.adapt.adapts)),
        build.product("gained.up", up, "y", "y"),
    )


class Momentum:
    """SGD with momentum, as torch.optim.SGD computes it."""

    moments = ("own_momentum",)

    @staticmethod
    def update(config, group, rate, updates):
        parts = (group.masters, group.gradients, group.moments[0])
        for weights, gradients, momentum in zip(*parts, strict=True):
            momentum.mul_(config.momentum).add_(gradients + group.decay * weights)
            weights.add_(momentum, alpha=-rate)


class Counting:
    """Sequences that count upward by a step of their own; the last label has no weight."""

    vocab_size = VOCAB_SIZE

    def __init__(self, seq_length):
        self.seq_length = seq_length

    def __len__(self):
        return 60

    def sample(self, number):
        ids = (number + np.arange(self.seq_length + 1) * (1 + number % 3)) % VOCAB_SIZE
        weights = np.ones(self.seq_length)
        weights[-1] = 0.0
        return ids, weights


class Short(Counting):
    def sample(self, number):
        return [1, 2, 3]


class Given:
    """A dataset whose parts a test replaces."""

    vocab_size = VOCAB_SIZE
    length = 5
    given = (1,) * 17

    def __init__(self, seq_length):
        pass

    def __len__(self):
        return self.length

    def sample(self, number):
        return self.given


class Ends(Given):
    """A dataset that ends the program, at once or in its samples."""

    in_sample = True

    def __init__(self, seq_length):
        os.chdir("/")
        if not self.in_sample:
            raise SystemExit(0)

    def sample(self, number):
        raise SystemExit(0)


class Ending(Momentum):
    @staticmethod
    def update(config, group, rate, updates):
        raise SystemExit(75)


class Resizing(Momentum):
    @staticmethod
    def update(config, group, rate, updates):
        group.masters[0].resize_(3)


class Reallocating(Momentum):
    @staticmethod
    def update(config, group, rate, updates):
        group.moments[0][0].data = group.moments[0][0].clone()


class Replacing(Momentum):
    @staticmethod
    def update(config, group, rate, updates):
        group.masters[0] = group.masters[0] - rate * group.gradients[0]


class Dropping(Momentum):
    @staticmethod
    def update(config, group, rate, updates):
        group.gradients.pop()


class UpdatedAlone(Momentum):
    @staticmethod
    def update(group):
        pass


class UpdatedAsObject(Momentum):
    def update(self, config, group, rate, updates):
        pass


class UpdatedByText(Momentum):
    update = "x"


class NumberedMoments(Momentum):
    moments = 3


class RepeatedMoments(Momentum):
    moments = ("a", "a")


class MomentsOfWeights(Momentum):
    moments = ("weights",)


class MomentsOfPaths(Momentum):
    moments = ("../a",)


def only_sum(inputs):
    return -inputs.log_probabilities().sum()


def huge(inputs):
    """A count that float64 cannot hold."""
    return inputs.logits.sum(), 10**400


def negative(inputs):
    return inputs.logits.sum(), -1


def immense(inputs):
    return inputs.logits.sum(), 1e300


def tiny(inputs):
    return inputs.logits.sum(), torch.tensor(1e-300, dtype=torch.float64)


def no_number(inputs):
    return inputs.logits.sum(), float("nan")


def some_tokens(inputs):
    return inputs.of_tokens(-inputs.log_probabilities()[:3])


def no_tokens(inputs):
    return inputs.of_tokens(5)


def tokens_as_sequences(inputs):
    return inputs.of_sequences(-inputs.log_probabilities())


def number_of_sequences(inputs):
    return inputs.of_sequences(1.5)


def endless(inputs):
    return inputs.logits.sum(), inputs.logits.detach().new_tensor(float("inf"))


def elsewhere(inputs):
    return inputs.logits.sum().to("meta"), 1


def counted_twice(inputs):
    return inputs.logits.sum(), inputs.logits.sum(0).detach()


def ends(inputs):
    raise SystemExit(0)


def words(inputs):
    return "sum", "count"


def of_shape(inputs):
    return -inputs.log_probabilities(), 1


def detached(inputs):
    return -inputs.log_probabilities().sum().detach(), 1


def many(inputs):
    """A count that float16 cannot hold."""
    return -inputs.log_probabilities().sum(), 1e5


def many_in_half(inputs):
    return -inputs.log_probabilities().sum().half(), 1e5


def counts_none(inputs):
    return inputs.log_probabilities().sum() * 0.0, 0
