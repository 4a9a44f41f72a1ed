"""The text form: it says everything, and what cannot be read is named by line and word."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext.errors import HydraError, InvalidSchedule
from hydra_ext.schedule import Schedule, make
from support.schedules import made, square_shapes, wrapped_shapes

pytestmark = pytest.mark.every_case

RULES = ("flush", "delay-1", "stashing", "vertical-sync")


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A header and the ranks' lines, as they are printed; not of anything that could run."""
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    homes = [draw(st.integers(0, stage)) for stage in range(stages)]
    homes = [sorted(set(homes)).index(home) for home in homes]  # no rank without a stage
    ranks: list[list[str]] = [[] for _ in set(homes)]
    for stage, rank in enumerate(homes):
        letters = ["F", "B", "R", "BU", "U"]
        letters += ["SF", "RB"] if stage < stages - 1 else []
        letters += ["SB", "RF"] if stage > 0 else []
        for kind in draw(st.lists(st.sampled_from(letters), min_size=1, max_size=12)):
            microbatch = "" if kind in ("R", "BU", "U") else f".{draw(st.integers(0, microbatches - 1))}"
            before = draw(st.sampled_from(["", "", "-1", "-2", "-17"]))
            ranks[rank].append(f"{kind}{stage}{microbatch}{before}")
    rule = draw(st.sampled_from(RULES))
    header = f"hydra-schedule 1 stages={stages} ranks={len(ranks)} microbatches={microbatches} versions={rule}"
    return header, [f"rank {rank}: {' '.join(words)}" for rank, words in enumerate(ranks)]


@settings(deadline=None)
@given(texts())
def test_what_is_printed_is_what_was_read(text: tuple[str, list[str]]) -> None:
    header, lines = text
    printed = "\n".join([header, *lines, ""])
    schedule = Schedule.parse(printed)
    assert str(schedule) == schedule.text == printed
    assert Schedule.parse(schedule.text) == schedule
    assert hash(Schedule.parse(schedule.text)) == hash(schedule)
    for rank, line in enumerate(lines):
        said = [action.token + (str(action.batch) if action.batch else "") for action in schedule.body(rank)]
        assert said == line.split()[2:]


@settings(max_examples=100, deadline=None)
@given(texts(), st.randoms(use_true_random=False))
def test_comments_blanks_and_the_order_of_ranks_and_fields_do_not_matter(
    text: tuple[str, list[str]], dice: random.Random
) -> None:
    header, lines = text
    fields = header.split()[2:]
    dice.shuffle(fields)
    shuffled = list(lines)
    dice.shuffle(shuffled)
    words = [["hydra-schedule", "1", *fields], *(line.split() for line in shuffled)]
    noisy = ["# a comment", ""]
    for line in words:
        noisy += ["".join(word + dice.choice([" ", "  ", "\t"]) for word in line) + dice.choice(["", "# F9.9", "\r"])]
        noisy += dice.choice([[], ["   "], ["#"]])
    assert Schedule.parse("\n".join(noisy)) == Schedule.parse("\n".join([header, *lines]))


@pytest.mark.parametrize(
    "shape", [*square_shapes((1, 3, 8), (1, 8, 20)), *wrapped_shapes((1, 2, 4), (2, 3), (4, 5))], ids=str
)
def test_built_in_schedules_are_the_same_from_their_text(shape: tuple[str, int, int, int]) -> None:
    schedule = made(shape)
    for each in (schedule, schedule.with_communication()):
        again = Schedule.parse(each.text)
        assert again == each
        assert again.version_rule == each.version_rule
        assert [again.stages_of(rank) for rank in range(again.ranks)] == [
            each.stages_of(rank) for rank in range(each.ranks)
        ]
    assert schedule.stages_of(0) == list(range(0, schedule.stages, schedule.ranks))


def test_schedules_differ_by_what_they_say() -> None:
    schedule = make("1f1b", stages=2, microbatches=2)
    assert schedule != make("gpipe", stages=2, microbatches=2)
    assert schedule != Schedule.parse(schedule.text.replace("flush", "delay-1"))
    assert schedule != schedule.with_communication()
    assert schedule != schedule.text
    assert make("2bw", stages=1, microbatches=2) != make("2bw", stages=1, microbatches=3)


HEADER = "hydra-schedule 1 stages=2 ranks=2 microbatches=3 versions=flush"
GOOD = [HEADER, "rank 0: F0.0", "rank 1: F1.0"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the text is empty; begin it with a line such as 'hydra-schedule 1 stages=4"),
        (["# only this"], "the text is empty"),
        (["rank 0: F0.0"], "line 1, 'rank': a schedule begins with a line such as"),
        (["", "hydra-schedule 2 stages=2"], "line 2, '2': only format 1 is supported"),
        (["hydra-schedule"], "line 1: only format 1 is supported"),
        ([HEADER.replace(" versions=flush", "")], "line 1: stages=, .* are all needed"),
        ([HEADER.replace("stages=2", "stages=0")], "line 1, 'stages=0': a number from 1 to 4096"),
        ([HEADER.replace("stages=2", "stages=99999999999")], "line 1, 'stages=99999999999': a number from 1"),
        ([HEADER.replace("stages=2", "stages=-2")], "line 1, 'stages=-2': a number from 1"),
        ([HEADER.replace("stages=2", "stages=2x")], "line 1, 'stages=2x': a number from 1"),
        ([HEADER.replace("ranks=2", "ranks=")], "line 1, 'ranks=': a number from 1"),
        ([HEADER + " stages=2"], "line 1, 'stages=2': stages=, .* are expected, each once"),
        ([HEADER + " depth=2"], "line 1, 'depth=2': stages=, .* are expected, each once"),
        ([HEADER + " quick"], "line 1, 'quick': stages=, .* are expected, each once"),
        ([HEADER.replace("flush", "delay-2")], "line 1, 'versions=delay-2': flush, delay-1, stashing or vertical"),
        ([*GOOD, "rang 1: F1.0"], "line 4, 'rang': 'rank N:' is expected"),
        ([*GOOD, "rank 1 F1.0"], "line 4, 'rank': 'rank N:' is expected"),
        ([*GOOD, "rank"], "line 4, 'rank': 'rank N:' is expected"),
        ([*GOOD, "rank 2: F1.0"], "line 4, '2:': the header has ranks 0 to 1"),
        ([*GOOD, "rank 1: F1.0"], "line 4, '1:': the rank has line 3 already"),
        (GOOD[:2], "there is no line for rank 1; each of the 2 ranks needs one"),
        ([*GOOD[:2], "rank 1:"], "rank 1 has no actions"),
        ([HEADER, "rank 0: F0.0 Q0.1"], "line 2, 'Q0.1': an action is such as F0.3"),
        ([HEADER, "rank 0: F0"], "line 2, 'F0': an action is such as F0.3"),
        ([HEADER, "rank 0: F0."], "line 2, 'F0.': an action"),
        ([HEADER, "rank 0: F.0"], "line 2, 'F.0': an action"),
        ([HEADER, "rank 0: F0.0-"], "line 2, 'F0.0-': an action"),
        ([HEADER, "rank 0: F0.0--1"], "line 2, 'F0.0--1': an action"),
        ([HEADER, "rank 0: F0.0+1"], r"line 2, 'F0.0\+1': an action"),
        ([HEADER, "rank 0: F-1.0"], "line 2, 'F-1.0': an action"),
        ([HEADER, "rank 0: R0.0"], "line 2, 'R0.0': an action"),
        ([HEADER, "rank 0: BU0.0"], "line 2, 'BU0.0': an action"),
        ([HEADER, "rank 0: f0.0"], "line 2, 'f0.0': an action"),
        ([HEADER, "rank 0: F0.99999999999"], "line 2, 'F0.99999999999': an action"),
        ([HEADER, "rank 0: F0.3"], "line 2, 'F0.3': microbatch 3; there are 0 to 2"),
        ([HEADER, "rank 0: F2.0"], "line 2, 'F2.0': stage 2; there are 0 to 1"),
        ([HEADER, "rank 0: F0.0-5000"], "line 2, 'F0.0-5000': batch -5000, counted from that of the step; give 0 to"),
        ([HEADER, "rank 0: SB0.0"], "line 2, 'SB0.0': there is no stage before it to exchange anything with"),
        ([HEADER, "rank 0: F0.0", "rank 1: SF1.0"], "line 3, 'SF1.0': there is no stage after it"),
        ([HEADER, "rank 0: F0.0", "rank 1: F1.0 B0.0"], "line 3, 'B0.0': stage 0 is on rank 0 already"),
        ([HEADER.replace("s=2", "s=3", 1), *GOOD[1:]], "stage 2 of 3 is on no rank"),
    ],
)
def test_what_cannot_be_read_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(InvalidSchedule) as raised:
        Schedule.parse("\n".join(lines))
    assert re.match(message, str(raised.value)), raised.value
    assert isinstance(raised.value, (HydraError, ValueError))


@settings(deadline=None)
@given(st.text(alphabet="hydra-schedule 1=02FBRUS.:#\n\t\0é", max_size=80))
def test_no_text_does_anything_but_parse_or_raise(text: str) -> None:
    for attempt in (text, "\n".join([*GOOD, text]), HEADER + text):
        try:
            Schedule.parse(attempt)
        except InvalidSchedule:
            continue
