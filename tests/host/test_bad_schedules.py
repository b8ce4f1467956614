"""Whatever a schedule, a machine, an option or a file says, what comes back is a schedule, a proof, or an error that names what is wrong: no
traceback, no hang, no memory for a number that somebody claims."""

import copy
import json
import random
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cuk import cli
from cuk.counters import assemble
from cuk.machine import Machine
from cuk.program import Program
from cuk.programs import chain, llama
from cuk.schedule import Schedule
from cuk.schedule_file import FINGERPRINT, HEADER
from cuk.schedulers import SCHEDULERS, balanced, dynamic, round_robin, waves
from cuk.simulate import estimate_us, simulate
from cuk.target import fingerprint
from cuk.validate import Refused, validate
from tests.toys import H200, machine, with_queues

PROGRAM, TARGET = chain([(64, 32), (32, 64)], layers=2), machine(3)
NASTY = (None, True, False, -1, 0, 0.5, 2**31, 2**31 - 1, 2**63, 10**30, -(2**70), 1e308, "", "x", "\u0000", "\ud800", "\x1b[31m", "模型", "a" * 5000,
         [], [[]], [None], {}, {"a": 1}, [[[[[[]]]]]], [0] * 9, "1")  # fmt: skip
BYTES_ALLOWED = 32 << 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("schedules") / "s.json"
    balanced(PROGRAM, TARGET, deps="tile").save(path)
    return json.loads(path.read_text())


def outcome(path, capsys) -> tuple[int, str]:
    """(exit code, everything that `cuk check` says), in bounded time and memory."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        code = cli.main(["check", str(path)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    said = capsys.readouterr()
    assert code in (0, 1, 2) and time.perf_counter() - start < 20 and peak < BYTES_ALLOWED, (code, peak, said)
    assert code != 2 or said.err.startswith("cuk check: "), said
    return code, said.out + said.err


def written(tmp_path, content) -> str:
    path = tmp_path / "s.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("field", ["format", *HEADER, "queues"])
def test_every_field_missing_or_with_nonsense_in_it_is_refused_by_name(whole, tmp_path, capsys, field):
    missing = {name: value for name, value in whole.items() if name != field}
    code, said = outcome(written(tmp_path, missing), capsys)
    assert code == 2 and f"field '{field}' is missing" in said
    for value in NASTY:
        code, said = outcome(written(tmp_path, {**whole, field: value}), capsys)
        if code == 2:  # of the file's form: a field's name, if not this one's then one's that no longer fits it
            assert f"field '{field}" in said or (field in ("ops", "num_counters", "num_waits") and "field 'queues[0][" in said), (
                value,
                said,
            )
        elif code == 1:  # well formed: the proof names what is wrong
            assert "REFUSED (" in said and field in (*MEANT, "fingerprint", "num_counters", "num_sms", "queues"), (value, said)
        else:
            assert field in MEANT or value == whole[field], (value, said)


MEANT = ("program", "machine", "scheduler", "deps", "num_sms", "teams", "stages", "dynamic", "num_waits")
"""Fields of which more than one value makes a schedule that can be proved."""


@pytest.mark.parametrize("part", ["spec", "limits"])
def test_what_is_inside_a_field_is_refused_too(whole, tmp_path, capsys, part):
    for name in whole[part]:
        for value in NASTY:
            code, said = outcome(written(tmp_path, {**whole, part: {**whole[part], name: value}}), capsys)
            same = value == whole[part][name] or name in ("context", "constants", "name")
            assert same or (code == 2 and f"field '{part}'" in said) or (code == 1 and "another" in said), (name, value, said)
        code, said = outcome(written(tmp_path, {**whole, part: {k: v for k, v in whole[part].items() if k != name}}), capsys)
        assert (code == 2 and (name in said or name == "shapes")) or name in ("context", "constants"), (name, said)


def places(given, at=()):
    """Every path into a JSON value."""
    yield at
    items = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list) else ()
    for key, value in items:
        yield from places(value, (*at, key))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), changes=st.integers(1, 3))
def test_a_file_with_anything_anywhere_ends_in_a_proof_or_an_error(whole, tmp_path, capsys, seed, changes):
    rng, content = random.Random(seed), copy.deepcopy(whole)
    for _ in range(changes):
        path = rng.choice(list(places(content)))
        if not path:
            continue
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        if rng.random() < 0.2:
            del inner[path[-1]]
        elif rng.random() < 0.2 and isinstance(inner, list):
            inner.insert(path[-1], copy.deepcopy(rng.choice(inner)))
        else:
            inner[path[-1]] = copy.deepcopy(rng.choice(NASTY))
    outcome(written(tmp_path, content), capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
        ("nonsense", "not JSON"),
        ("[]", "is a list, must be an object with format, program"),
        ("null", "is a NoneType, must be an object"),
        ("1" * 10_000, "not JSON"),
        ('{"format": NaN}', "NaN is no number"),
        ('{"format": -Infinity}', "-Infinity is no number"),
        ('{"teams": 1, "teams": 2}', "'teams' appears twice"),
        ("\ufeff{}", "not JSON"),
    ],
)
def test_what_is_no_schedule_at_all_is_refused(tmp_path, capsys, text, message):
    code, said = outcome(written(tmp_path, text), capsys)
    assert code == 2 and message in said


def test_bytes_that_are_no_text_and_files_that_are_no_files_are_refused(tmp_path, capsys):
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00{")
    assert outcome(tmp_path / "b.json", capsys) == (2, f"cuk check: {tmp_path / 'b.json'}: not JSON ('utf-8' codec can't decode byte 0xff in position 0: "
                                                       "invalid start byte); make the schedule again\n")  # fmt: skip
    for path in (tmp_path, tmp_path / "none.json"):
        code, said = outcome(path, capsys)
        assert code == 2 and "cannot be read" in said


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"num_counters": 2**31 - 1}, 1, "counters: the schedule has 2147483647, must be from 0 to 24"),
        ({"num_waits": 2**31 - 1}, 2, "field 'num_waits' is 2147483647, but no instruction has so many waits"),
        ({"num_sms": 2**31 - 1}, 1, "SMs: the schedule has 2147483647, must be from 1 to 3"),
        ({"num_sms": 0}, 1, "SMs: the schedule has 0"),
        ({"stages": 2**31 - 1}, 1, "stages: the schedule has 2147483647, must be from 1 to 64"),
        ({"teams": 2**31 - 1}, 1, "teams: the schedule has 2147483647, must be from 1 to 6"),
        ({"ops": [["a", "b", "c", 2**31 - 1]] * 8193}, 2, "field 'ops' has 8193 ops, must have at most 8192"),
        ({"queues": [[]] * 100_000}, 1, "queues: the schedule has 100000, must be from 1 to 3"),
        (
            {"queues": [[[0, 0, -1] + [0, 1] * 100_000]]},
            2,
            "field 'queues[0][0]' is [0, 0, -1, 0, 1, 0, 1, 0, ...], must be [op, task, signal] and up",
        ),
    ],
)
def test_a_claimed_number_costs_nothing(whole, tmp_path, capsys, change, code, message):
    found, said = outcome(written(tmp_path, {**whole, **change}), capsys)
    assert found == code and message in said, said


@pytest.mark.parametrize(
    "spec",
    [
        {"layers": 10**9},
        {"layers": 10**400},
        {"shapes": [[2**40, 32], [32, 64]]},
        {"shapes": [[64, 32], [32, 10**30]]},
        {"shapes": [[64]]},
        {"batch": 2**31},
        {"shapes": [["a", "b"]]},
    ],
    ids=lambda spec: str(spec)[:40],
)
def test_a_specification_of_something_gigantic_is_refused_though_its_fingerprint_fits(whole, tmp_path, capsys, spec):
    content = {**whole, "spec": {**whole["spec"], **spec}}
    try:
        program = chain(
            [tuple(s) for s in content["spec"]["shapes"]], batch=content["spec"]["batch"], layers=min(2, content["spec"]["layers"])
        )
        content["fingerprint"] = fingerprint(program, TARGET)
        content["ops"] = [[op.name, op.kind, op.task.struct, min(op.task.num_tasks, 2**31 - 1)] for op in program.ops]
    except (ValueError, TypeError):
        pass
    code, _ = outcome(written(tmp_path, content), capsys)
    assert code in (1, 2)


def test_ops_that_claim_billions_of_tasks_are_refused_without_counting_them(tmp_path):
    program = chain([(2**31 - 8, 8)])
    rows = round_robin(chain([(16, 8)]), TARGET)
    schedule = replace(rows, fingerprint=fingerprint(program, TARGET), ops=(replace(rows.ops[0], num_tasks=program.num_tasks),))
    tracemalloc.start()
    with pytest.raises(Refused, match=r"layer0\.linear0 task 2 is in no queue"):
        validate(schedule, program, TARGET)
    assert tracemalloc.get_traced_memory()[1] < BYTES_ALLOWED
    tracemalloc.stop()


# ---- made for something else ----
def test_the_fingerprint_says_all_that_differs():
    schedule = round_robin(PROGRAM, TARGET)
    for program, target, expected in (
        (PROGRAM, machine(4), ["machine"]),
        (chain([(64, 32), (32, 64)], layers=3), TARGET, ["program"]),
        (llama("llama-3.2-1b"), H200, ["machine", "program", "layout"]),
    ):
        with pytest.raises(Refused, match="the schedule is for another") as refused:
            validate(schedule, program, target)
        assert refused.value.reason == "fingerprint" and refused.value.witness["fields"] == expected
        assert all({"layout": "argument layout"}.get(name, name) in str(refused.value) for name in expected)
    for name in FINGERPRINT:
        with pytest.raises(Refused) as refused:
            validate(replace(schedule, fingerprint={**schedule.fingerprint, name: "0" * 64}), PROGRAM, TARGET)
        assert refused.value.witness["fields"] == [name]


@pytest.mark.parametrize("given_", [None, 5, "s.json", {}, [[0, 1]], round_robin])
def test_what_is_no_schedule_program_or_machine_is_refused(given_):
    schedule = round_robin(PROGRAM, TARGET)
    with pytest.raises(ValueError, match=r"schedule is a .*, must be a cuk\.Schedule"):
        validate(given_, PROGRAM, TARGET)
    with pytest.raises(ValueError, match=r"program is a .*, must be a cuk\.Program"):
        validate(schedule, given_, TARGET)
    with pytest.raises(ValueError, match=r"machine is a .*, must be a cuk\.Machine"):
        validate(schedule, PROGRAM, given_)
    with pytest.raises(ValueError, match=r"must be a cuk\.Schedule of chain"):
        simulate(given_, PROGRAM, np.ones(PROGRAM.num_tasks))
    for scheduler in SCHEDULERS.values():
        with pytest.raises(ValueError, match="program is a"):
            scheduler(given_, TARGET)
        with pytest.raises(ValueError, match="machine is a"):
            scheduler(PROGRAM, given_)


def test_an_empty_program_is_refused():
    nothing = Program("nothing")
    schedule = replace(round_robin(PROGRAM, TARGET), ops=(), fingerprint=fingerprint(nothing, TARGET))
    with pytest.raises(Refused, match=r"the program .* has no tasks"):
        validate(schedule, nothing, TARGET)


# ---- schedulers and assemble ----
@pytest.mark.parametrize("option", ["num_sms", "teams", "stages", "max_waits"])
@pytest.mark.parametrize("value", ["2", 2.0, True, -1, 0, 2**70, float("nan"), [], np.float64(2), "two", {}])
def test_options_of_the_wrong_type_are_named(option, value):
    for scheduler in SCHEDULERS.values():
        with pytest.raises(ValueError, match=rf"{option}=.*: must be .*from 1 to \d+"):
            scheduler(PROGRAM, TARGET, **{option: value})


@pytest.mark.parametrize("option", ["deps", "signals"])
@pytest.mark.parametrize("value", [None, 1, ["op"], b"op", "OP", {}])
def test_words_that_are_no_choice_are_named(option, value):
    for scheduler in SCHEDULERS.values():
        with pytest.raises(ValueError, match=rf"{option}=.*: must be '"):
            scheduler(PROGRAM, TARGET, **{option: value})


def test_numbers_of_numpy_are_numbers():
    assert round_robin(PROGRAM, TARGET, num_sms=np.int64(2), teams=np.uint8(1)) == round_robin(PROGRAM, TARGET, num_sms=2, teams=1)


@pytest.mark.parametrize(
    "reserved", [5, ["linear0"], {"linear0": "1"}, {"linear0": 0}, {"linear0": 3}, {"linear0": 2.5}, {3: 1}, {"linear0": 10**9}]
)
def test_reservations_that_are_none_are_named(reserved):
    with pytest.raises(ValueError, match="reserved"):
        waves(PROGRAM, TARGET, reserved=reserved)


@pytest.mark.parametrize(
    ("queues", "message"),
    [
        (None, "queues is a NoneType"),
        ([], "queues: there are 0, must be from 1 to 3"),
        ([[0]] * 4, "queues: there are 4, must be from 1 to 3"),
        ([[0, 99]], r"queues\[0\] has task 99: must be from 0 to 23"),
        ([[0], [-1]], r"queues\[1\] has task -1"),
        ([[0.5]], r"queues\[0\] is \[0.5\]: must be a sequence of whole numbers"),
        ([["0"]], r"queues\[0\] is"),
        ([[[0]]], r"queues\[0\] is"),
        ([5], r"queues\[0\] is 5"),
        ([[0, [1]]], r"queues\[0\] is"),
        ([[2**70]], r"queues\[0\] is"),
    ],
)
def test_queues_of_ones_own_are_checked(queues, message):
    with pytest.raises(ValueError, match=message):
        assemble(PROGRAM, TARGET, queues, scheduler="mine")


def test_a_shared_queue_is_one():
    with pytest.raises(ValueError, match="queues: there are 2, must be one"):
        assemble(PROGRAM, TARGET, [[0], [1]], scheduler="mine", dynamic=True)


# ---- words and arrays ----
@pytest.mark.parametrize("scheduler", [balanced, dynamic])
@pytest.mark.parametrize("value", [-(2**31), -2, -1, 0, 1, 77, 2**31 - 1])
def test_hostile_words_become_a_schedule_or_an_error(scheduler, value):
    schedule = scheduler(PROGRAM, TARGET)
    whole, header = schedule.encode(), schedule.header()
    for w in range(whole.shape[2]):
        for q, i in ((0, 0), (0, 1), (whole.shape[0] - 1, whole.shape[1] - 1)):
            words = whole.copy()
            words[q, i, w] = value
            try:
                made = Schedule.decode(words, header)
            except ValueError as error:
                assert "words" in str(error)
                continue
            assert np.array_equal(made.encode(), words)
            try:
                validate(made, PROGRAM, TARGET)
            except Refused:
                continue
            assert made == schedule or w > 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (None, "words is None"),
        (np.zeros((1, 2, 8)), r"words is .*float64"),
        (np.zeros((1, 2), np.int32), r"words \(1, 2\): must be \[queues, instructions, 8\]"),
        (np.zeros((0, 2, 8), np.int32), "words"),
        (np.zeros((1, 0, 8), np.int32), "words"),
        (np.zeros((1, 2, 12), np.int32), "must be"),
        (np.zeros((1, 2, 8), np.int32), "no end"),
        (np.full((1, 3, 8), -1, np.int32), "more than one word"),
        (np.full((1, 1, 8), 2**40), "words is"),
    ],
)
def test_words_of_the_wrong_form_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        Schedule.decode(words, round_robin(PROGRAM, TARGET).header())


@pytest.mark.parametrize("field", HEADER)
def test_a_header_of_the_wrong_form_is_refused(field):
    schedule = round_robin(PROGRAM, TARGET)
    words, header = schedule.encode(), schedule.header()
    for nothing in (None, [], {}, 5):
        with pytest.raises(ValueError, match="header: "):
            Schedule.decode(words, nothing)
    with pytest.raises(ValueError, match=f"header: field '{field}' is missing"):
        Schedule.decode(words, {k: v for k, v in header.items() if k != field})
    for value in (None, 0.5, b"x", float("nan"), object()):
        with pytest.raises(ValueError, match=f"header: field '{field}' is"):
            Schedule.decode(words, {**header, field: value})


@pytest.mark.parametrize("array", ["starts", "op", "task", "signal", "waits"])
@pytest.mark.parametrize("value", [None, 0, "x", [0.5], [2**40], [[0], [0, 1]], [None], [float("nan")], [True], {}, []])
def test_arrays_that_are_none_are_named(array, value):
    schedule = round_robin(PROGRAM, TARGET)
    with pytest.raises(ValueError, match=array):
        replace(schedule, **{array: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [("num_sms", [None, "3", 2.5, -1, True, 2**31]), ("num_counters", [None, -1, 2**40]), ("teams", [None, "2", 1.5, -1]), ("stages", [None, 0.5]),
     ("dynamic", [None, 1, "no"]), ("ops", [None, [], ("a",), (("a", "b", "c", 1),)]), ("spec", [None, 5, []]), ("limits", [None, "h200"]),
     ("fingerprint", [None, {"machine": 5}, {"other": "x"}]), ("program", [None, 5, "\x1b[31m", "a\nb"]), ("scheduler", [None, len]), ("deps", [None, 5])],
)  # fmt: skip
def test_fields_that_are_no_such_thing_are_named(field, values):
    schedule = round_robin(PROGRAM, TARGET)
    for value in values:
        with pytest.raises(ValueError, match=field):
            replace(schedule, **{field: value})


def test_an_instruction_of_no_op_has_no_words():
    schedule = round_robin(PROGRAM, TARGET)
    for op in (-1, 99):
        wrong = replace(schedule, op=np.full_like(schedule.op, op))
        with pytest.raises(ValueError, match=f"instruction 0 is of op {op}: there are 4 ops"):
            wrong.encode()
        with pytest.raises(Refused, match="there is no task"):
            validate(wrong, PROGRAM, TARGET)


def test_queues_too_uneven_for_words_are_refused_before_they_take_memory(monkeypatch):
    even = round_robin(PROGRAM, TARGET)
    schedule = with_queues(even, [[ins for q in range(3) for ins in even.queue(q)], [], []])
    monkeypatch.setattr("cuk.schedule.MAX_WORDS_BYTES", 1000)
    with pytest.raises(ValueError, match="queues of up to 24 instructions take 2400 bytes as words, must take at most 1000"):
        schedule.encode()


# ---- machines ----
@pytest.mark.parametrize("given_", [None, 5, "h200", [], [["name", "x"]]])
def test_a_machine_that_is_no_object_is_refused(given_):
    with pytest.raises(ValueError, match=r"mine\.json: is a .*, must be an object with name, "):
        Machine.from_json(given_, "mine.json")
    with pytest.raises(ValueError, match="unknown machine"):
        Machine.load(given_ if given_ != "h200" else "x" * 5000)


def test_every_field_of_a_machine_with_nonsense_in_it_is_named():
    whole = H200.to_json()
    for name in whole:
        for value in (*NASTY, float("nan"), float("inf")):
            try:
                made = Machine.from_json({**whole, name: value}, "mine.json")
            except ValueError as error:
                assert str(error).startswith("mine.json: field '") or str(error).startswith("mine.json: constant 'a'"), (name, value, error)
            else:
                assert made.num_sms <= 4096 and (name in ("name", "constants") or value in (0.5, 2**31, 1), (name, value))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"smem_per_cta_bytes": 233473}, "'smem_per_cta_bytes' is 233473, must be at most 'smem_per_sm_bytes', 233472"),
        ({"max_threads_per_cta": 4096}, "'max_threads_per_cta' is 4096, must be at most"),
        ({"num_sms": 10**9}, "'num_sms' is 1000000000, must be positive and at most 4096"),
        ({"clock_hz": float("nan")}, "'clock_hz' is nan"),
        ({"name": "\x1b[31m"}, "'name' is .*printable"),
        ({"compute_capability": [True, False]}, "'compute_capability' is"),
        ({"constants": {"c": {"value": float("nan"), "low": 0, "high": 1, "unit": "s", "source": "x"}}}, "constant 'c': value is nan"),
        ({"constants": {"c": {"value": 10**400, "low": 0, "high": 10**401, "unit": "s", "source": "x"}}}, "constant 'c': value is 1000"),
        ({"constants": {"c": {"value": 1, "low": 0, "high": 1, "unit": 5, "source": "x"}}}, "constant 'c': unit is 5"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Machine.from_json({**H200.to_json(), **change})


def test_a_machine_without_bandwidth_gives_no_times():
    bandwidth = replace(H200.constants["read_bytes_per_s"], value=0.0)
    with pytest.raises(ValueError, match=r"constant 'read_bytes_per_s' is 0\.0, must be positive"):
        estimate_us(PROGRAM, replace(H200, constants={"read_bytes_per_s": bandwidth}))


@pytest.mark.parametrize("durations", [None, "x", [1.0], np.full(24, np.nan), np.full(24, -1.0), np.full(24, np.inf)])
def test_durations_that_are_none_are_refused(durations):
    with pytest.raises(ValueError, match=r"durations_us|could not convert"):
        simulate(round_robin(PROGRAM, TARGET), PROGRAM, durations)


# ---- the command line ----
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("schedule nope -o {out}", "unknown program 'nope'"),
        ("schedule chain --scheduler best -o {out}", "unknown scheduler 'best': known ones are round_robin, balanced"),
        ("schedule chain --deps layer -o {out}", "deps='layer': must be 'op' or 'tile'"),
        ("schedule chain --signals never -o {out}", "signals='never'"),
        ("schedule chain --scheduler dynamic --signals last -o {out}", "signals='last': must be 'task'"),
        ("schedule chain --num-sms 0 -o {out}", "num_sms=0: must be from 1 to 132"),
        ("schedule chain --num-sms 133 -o {out}", "num_sms=133: must be from 1 to 132"),
        ("schedule chain --num-sms 99999999999999999999 -o {out}", "num_sms=99999999999999999999: must be"),
        ("schedule chain --teams 7 -o {out}", "teams=7: must be from 1 to 6"),
        ("schedule chain --stages 65 -o {out}", "stages=65: must be from 1 to 64"),
        ("schedule chain --batch 0 -o {out}", "batch=0: must be from 1 to 16"),
        ("schedule llama-3.2-1b --batch 0 -o {out}", "batch=0: must be from 1 to 16"),
        ("schedule llama-3.2-1b --context 9999999999 -o {out}", "context=9999999999: must be from 0"),
        ("schedule chain --machine ../h200 -o {out}", "unknown machine '../h200'"),
        ("schedule chain -o /nowhere/x/y.json", "/nowhere/x/y.json cannot be written"),
        ("schedule chain -o {folder}", "cannot be written"),
    ],
)
def test_bad_arguments_exit_2_and_write_nothing(tmp_path, capsys, line, message):
    (tmp_path / "folder").mkdir()
    if "/nowhere" in line:
        (tmp_path / "file").write_text("")
        line = line.replace("/nowhere", str(tmp_path / "file"))
        message = message.replace("/nowhere", str(tmp_path / "file"))
    assert cli.main(line.format(out=tmp_path / "s.json", folder=tmp_path / "folder").split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "s.json").exists()


@pytest.mark.parametrize(
    "line", ["schedule chain", "check", "schedule chain --teams x -o s", "schedule chain --stages 1.5 -o s", "nope", ""]
)
def test_bad_usage_exits_2(line, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(line.split())
    assert exit.value.code == 2 and "usage: cuk" in capsys.readouterr().err


def test_a_schedule_that_fits_no_cta_is_refused_with_1_and_not_written(tmp_path, capsys):
    assert cli.main(f"schedule chain --teams 6 --stages 64 -o {tmp_path / 's.json'}".split()) == 1
    assert "REFUSED (resource): shared memory: 64 stages" in capsys.readouterr().out and not (tmp_path / "s.json").exists()


@pytest.mark.parametrize(
    "arguments", ["llama-3.2-1b --context 64,512", "chain --scheduler dynamic", "qwen3-0.6b --deps tile --num-sms 8 --teams 1"]
)
def test_what_schedule_writes_check_proves(tmp_path, capsys, arguments):
    path = tmp_path / "s.json"
    assert cli.main([*f"schedule {arguments} -o {path} --json".split()]) == 0
    made = json.loads(capsys.readouterr().out)
    assert cli.main(["check", str(path), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert (made["proved"] and checked == {**made, "seconds": checked["seconds"]} | {k: v for k, v in checked.items() if k not in made}) or set(
        made) - set(checked) == {"file"}  # fmt: skip
    assert cli.main(["check", str(path), "--machine", "h200"]) == 0
