"""The one exception of the library."""


class ShortlistError(ValueError):
    """An argument breaks a rule; the message names the argument, the rule and the value."""
