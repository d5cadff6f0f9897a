"""Access to the fields of a JSON object that makes an unread field an error."""

from collections.abc import Mapping
from typing import Any

from megatron_untied.checkpoint.run_config import is_a

REQUIRED = object()


class Fields:
    """The fields of a JSON object, each to be taken once.

    A field that is left over may change the model, so :meth:`end` refuses it. A null field counts
    as missing.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        if not isinstance(values, Mapping):
            raise ValueError(f"{source} is {values!r}, which is no object; correct it")
        self.source = source
        self._names = values.keys()
        self._left = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str, default: Any = REQUIRED, kind: Any = None) -> Any:
        """The value of a field, which from now on is understood.

        Args:
            name: of the field.
            default: what it is if it is not there.
            kind: the type of its value, such as ``int``; None takes any.

        Raises:
            ValueError: it is not there and there is no default, or its value is of another type.
        """
        # REQUIRED doubles as "not there": None may be a default.
        value = self._left.pop(name, REQUIRED)
        if value is REQUIRED and default is REQUIRED:
            raise ValueError(f"{self.source} has no {name}; complete it")
        if value is REQUIRED:
            return default
        if kind is not None and not is_a(value, kind):
            noun = getattr(kind, "__name__", str(kind))
            raise ValueError(f"{self.source}: {name} is {value!r}, not of type {noun}; correct it")
        return value

    def take_or_null(self, name: str, kind: Any = None) -> Any:
        """The value of a field that has to be there, but may be null.

        For fields whose default in transformers is not null: null and missing differ there.

        Raises:
            ValueError: it is not there, or its value is of another type.
        """
        return self.take(name, None if name in self._names else REQUIRED, kind)

    def demand(self, name: str, supported: Any) -> None:
        """Remove a field that must be missing or have the value ``supported``.

        Raises:
            ValueError: it has another value.
        """
        # Compared by ==, so that 1 and 1.0 are the same value.
        value = self.take(name, supported)
        if value != supported:
            raise ValueError(
                f"{self.source}: {name} is {value!r}, and only {supported!r} is supported"
            )

    def drop(self, names: frozenset[str]) -> None:
        """Remove fields that do not affect the model."""
        for name in names:
            self._left.pop(name, None)

    def end(self) -> None:
        """Check that no field is left.

        Raises:
            ValueError: with the names and values of those that are.
        """
        if self._left:
            listed = ", ".join(f"{name} = {self._left[name]!r}" for name in sorted(self._left))
            raise ValueError(
                f"{self.source} has fields that are not understood and may change the model: "
                f"{listed}. Remove those that do not."
            )
