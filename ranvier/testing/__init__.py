"""Ranks for tests, references for comparison, faults to inject: public, because users need them too."""

from ranvier.testing.blocks import check_blocks
from ranvier.testing.split import SplitError, SplitOutcome, check_split

__all__ = ["SplitError", "SplitOutcome", "check_blocks", "check_split"]
