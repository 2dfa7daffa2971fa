"""`ptdmpi doctor --parity CONFIG`: a small model with the sublayers of a user."""

import contextlib
import io
from unittest.mock import patch

import pytest
import tomlkit
import torch

from ptdmpi.base.plugins import name_of
from ptdmpi.comm.wires import wire_named
from ptdmpi.comm.world import World
from ptdmpi.commands import doctor
from ptdmpi.config import InputError, SharedInputError
from ptdmpi.parity import own, probe, suite
from tests._own import Gain, Gained, gained
from tests._runs import configuration
from tests.parallel import parallel


class Backward(Gained):
    """Adds the values of the next position, which a causal model must not see."""

    def forward(self, x, context):
        following = torch.cat((x[1:], torch.zeros_like(x[:1])))
        return super().forward(x + following, context)


class Leaky(Gain):
    def module(self, build):
        return Backward(build.axis.size)

    def refuses(self, layout):
        return "it mixes positions; legal: parallel.context = 1" if layout.context > 1 else None


def leaky(build):
    """The sublayer `gained`, whose core also reads the next position."""
    sublayer = gained(build)
    first, *_ = (row for row in sublayer.operators if isinstance(row, Gain))
    wrong = Leaky(first.name, first.inputs, first.outputs, first.weight)
    operators = tuple(wrong if row is first else row for row in sublayer.operators)
    return type(sublayer)(sublayer.name, operators)


def tree(tmp_path, sublayer, **changes):
    names = ["attention", sublayer, "mlp"]
    return configuration(tmp_path, {"model.sublayers": names, **changes})


def test_the_compared_model_has_the_sublayers_norms_and_documents_of_the_user(tmp_path):
    changes = {"model.norm": "rmsnorm", "data.document_boundaries": True}
    model = own.model_of(tree(tmp_path, name_of(gained), **changes))
    assert model.documents and model.kind == "gpt"
    assert model.keys["norm"] == "rmsnorm" and model.keys["hidden"] == 32
    assert model.keys["sublayers"] == ("attention", name_of(gained), "mlp")
    rows = own.rows(model, ranks=8)
    layouts = [row.case.layout for row in rows.comparisons]
    assert layouts == list(own.LAYOUTS) and not rows.left_out
    assert {case.layout.context for case in rows.probes} == {1, 2}


def test_a_layout_that_an_operator_refuses_is_left_out_with_its_reason(tmp_path):
    rows = own.rows(own.model_of(tree(tmp_path, name_of(leaky))), ranks=2)
    assert len(rows.left_out) == 3
    assert rows.left_out[0].endswith("legal: parallel.context = 1")
    assert all(row.case.layout.context == 1 for row in rows.comparisons)


def test_a_configuration_without_sublayers_of_ones_own_is_refused(tmp_path):
    with pytest.raises(InputError, match="names no sublayer of your own"):
        own.model_of(configuration(tmp_path, {}))
    with pytest.raises(InputError, match="nothing:here cannot be imported"):
        own.rows(own.model_of(tree(tmp_path, "nothing:here")), ranks=1)


@parallel(ranks=[1])
def test_a_sublayer_that_sees_the_next_position_is_red(comm, tmp_path):
    lines = []
    for sublayer in (gained, leaky):
        model = own.model_of(tree(tmp_path, name_of(sublayer)))
        cases = own.rows(model, ranks=1).probes
        (probed,) = probe.run(World(comm), cases, wire=wire_named())
        lines.append(probed.faults)
    assert lines[0] == []
    assert lines[1][0].startswith("token 4 changes losses [2, 3, 4, 5,")


@parallel(ranks=[1])
def test_without_attention_a_token_may_change_fewer_losses(comm, tmp_path):
    for sublayer, right in ((gained, True), (leaky, False)):
        keys = {"model.sublayers": [name_of(sublayer), "mlp"]}
        cases = own.rows(own.model_of(configuration(tmp_path, keys)), ranks=1).probes
        (probed,) = probe.run(World(comm), cases, wire=wire_named())
        assert (not probed.faults) is right
    assert "and may change only [3, 4, 5" in probed.faults[0]


@pytest.mark.long
@parallel(ranks=[2])
def test_the_command_trains_and_probes_with_the_users_sublayer(comm, tmp_path):
    path = tmp_path / "config.toml"
    asked = {"short": True, "as_json": False, "config": path}
    with patch.object(suite, "SHORT_STEPS", 1):
        for sublayer, only, right in ((gained, "ring", True), (leaky, "perturbed", False)):
            if comm.rank == 0:
                path.write_text(tomlkit.dumps(tree(tmp_path, name_of(sublayer))))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                good = doctor.check_parity(World(comm), only=only, **asked)
            assert good is right
            lines = printed.getvalue().splitlines()
            assert comm.rank or len(lines) > 5
            if right and comm.rank == 0:
                assert lines[0] == f"{own.SECTION}:" and max(map(len, lines)) <= 120
        with pytest.raises(SharedInputError, match="none of the 4 rows contains it"):
            doctor.check_parity(World(comm), only="zb-h2", **asked)
