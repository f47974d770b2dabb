"""What tests of several modules share because it is slow to make."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.chat_model import save_chat_model
from tests.support.prefill_workers import Forks


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts workers on the tiny chat model in a moment."""
    folder = tmp_path_factory.mktemp("workers")
    made = Forks(save_chat_model(folder), folder)
    yield made
    made.close()
