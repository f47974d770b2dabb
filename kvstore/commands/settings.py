"""``config``: the settings that hold, and where each comes from."""

from __future__ import annotations

from kvstore.commands.output import Answer, Grid
from kvstore.settings import LoadedConfig


def describe_config(loaded: LoadedConfig) -> Answer:
    """Every setting with its source; secrets are masked in either form."""
    rows = loaded.describe()
    facts = {row.field: {"value": row.value, "source": row.source} for row in rows}
    grid = Grid(("setting", "value", "from"), [(row.field, row.value, row.source.value) for row in rows])
    return Answer(facts, [grid])
