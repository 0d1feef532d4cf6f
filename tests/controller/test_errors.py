"""The tree of errors: what scripts rely on."""

from controller import errors
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
        "InterruptedByUser": 80,
    }


def test_an_unreachable_host_is_a_lost_connection_to_whoever_tries_again() -> None:
    assert issubclass(UnreachableError, ConnectionLostError)


def test_an_error_carries_its_sentence_and_its_hint() -> None:
    error = UnreachableError("no answer", "switch it on")
    assert (str(error), error.message, error.hint) == ("no answer", "no answer", "switch it on")
