"""Ranks to test with, references to compare with, faults to inject: public, because users need them too."""

from ranvier.testing.split import SplitError, SplitOutcome, check_split

__all__ = ["SplitError", "SplitOutcome", "check_split"]
