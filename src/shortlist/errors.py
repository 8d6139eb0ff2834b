"""The exception that the library raises."""


class ShortlistError(ValueError):
    """An invalid argument. The message names the argument, the rule and the value."""
