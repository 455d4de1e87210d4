"""The one exception that users are meant to see."""


class SurgeryError(Exception):
    """Bad input or an impossible request.

    The message is one line that says what is wrong, where, and what to do. The command line prints it without a
    traceback and exits with 1.
    """
