"""The tree of errors: what scripts rely on."""

import re
from pathlib import Path

from controller import errors
from controller.command_line import BROKEN_PIPE
from controller.errors import INTERNAL_EXIT_CODE, ConnectionLostError, DflashctlError, UnreachableError


def leaves() -> list[type[DflashctlError]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, DflashctlError) and value is not DflashctlError
    ]


def test_every_leaf_has_an_exit_code_of_its_own_within_dflashctls_range() -> None:
    codes = [leaf.exit_code for leaf in leaves()]
    assert len(set(codes)) == len(codes)
    assert all(64 <= code < INTERNAL_EXIT_CODE for code in codes)


def test_the_documented_codes_stay() -> None:
    assert {leaf.__name__: leaf.exit_code for leaf in leaves()} == {
        "UsageError": 64,
        "InventoryError": 65,
        "UnreachableError": 66,
        "HostKeyError": 67,
        "AuthenticationError": 68,
        "PctError": 69,
        "ContainerError": 70,
        "PayloadEnvironmentError": 71,
        "ShipError": 72,
        "LaunchError": 73,
        "RunLostError": 74,
        "ProtocolError": 75,
        "ConnectionLostError": 76,
        "LocalStateError": 77,
        "GpusInUseError": 78,
        "NotInTimeError": 79,
        "InterruptedByUser": 80,
        "PullError": 81,
        "CheckpointError": 82,
        "ToolError": 83,
    }


def test_the_page_about_exit_codes_has_every_one_with_its_error() -> None:
    page = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| (\w+)", page, re.MULTILINE))
    assert rows == {str(leaf.exit_code): leaf.__name__ for leaf in leaves()} | {
        str(INTERNAL_EXIT_CODE): "defect",
        str(BROKEN_PIPE): "pipe",
    }


def test_an_unreachable_host_is_a_lost_connection_to_whoever_tries_again() -> None:
    assert issubclass(UnreachableError, ConnectionLostError)


def test_an_error_carries_its_sentence_and_its_hint() -> None:
    error = UnreachableError("no answer", "switch it on")
    assert (str(error), error.message, error.hint) == ("no answer", "no answer", "switch it on")
