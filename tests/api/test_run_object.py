"""`ptdmpi.Run`: a program's own loop over a run, its hooks, and what it may call in between."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import tomlkit
import torch
from mpi4py import MPI

from ptdmpi.comm.world import World
from ptdmpi.config import InputError, SharedInputError, with_values
from ptdmpi.train.hooks import Hook, Hooks
from ptdmpi.train.run import Launch, Run
from ptdmpi.watch.requests import StopRequest
from tests._mpirun import mpirun
from tests._runs import configuration, corpus
from tests.parallel import parallel

LAYOUTS = {1: {}, 2: {"parallel.tensor": 2}, 4: {"parallel.tensor": 2, "parallel.pipeline": 2}}


class Noted(Hook):
    """Notes the calls, and keeps the number of steps that it has seen."""

    def __init__(self):
        self.calls = []
        self.seen = 0

    def step_ended(self, step):
        self.seen += 1
        self.calls.append(("step", step.number))

    def validated(self, step, values):
        self.calls.append(("validated", step, values["validation_loss"]))

    def saved(self, step, path):
        self.calls.append(("saved", step, path.name))

    def stopped(self, step, why):
        self.calls.append(("stopped", step, why))

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = state["seen"]


def made(comm, folder, changes, hooks=()):
    """The run on the ranks of a test's communicator."""
    if comm.rank == 0 and not (folder / "train").exists():
        corpus(folder)
    comm.Barrier()
    tree = configuration(folder, {**LAYOUTS[comm.size], **changes})
    return Run(tree, hooks=hooks, launch=Launch(World(comm), StopRequest()))


def losses(folder):
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if "loss" in record]


@parallel(ranks=[1, 4])
def test_a_loop_of_ones_own_trains_as_the_command(comm, tmp_path):
    steps = []
    for step in made(comm, tmp_path, {"run.steps": 4}):
        steps.append((step.number, step.result.loss))
    made(comm, tmp_path, {"run.steps": 4, "run.dir": str(tmp_path / "other/run")}).train()
    if comm.rank == 0:
        other = losses(tmp_path / "other")
        assert steps == list(enumerate(other, 1)) and losses(tmp_path) == other
        assert (tmp_path / "run/done").exists()


@pytest.mark.long
@parallel(ranks=[2])
def test_a_run_is_left_and_taken_up_again_with_the_state_of_its_hooks(comm, tmp_path):
    valid = {"run.steps": 5, "data.valid": str(tmp_path / "valid")}
    whole = [step.result.loss for step in made(comm, tmp_path, valid)]
    here = {**valid, "run.dir": str(tmp_path / "other/run")}
    noted = Noted()
    run = made(comm, tmp_path, here, [noted])
    for step in run:
        if step.number == 2:
            values = run.validate()
            assert run.validate() == values  # nothing is measured twice after a step
            path = run.save()
            assert run.save() == path and path.name.endswith("2")
        if step.number == 3:
            break
    assert noted.calls[:2] == [("step", 1), ("step", 2)]
    assert ("validated", 2, values["validation_loss"]) in noted.calls
    assert ("saved", 2, path.name) in noted.calls
    assert noted.calls[-1] == ("stopped", 3, "left before its last step")
    again = Noted()
    resumed = made(comm, tmp_path, here, [again])
    assert again.seen == 2 and resumed.step == 2
    rest = [step.result.loss for step in resumed]
    assert rest == whole[2:] and again.seen == 5
    assert again.calls[-1] == ("stopped", 5, "done")
    assert again.calls[-2][0] == "saved"


@parallel(ranks=[1, 2])
def test_a_run_has_one_loop(comm, tmp_path):
    """A second loop would train steps again, on weights that have been trained by them."""
    run = made(comm, tmp_path, {"run.steps": 4})
    steps = iter(run)
    assert next(steps).number == 1
    for again in (run.train, lambda: next(iter(run))):
        with pytest.raises(InputError, match="already iterated over; legal: one loop"):
            again()
    assert [step.number for step in steps] == [2, 3, 4]


@parallel(ranks=[1, 2])
def test_a_run_that_is_closed_in_its_loop_ends(comm, tmp_path):
    run, numbers = made(comm, tmp_path, {"run.steps": 4, "checkpoint.every_steps": 0}), []
    with pytest.raises(InputError, match=r"run\.close\(\) was called in the loop.*legal: break"):
        for step in run:
            numbers.append(step.number)
            run.close()
    assert numbers == [1]


@parallel(ranks=[1])
def test_a_loop_validates_and_saves_by_the_number_of_a_step(comm, tmp_path):
    noted = Noted()
    changes = {"run.steps": 4, "data.valid": str(tmp_path / "valid")}
    run = made(comm, tmp_path, changes, [noted])
    for step in run:
        if step.number % 2 == 0:
            run.validate()
            run.save()
    calls = [call[:2] for call in noted.calls if call[0] != "step"]
    expected = [(name, number) for number in (2, 4) for name in ("validated", "saved")]
    assert calls == [*expected, ("stopped", 4)]


@parallel(ranks=[2])
def test_model_state_and_axes_are_this_ranks(comm, tmp_path):
    run = made(comm, tmp_path, {"run.steps": 1})
    names = [name for name, _ in run.model["0"].named_parameters()]
    assert "layers.0.attention.qkv.weight" in names and run.axes["tensor"].size == 2
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    (step,) = run
    assert step.number == 1 and run.state.counters.updates == 1
    moved = [name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) > len(before) // 2


def test_two_hooks_of_one_name_are_refused(tmp_path):
    with pytest.raises(InputError, match="same name"):
        Hooks([Noted(), Noted()])


@pytest.mark.parametrize("hooks", [[Hook], [None], 5, "ab", [object()]])
def test_an_object_that_is_no_hook_is_refused(hooks):
    with pytest.raises(InputError, match=r"legal is a list of objects of ptdmpi\.Hook"):
        Hooks(hooks)


@pytest.mark.parametrize(
    ("method", "value", "legal"),
    [
        ("step_ended", lambda self: None, r"step_ended\(self, step\)"),
        ("validated", lambda self, step: None, r"validated\(self, step, values\)"),
        ("saved", lambda self, step, path, more: None, r"saved\(self, step, path\)"),
        ("stopped", lambda self, *, step, why: None, r"stopped\(self, step, why\)"),
        ("state", lambda self, step: None, r"state\(self\)"),
        ("state", {"loss": 3}, r"state\(self\)"),
        ("restore", lambda self: None, r"restore\(self, state\)"),
    ],
)
def test_a_hook_whose_method_takes_other_arguments_is_refused(method, value, legal):
    hook = type("Other", (Hook,), {method: value})()
    text = rf"hook Other: its {method} cannot be called \(.+\); legal: a method {legal}"
    with pytest.raises(InputError, match=text):
        Hooks([Noted(), hook])


class Keeping(Hook):
    """A hook whose state is an object that it changes later."""

    def __init__(self, kept):
        self.kept = kept

    def state(self):
        return self.kept


def test_the_state_of_a_hook_is_a_copy_as_a_file_returns_it():
    """The checksum of a manifest sorts keys, and a save in the background reads the state later."""
    kept = {2: [1], 10: None}
    states = Hooks([Keeping(kept)]).states()
    kept[2].append(5)
    assert states == {"Keeping": {"2": [1], "10": None}}


@pytest.mark.parametrize("state", [{1}, b"a", torch.ones(1), {"a": 10**5000}, {(1, 2): 3}])
def test_a_state_that_is_no_json_names_its_hook(state):
    with pytest.raises(InputError, match="the state of hook Keeping cannot be converted to JSON"):
        Hooks([Keeping(state)]).states()


def test_a_state_with_two_keys_of_one_text_is_refused():
    """The file would have both, and a resumed run the last."""
    with pytest.raises(InputError, match=r"hook Keeping .*: two keys of a dict are the text '1'; "):
        Hooks([Keeping([{"a": {1: 3, "1": 4}}])]).states()


@parallel(ranks=[1])
def test_a_run_that_has_ended_is_not_trained_again(comm, tmp_path):
    run = made(comm, tmp_path, {"run.steps": 1})
    run.train()
    with pytest.raises(InputError, match=r"this run has ended; legal: a new ptdmpi\.Run"):
        run.train()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((None,), "the configuration is None of the type NoneType; legal: the path of a TOML"),
        ((3,), "the configuration is 3 of the type int; legal"),
        (({3: 4},), "the configuration is .* of the type dict; legal"),
        (({}, 3), r"the settings are 3 of the type int; legal: a dictionary such as"),
        (({}, {3: 4}), "the settings are .* of the type dict; legal: a dictionary"),
        (
            ({}, {"run.steps": object()}),
            r"run\.steps = <object .*: Input should be a valid int",
        ),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(given, text):
    launch = Launch(World(MPI.COMM_SELF), StopRequest())
    with pytest.raises(InputError, match=text):
        Run(*given, launch=launch)
    with pytest.raises(InputError, match="launch is of the type int; legal: a Launch"):
        Run({}, launch=3)


@parallel(ranks=[3])
def test_arguments_that_differ_between_ranks_are_refused(comm):
    """Each rank would train with those of rank 0, and say nothing."""
    launch = Launch(World(comm), StopRequest())
    same = [{"run": {"steps": 2}}, {"run.steps": 2, "run.seed": 1}, {}]
    for name, place, other in (
        ("configuration", 0, {"run": {"steps": 3}}),
        ("settings", 1, {"run.steps": 3}),
        ("loss, data or optimizer", 2, {"loss": losses}),
        ("hooks", 2, {"hooks": [Noted()]}),
    ):
        given = list(same)
        if comm.rank == 1:
            given[place] = other
        elif comm.rank == 2:  # the order of keys does not matter
            given[1] = dict(reversed(given[1].items()))
        text = f"Run has another {name} on rank 1 than on rank 0; legal: the same"
        if name.endswith("s"):
            text = text.replace("another", "other")
        with pytest.raises(SharedInputError, match=text):
            Run(*given[:2], launch=launch, **given[2])


@parallel(ranks=[1])
def test_a_run_in_another_thread_is_refused(comm, tmp_path):
    """Python handles signals only in the main thread, and only its errors end all ranks."""
    run = made(comm, tmp_path, {"run.steps": 1})
    run._owns_launch = True
    with ThreadPoolExecutor(1) as pool:
        for call in (run.train, partial(Run, "config.toml")):
            with pytest.raises(InputError, match=r"outside the main thread.*; legal: the main"):
                pool.submit(call).result()
    run._owns_launch = False
    run.train()


class Ends(Hook):
    """A hook that ends the program, whatever it is asked."""

    def _end(self, *given):
        sys.exit(0)

    step_ended = validated = saved = stopped = state = restore = _end


@pytest.mark.parametrize(
    "call",
    [
        lambda hooks: hooks.step_ended(None),
        lambda hooks: hooks.validated(1, {}),
        lambda hooks: hooks.saved(1, None),
        lambda hooks: hooks.stopped(1, "done"),
        lambda hooks: hooks.states(),
        lambda hooks: hooks.restore({"Ends": 1}),
    ],
)
def test_a_hook_that_ends_the_program_is_refused(call):
    """Its rank would end with code 0, and the others would wait for it."""
    with pytest.raises(InputError, match="hook Ends ends the program"):
        call(Hooks([Ends()]))


PROGRAM = """
import sys
import ptdmpi
run = ptdmpi.Run(sys.argv[1], {{"run.steps": 3}})
for step in run:
    {body}
print("ended", run.step, run.axes.world.rank)
"""
AS_IT_IS = "pass"
FAILS_ON_ONE_RANK = "assert run.axes.world.rank == 0, 'a mistake of mine'"
# torch.distributed has an excepthook of its own, which holds back what ours prints
FAILS_OVER_TORCH = f"""import torch.distributed, ptdmpi.comm.c10d
    torch.distributed.init_process_group("ptdmpi")
    {FAILS_ON_ONE_RANK}"""


def program(folder, body, ranks, **changes):
    """Run a program of its own loop under mpirun; return the finished process."""
    corpus(folder)
    config = folder / "config.toml"
    tree = configuration(folder, {**LAYOUTS[ranks], **changes})
    config.write_text(tomlkit.dumps(tree))
    script = folder / "program.py"
    script.write_text(PROGRAM.format(body=body))
    return mpirun(ranks, [str(script), str(config)], timeout_s=60, check=False)


@pytest.mark.long
def test_a_program_trains_under_mpirun(tmp_path):
    done = program(tmp_path, AS_IT_IS, 2)
    assert done.returncode == 0, done.stderr
    ends = sorted(line for line in done.stdout.splitlines() if line.startswith("ended"))
    assert ends == ["ended 3 0", "ended 3 1"]


@pytest.mark.long
@pytest.mark.parametrize("body", [FAILS_ON_ONE_RANK, FAILS_OVER_TORCH], ids=["plain", "torch"])
def test_a_mistake_of_one_rank_ends_all(tmp_path, body):
    done = program(tmp_path, body, 2)
    assert done.returncode == 1
    assert "a mistake of mine" in done.stderr and "[rank 1 on " in done.stderr


@pytest.mark.long
def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    done = program(tmp_path, AS_IT_IS, 2, **{"model.heads": 3})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "ptdmpi: error: " in done.stderr and "heads" in done.stderr


@pytest.mark.long
def test_signals_are_handled_as_before_after_a_run(tmp_path):
    """Ctrl-C ends the program again once the run has ended."""
    usual = "signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    body = f"import signal; assert not {usual}\nassert {usual}"
    body = body.replace("\nassert", "\nimport signal\nassert")
    done = program(tmp_path, body, 1)
    assert done.returncode == 0, done.stderr


def test_the_package_is_light_until_something_is_used():
    """Importing it loads neither torch nor MPI, nor does planning."""
    code = (
        "import sys, ptdmpi; ptdmpi.plan(model='gpt3-125m', cluster='selene', ranks=8); "
        # the first call has imported the package of the same name
        "ptdmpi.plan('gpt3-125m', 'selene', ranks=8); "
        "print({'torch', 'mpi4py.MPI', 'h5py'} & set(sys.modules), dir(ptdmpi))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("set() ") and "'Run'" in done.stdout


def test_a_name_that_is_not_there_is_an_attribute_error():
    import ptdmpi

    with pytest.raises(AttributeError, match="no attribute 'train_fast'"):
        getattr(ptdmpi, "train_" + "fast")
    for name in ptdmpi.__all__:
        assert getattr(ptdmpi, name).__doc__


def test_settings_name_keys_of_sections():
    tree = with_values({"run": {"steps": 1, "name": "a"}}, {"run.steps": 2, "run.name": None})
    assert tree == {"run": {"steps": 2}}
    assert with_values({}, {"log.every_steps": 5}) == {"log": {"every_steps": 5}}
    for key in ("steps", "run.", ""):
        with pytest.raises(InputError, match="is not a key; write"):
            with_values({}, {key: 1})
