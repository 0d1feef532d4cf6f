"""The fixture `rig`: one rig a session, put in order again after each test that used it."""

import os
from collections.abc import Iterator

import pytest

from tests.rig.rig import Rig, unavailable


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """A rig that is up. Skips where there can be none, and fails there under CI=true."""
    if reason := unavailable():
        if os.environ.get("CI") == "true":
            pytest.fail(f"the rig's tests would be left out, which CI=true forbids: {reason}")
        pytest.skip(f"the rig's tests are left out: {reason}")
    with Rig() as rig:
        yield rig


@pytest.fixture(autouse=True)
def _order_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "rig" in request.fixturenames:
        request.getfixturevalue("rig").reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "rig" in getattr(item, "fixturenames", ()):
            item.add_marker("rig")
