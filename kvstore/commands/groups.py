"""Options that several commands share, as one parameter: typer knows single options only."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter
from typing import Self, TypeVar, get_type_hints

Result = TypeVar("Result")


class OptionGroup(ABC):
    """What a command takes as one value although the command line has several options for it."""

    @classmethod
    @abstractmethod
    def parameters(cls) -> list[Parameter]:
        """The options, as keyword-only parameters that typer understands."""

    @classmethod
    @abstractmethod
    def gather(cls, given: Mapping[str, object]) -> Self:
        """The value, from what was given for these parameters."""


class FieldGroup(OptionGroup):
    """A group whose options are the fields of a dataclass, each annotated as typer wants it."""

    @classmethod
    def parameters(cls) -> list[Parameter]:
        hints = get_type_hints(cls, include_extras=True)
        return [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
            for field in fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass
        ]

    @classmethod
    def gather(cls, given: Mapping[str, object]) -> Self:
        return cls(**given)


def grouped(command: Callable[..., Result]) -> Callable[..., Result]:
    """``command`` with each parameter that is an OptionGroup replaced by the options of the group."""
    own = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: parameter.annotation
        for name, parameter in own.items()
        if inspect.isclass(parameter.annotation) and issubclass(parameter.annotation, OptionGroup)
    }
    flat: list[Parameter] = []
    for name, parameter in own.items():
        if name in groups:
            flat += groups[name].parameters()
        else:
            flat.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def call(**given: object) -> Result:
        gathered = {
            name: group.gather({option.name: given.pop(option.name) for option in group.parameters()})
            for name, group in groups.items()
        }
        return command(**given, **gathered)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]  # what inspect looks for
    return call
