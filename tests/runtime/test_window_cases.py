"""The window: whatever a user does around forward and backward gives what plain PyTorch gives."""

import pytest

from support.benches import Case, assert_equal_to_plain
from support.windows import (
    window_cases,
    window_cases_compiled,
    window_cases_hosts,
    window_cases_interrupted,
    window_cases_users,
)

GROUPS = (window_cases, window_cases_hosts, window_cases_compiled, window_cases_interrupted, window_cases_users)
CASES = [case for group in GROUPS for case in group.CASES]

# torch.compile looks at `.grad` of what it traces and hides the warning where warnings are no errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.cases(12)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gives_what_plain_pytorch_gives_with_room_for_some_weights(case: Case) -> None:
    assert_equal_to_plain(case, tight=True)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gives_what_plain_pytorch_gives_with_room_for_all(case: Case) -> None:
    assert_equal_to_plain(case, tight=False)
