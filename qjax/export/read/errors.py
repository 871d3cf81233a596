"""What a reader raises for a file that it cannot turn into a graph."""


class ReadError(ValueError):
    """A file that is damaged, or holds what qjax has no integers for; the message lists what and says what to do."""
